"""What the tools of a request let a model write, in the form of every family."""

from __future__ import annotations

import json
import logging
from functools import cache
from typing import Any

import pytest
from structured.checks import bench
from structured.schemas import ENDLESS

from engine import StructuredOutputsParams
from engine.messages.requests import CompletionOutput
from engine.server.errors import ApiError
from engine.server.speech.families import FAMILIES, TOOL_FAMILIES, Calls
from engine.server.speech.forms import form_of_answer
from engine.server.speech.tools import Tools, tools_of
from engine.server.speech.turns import ChatFormat

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
ROME = {"city": "Rome", "days": 3}
BONN = {"city": "Bonn", "days": 1}
ANSWER = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
FORM = StructuredOutputsParams(json={**ANSWER, "additionalProperties": False})
NAMED = {"type": "function", "function": {"name": "weather"}}


@cache
def speech_of(family: str) -> ChatFormat:
    signs = next(f.signs for f in reversed(FAMILIES) if f.name == family)
    found = ChatFormat(bench().tokenizer, "".join(signs))
    assert found.family is not None and found.family.name == family
    return found


def tool(name: str, parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def tools(*given: dict[str, Any], choice: Any = None, parallel: bool | None = None) -> Tools:
    found = tools_of(list(given), choice, parallel)
    assert found is not None
    return found


def call(calls: Calls, name: str, arguments: dict[str, Any]) -> str:
    """A call as a model of the family writes it."""
    begin, end = calls.begin.replace("{name}", name), calls.end
    if calls.form == "object":
        body = json.dumps({"name": name, calls.key: arguments})
    elif calls.form == "arguments":
        body = json.dumps(arguments)
    else:
        tags = ("<parameter={}>\n", "\n</parameter>\n")
        if calls.form == "pairs":
            tags = ("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n")
        texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
        body = "".join(tags[0].format(key) + text + tags[1] for key, text in texts.items())
    return begin + body + end


def many(calls: Calls, *written: str) -> str:
    return calls.before + (calls.between or "").join(written) + calls.after


def takes(family: str, given: Tools, text: str, form: Any = None) -> bool:
    found = form_of_answer(speech_of(family), given, form, "")
    assert found is not None
    return bench().takes(found, text)


families = pytest.mark.parametrize("family", TOOL_FAMILIES)


@families
@pytest.mark.parametrize("is_strict", [False, True])
def test_a_named_tool_is_called_once(family: str, is_strict: bool) -> None:
    calls = speech_of(family).calls
    both = [tool("weather", CITY, strict=is_strict), tool("other", NOTHING)]
    rome, wrong = call(calls, "weather", ROME), call(calls, "weather", {**ROME, "days": 10})
    other = call(calls, "other", {})
    for choice, parallel in ((NAMED, None), (NAMED, True), ("required", False)):
        given = tools(*both, choice=choice, parallel=parallel)
        assert takes(family, given, many(calls, rome))
        for text in (
            many(calls, rome, rome),
            "",
            "Hi",
            f"Hi{many(calls, rome)}",
            many(calls, wrong),
        ):
            assert not takes(family, given, text), text
        assert takes(family, given, many(calls, other)) == (choice == "required")


@families
def test_at_least_one_call_is_required(family: str) -> None:
    calls = speech_of(family).calls
    given = tools(tool("weather", CITY), tool("other", NOTHING), choice="required")
    rome, other = call(calls, "weather", ROME), call(calls, "other", {})
    assert takes(family, given, many(calls, other)) and not takes(family, given, "")
    assert takes(family, given, many(calls, rome, other, rome)) == (calls.between is not None)
    assert takes(family, given, many(calls, rome), FORM), "there is no text that the form is of"
    assert not takes(family, given, '{"ok": true}', FORM)


@families
@pytest.mark.parametrize("is_strict", [False, True])
def test_an_answer_is_calls_or_text_in_its_form(family: str, is_strict: bool) -> None:
    calls = speech_of(family).calls
    given = tools(tool("weather", CITY, strict=is_strict))
    rome = call(calls, "weather", ROME)
    assert takes(family, given, many(calls, rome), FORM)
    assert takes(family, given, '{"ok":true}', FORM)
    for text in (
        "Hi",
        '{"ok":1}',
        many(calls, call(calls, "weather", BONN)),
    ):
        assert not takes(family, given, text, FORM), text
    words = StructuredOutputsParams(regex="[a-z]{3}")
    spaced = StructuredOutputsParams(json={"const": {"a": [1]}}, whitespace_pattern=" ")
    for form, right, wrong in ((words, "yes", "y"), (spaced, '{ "a" : [ 1 ] }', '{"a":[1]}')):
        assert takes(family, given, right, form) and not takes(family, given, wrong, form)
        assert takes(family, given, many(calls, rome), form)


WILD: dict[str, Any] = {
    "a keyword that the library has not, and a file": {"$ref": "https://example.org/other.json"},
    "a reference to nothing": {"properties": {"x": {"$ref": "#/$defs/none"}}},
    "a type that is none": {"properties": {"x": {"type": "any"}}},
    "no value is valid": {"properties": {"x": False}, "required": ["x"]},
    "an empty enum": {"properties": {"x": {"enum": []}}, "required": ["x"]},
    "no end": {"properties": {"x": {"$ref": "#"}}, "required": ["x"]},
    "no end in a list": {
        "properties": {"x": {"type": "array", "items": {"$ref": "#/properties/x"}, "minItems": 1}},
        "required": ["x"],
    },
    "a broken expression": {"properties": {"x": {"type": "string", "pattern": "(a"}}},
    "a minimum above the maximum": {
        "properties": {"x": {"type": "integer", "minimum": 2, "maximum": 1}}, "required": ["x"],
    },
    "too large": {"properties": {f"p{n}": {} for n in range(26_000)}},
}  # fmt: skip


@pytest.mark.parametrize("name", WILD)
@pytest.mark.parametrize("family", ["hermes", "generic", "llama3-json", "mistral", "gpt-oss"])
def test_a_schema_that_cannot_be_is_dropped_for_its_tool_alone(
    family: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls = speech_of(family).calls
    wild = {"type": "object", **WILD[name]}
    given = tools(tool("wild", wild), tool("weather", CITY), choice="required")
    with caplog.at_level(logging.WARNING, logger="engine.server"):
        assert takes(family, given, many(calls, call(calls, "wild", {"anything": [1, None]})))
    assert any("the tool wild are not enforced" in each.message for each in caplog.records)
    assert not takes(family, given, many(calls, call(calls, "weather", {"anything": [1]})))
    assert takes(family, given, many(calls, call(calls, "weather", ROME)))
    with pytest.raises(
        ApiError, match="the tool wild, which is strict, cannot be enforced"
    ) as told:
        takes(family, tools(tool("wild", wild, strict=True), tool("weather", CITY)), "")
    assert told.value.status == 400 and told.value.param == "tools"


@pytest.mark.parametrize("name", ENDLESS)
def test_strict_arguments_without_an_end_are_refused(name: str) -> None:
    parameters = {**ENDLESS[name], "type": "object"}
    with pytest.raises(ApiError, match=r"tool wild, which is strict, .* no finite value"):
        takes("hermes", tools(tool("wild", parameters, strict=True)), "")


@families
def test_references_lead_to_where_the_schema_is(family: str) -> None:
    calls = speech_of(family).calls
    tree = {
        "type": "object",
        "properties": {
            "same": {"$ref": "#/properties/left"},
            "left": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
        },
        "required": ["same", "left"],
        "additionalProperties": False,
    }
    given = tools(tool("grow", tree, strict=True), choice="required")
    leaf = {"same": None, "left": None}
    for value, is_right in ((None, True), (leaf, True), ({"same": None}, False), (1, False)):
        text = many(calls, call(calls, "grow", {"same": value, "left": leaf}))
        assert takes(family, given, text) == is_right, text


@pytest.mark.parametrize("identity", ["https://example.org/tool.json", "tool"])
def test_a_schema_with_a_name_keeps_its_references(identity: str) -> None:
    schema = {**CITY, "$id": identity, "$defs": {"city": {"const": "Rome"}}}
    schema["properties"] = {**CITY["properties"], "city": {"$ref": "#/$defs/city"}}
    calls = speech_of("hermes").calls
    given = tools(tool("weather", schema, strict=True), choice="required")
    assert takes("hermes", given, many(calls, call(calls, "weather", ROME)))
    paris = call(calls, "weather", {**ROME, "city": "Paris"})
    assert not takes("hermes", given, many(calls, paris))


@families
def test_strict_arguments_and_free_text(family: str) -> None:
    calls = speech_of(family).calls
    given = tools(tool("weather", CITY, strict=True))
    rome = call(calls, "weather", ROME)
    assert takes(family, given, "Hi") and takes(family, given, many(calls, rome))
    said = "Hi\n"
    if calls.before_text:
        said = f"{calls.before_text[1]}Hi{calls.message_end}"
        assert takes(family, given, f"{calls.before_text[0]}So{calls.message_end}{calls.text}Hi")
    opener = (calls.before or calls.begin).strip()
    assert takes(family, given, said + many(calls, rome)) == bool(opener)
    assert takes(family, given, 'Hi {"name": "Bob"}\n```json\n{"type": 1}\n```')


@families
def test_nothing_that_is_read_as_a_call_goes_around_a_strict_schema(family: str) -> None:
    """Readers take calls without their markers, too: no text may have one."""
    speech = speech_of(family)
    given = tools(tool("weather", CITY, strict=True), tool("other", NOTHING))
    calls = speech.calls
    wrong = json.dumps(BONN)
    slips = [
        many(calls, call(calls, "weather", BONN)),
        call(calls, "weather", BONN),
        f'{{"name": "weather", "arguments": {wrong}}}',
        f'[{{"name": "weather", "arguments": {wrong}}}]',
        f'```json\n{{"name": "functions.weather", "parameters": {wrong}}}\n```',
        f'{{"arguments": {wrong}, "name": "weather"}}',
        f'{{"type": "function", "function": {{"name": "weather", "arguments": {wrong}}}}}',
        f'{{"function": "weather", "args": {wrong}}}',
        f"<tool_call>{{'name': 'weather', 'arguments': {wrong}}}</tool_call>",
        f"[TOOL_CALLS]weather[ARGS]{wrong}",
        "<function=weather>\n<parameter=city>\nBonn\n</parameter>\n</function>",
    ]
    right = many(calls, call(calls, "weather", ROME))
    for slip in slips:
        for text in (slip, f"\n{slip}", f"Hi\n{slip}", f"{right}{slip}", f"{right}\n{slip}"):
            ids = bench().tokenizer.encode(text, add_special_tokens=False)
            prompt = {"prompt": "", "prompt_token_ids": [1]}
            turn = speech.begin(prompt, tools=given.read_as, skip_special=True)
            turn.read(CompletionOutput(0, text, ids, None, finish_reason="stop"))
            called = [each for each in turn.calls if json.loads(each.arguments) != ROME]
            assert not (called and takes(family, given, text)), text


def test_too_much_as_a_whole_goes_without_schemas(caplog: pytest.LogCaptureFixture) -> None:
    wide = {"properties": {f"p{n}": {"enum": [f"{n}a", f"{n}b"]} for n in range(300)}}
    given = [tool(f"t{n}", {"type": "object", **wide}) for n in range(30)]
    calls = speech_of("hermes").calls
    with caplog.at_level(logging.WARNING, logger="engine.server"):
        found = tools(*given, tool("weather", CITY, strict=True), choice="required")
        text = many(calls, call(calls, "t3", {"p1": 5}))
        assert takes("hermes", found, text)
    assert not takes("hermes", found, many(calls, call(calls, "weather", {"city": 1})))


def test_thinking_comes_before_all_of_it() -> None:
    speech = ChatFormat(bench().tokenizer, "<tool_call><think>")
    rome = many(speech.calls, call(speech.calls, "weather", ROME))
    spaced = StructuredOutputsParams(json={"const": {"a": 1}}, whitespace_pattern=" ")
    for given, text, right, wrong in (
        (tools(tool("weather", CITY)), FORM, ['{"ok":true}', rome], ["Hi"]),
        (tools(tool("weather", CITY), choice=NAMED), FORM, [rome], ['{"ok":true}']),
        (None, spaced, ['{ "a" : 1 }'], ['{"a":1}', rome]),
    ):
        form = form_of_answer(speech, given, text, "")
        assert form is not None
        for each in right:
            assert bench().takes(form, each)
            assert bench().takes(form, f"<think>so {{</think>\n\n{each}")
        for each in wrong:
            assert not bench().takes(form, f"<think>so</think>\n{each}")


@families
def test_many_tools(family: str) -> None:
    names = [f"mcp__server_{n % 7}__{'read' if n % 2 else 'write'}_thing_{n}" for n in range(100)]
    calls = speech_of(family).calls
    said = "" if calls.before_text or not (calls.before + calls.begin) else "Hi\n"
    right = many(calls, call(calls, names[-1], ROME))
    given = [tool(name, CITY, strict=True) for name in names]
    text = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    plain = [tool(name, text, strict=True) for name in names]
    assert takes(family, tools(*given), said + right)
    rome = many(calls, call(calls, names[-1], {"city": "Rome"}))
    assert takes(family, tools(*plain), said + rome)
    assert takes(family, tools(*given), 'Hi, {"name": "Bob"} is it')
    assert takes(family, tools(*given, choice="required"), right)


@pytest.mark.parametrize(
    ("more", "right", "wrong"),
    [
        ({"uniqueItems": True}, [1, 2], [1, 1]),
        ({"not": {"type": "string"}}, 1, "a"),
        ({"if": {"type": "string"}, "then": {"minLength": 1}}, "a", ""),
        ({"propertyNames": {"pattern": "^a"}}, {"a": 1}, {"b": 1}),
        ({"dependentRequired": {"a": ["b"]}}, {"a": 1, "b": 1}, {"a": 1}),
        ({"contains": {"const": 1}}, [0, 1], [0]),
        ({"x-guidance": {"lenient": False}}, [1, 1], None),
        ({"format": "klingon"}, [1, 1], None),
        ({"nullable": True, "example": 1, "deprecated": True}, [1, 1], None),
    ],
)
def test_keywords_are_enforced_for_any_tool_and_unknown_ones_passed_over(
    more: dict[str, Any], right: Any, wrong: Any
) -> None:
    schema = {**CITY, "properties": {**CITY["properties"], "more": more}}
    calls = speech_of("hermes").calls
    given = tools(tool("weather", schema), choice="required")
    assert takes("hermes", given, many(calls, call(calls, "weather", {**ROME, "more": right})))
    if wrong is not None:
        written = many(calls, call(calls, "weather", {**ROME, "more": wrong}))
        assert not takes("hermes", given, written)
    assert not takes("hermes", given, many(calls, call(calls, "weather", BONN)))


@families
def test_a_strict_tool_is_checked_in_every_family(family: str) -> None:
    unique = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    schema = {
        "type": "object",
        "properties": {"tags": unique, "others": unique},
        "required": ["tags", "others"],
        "additionalProperties": False,
    }
    loose = {**schema, "properties": {name: {"type": "array"} for name in ("tags", "others")}}
    calls = speech_of(family).calls
    own = [tool("find", schema, strict=True), tool("found", loose, strict=True)]
    for choice in ("auto", "required"):
        given = tools(*own, choice=choice)
        for name, others, is_right in (
            ("find", [2, 1], True),
            ("find", [2, 2], False),
            ("found", [2, 2], True),
        ):
            made = call(calls, name, {"tags": [1, 2], "others": others})
            assert takes(family, given, many(calls, made)) == is_right, (choice, name, others)
    second = [call(calls, "find", {"tags": [1], "others": each}) for each in ([1, 2], [1, 1])]
    if calls.between is not None:
        first = call(calls, "found", {"tags": [1, 1], "others": []})
        for made, is_right in zip(second, (True, False), strict=True):
            assert takes(family, tools(*own), many(calls, first, made)) == is_right

"""What xgrammar is given, and what is refused before; with it, what its masks let pass."""

from __future__ import annotations

import json
import re
from datetime import date, timedelta
from threading import Event
from typing import Any

import pytest
from llguidance import LLTokenizer
from structured.checks import bench
from structured.judges import json_judge
from support.patience import WAIT_SECONDS

from engine import RequestError, StructuredOutputsParams
from engine.messages.structured import grammar_from, grammar_of
from engine.structured.guidance import GrammarError, GuidanceCompiler
from engine.structured.schemas import SchemaError
from engine.structured.xgrammar.compiler import XGrammars, source_of
from engine.structured.xgrammar.narrowed import narrowed
from engine.structured.xgrammar.patterns import of_whole_text


def kind(*names: str, **properties: Any) -> dict[str, Any]:
    """An object that says of which kind it is."""
    properties = {"kind": {"enum": list(names)}, **properties}
    return {"type": "object", "properties": properties, "required": list(properties)}


NULLS = {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"type": "null"}}
# What both libraries enforce, with a checker next to them or without: the schema, right texts and
# wrong ones.
TAKEN: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "arrays of one or of three": (
        {"oneOf": [{"type": "array", "maxItems": 1}, {"type": "array", "minItems": 3}]},
        ["[]", "[{}]", "[1,2,3,4]"],
        ["[1,2]", "1"],
    ),
    "ranges of numbers": (
        {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 5}]},
        ["-7", "3", "5", "80"],
        ["4", "3.5", '"5"'],
    ),
    "lengths of texts": (
        {"oneOf": [{"type": "string", "maxLength": 1}, {"type": "string", "minLength": 3}]},
        ['""', '"a"', '"abcd"'],
        ['"ab"', '"\t"'],
    ),
    "numbers, of which whole ones are in two choices": (
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        ["1.5", "-0.25"],
        ["1", "-20", '"1"'],
    ),
    "kinds of two choices": (
        {"oneOf": [kind("a", "b"), kind("b")]},
        ['{"kind":"a"}'],
        ['{"kind":"b"}', '{"kind":"c"}'],
    ),
    "one property or the other": (
        {"oneOf": [{"type": "object", "properties": {"a": {}}, "required": ["a"]}, kind("b")]},
        ['{"a":[1]}', '{"kind":"b"}'],
        ["{}", '{"a":1,"kind":"b"}'],
    ),
    "no other properties": (
        {
            "$defs": {"base": {"properties": {"a": {"type": "null"}}, "required": ["a"]}},
            "allOf": [{"$ref": "#/$defs/base"}],
            "type": "object",
            "properties": {"b": {"type": "boolean"}},
            "unevaluatedProperties": False,
        },
        ['{"b":true,"a":null}', '{"a":null}'],
        ['{"b":true}', '{"a":null,"d":1}'],
    ),
    "names of properties": (
        {
            "type": "object",
            "propertyNames": {"pattern": "^[a-z]{2,3}$"},
            "additionalProperties": {"type": "boolean"},
        },
        ["{}", '{"ab":true,"abc":false}'],
        ['{"a":true}', '{"ab":1}'],
    ),
    "how many of the properties": (
        {"type": "object", "properties": NULLS, "minProperties": 1, "maxProperties": 2},
        ['{"b":null}', '{"a":null,"c":null}'],
        ["{}", '{"a":null,"b":null,"c":null}'],
    ),
    "no other items": (
        {"type": "array", "prefixItems": [{"type": "null"}], "unevaluatedItems": False},
        ["[]", "[null]"],
        ["[null,null]", "[1]"],
    ),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "not": ({"type": "string", "not": {"const": "x"}}, "not is"),
    "if": ({"if": {"type": "string"}, "then": {"maxLength": 2}}, "if is"),
    "items that differ": ({"type": "array", "uniqueItems": True}, "uniqueItems is True"),
    "one of the items": ({"type": "array", "contains": {"const": 1}}, "contains is"),
    "needed together": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "a format": ({"type": "string", "format": "uri"}, "format is 'uri'"),
    "lengths beside a pattern": ({"pattern": "^a+$", "maxLength": 3}, "maxLength next to pattern"),
    "look-around": ({"pattern": "^(?!a).*$"}, "look-around"),
    "ways that begin alike": ({"pattern": "^(a[ab]?|a)$"}, "may begin alike"),
    "counts within counts": ({"pattern": "^(([a-z]{1,20} ){1,20}x){1,20}$"}, "limit is"),
    "multiples in a range": ({"type": "integer", "multipleOf": 7, "minimum": 3}, "multipleOf is 7"),
    "properties without names": ({"type": "object", "minProperties": 2}, "minProperties is 2"),
    "another document": ({"$ref": "https://example.org/a"}, r"\$ref is"),
    "each other": (
        {"$defs": {"a": {"$ref": "#/$defs/a", "maxLength": 1}}, "$ref": "#/$defs/a"},
        "without end|nested",
    ),
    "too deep": (json.loads('{"items":' * 30 + "{}" + "}" * 30), "24 deep"),
    "too long": ({"type": "string", "maxLength": 5_000}, "limit is 1000"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_xgrammar_does_not_enforce_is_refused_by_name(name: str) -> None:
    schema, says = REFUSED[name]
    with pytest.raises(SchemaError, match=says):
        narrowed(schema, is_closed=False)


def test_what_allows_nothing_is_left_out_of_a_choice() -> None:
    schema = {"anyOf": [{"type": "integer", "minimum": 5, "maximum": 3}, {"type": "null"}, False]}
    assert narrowed(schema, is_closed=False).schema == {"type": "null"}
    with pytest.raises(SchemaError, match="allows nothing"):
        narrowed({"anyOf": schema["anyOf"][:1]}, is_closed=False)


def test_what_stands_beside_a_reference_is_merged() -> None:
    base = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    schema = {"$defs": {"x": base}, "$ref": "#/$defs/x", "properties": {"a": {"const": "b"}}}
    found = narrowed(schema, is_closed=False).schema
    assert found["properties"] == {"a": {"enum": ["b"]}} and found["required"] == ["a"]


def test_days_of_the_calendar_and_no_others() -> None:
    """By Python's expressions: those of xgrammar are tried below."""
    schema = narrowed({"format": "date", "type": "string"}, is_closed=False).schema
    written = re.compile(schema["pattern"])
    days = {date(year, 1, 1) + timedelta(n) for year in (4, 1900, 2000, 2023) for n in range(365)}
    for year in (4, 1900, 2000, 2023):
        for month in range(14):
            for day in range(33):
                text = f"{year:04}-{month:02}-{day:02}"
                leap = text in ("0004-12-31", "2000-12-31")
                right = leap or text in {str(each) for each in days}
                assert bool(written.fullmatch(text)) == right, text


def test_patterns_are_written_for_the_whole_text() -> None:
    for pattern, right, wrong in [("b", "abc", "ac"), ("^b", "bc", "ab"), ("^a|b$", "", "")][:2]:
        written = re.compile(of_whole_text(pattern))
        assert written.fullmatch(right) and not written.fullmatch(wrong)
    assert not re.compile(of_whole_text("^.$")).fullmatch('"')


PARAMS: dict[str, tuple[dict[str, Any], str]] = {
    "no library": ({"json": {}, "backend": "outlines"}, "is 'outlines', must be one of: auto, "),
    "no text": ({"json": {}, "backend": 1}, "must be a str"),
    "another form": ({"regex": "a", "backend": "xgrammar"}, "supports only json, json_object"),
    "whitespace": (
        {"json": {}, "backend": "xgrammar", "whitespace_pattern": " "},
        "whitespace_pattern is ' '",
    ),
}


@pytest.mark.parametrize("name", PARAMS)
def test_a_library_that_cannot_be_asked_is_refused_at_once(name: str) -> None:
    fields, says = PARAMS[name]
    with pytest.raises(RequestError, match=re.escape(says)):
        StructuredOutputsParams(**fields)


def test_the_library_travels_with_the_form_and_is_not_said_where_it_is_left_out() -> None:
    plain = grammar_of(StructuredOutputsParams(json={}))
    asked = grammar_of(StructuredOutputsParams(json={}, backend="xgrammar"))
    assert "auto" not in plain and grammar_from(plain).backend == "auto"
    assert grammar_from(asked).backend == "xgrammar"


def compiler(**options: Any) -> GuidanceCompiler:
    model = bench().tokenizer.backend.as_json()
    view = LLTokenizer(model, n_vocab=4096, eos_token=list(bench().eos))
    return GuidanceCompiler(lambda eos: view, **options)


def test_without_it_an_error_says_how_to_install_it_where_a_request_names_it() -> None:
    alone = compiler()
    for backend, says in [
        ("xgrammar", "^backend is 'xgrammar', .*pip install metronome-engine"),
        ("auto", r"^the schema's type is 'text', must be one of: [a-z, ]+$"),
    ]:
        wrong = StructuredOutputsParams(json={"type": "text"}, backend=backend)
        with pytest.raises(GrammarError, match=says):
            alone.submit(grammar_of(wrong), bench().eos).wait()
    alone.shutdown()


@pytest.mark.parametrize("text", ['start: "a"', 'root ::= "a" (= "b")', "root ::= TagDispatch(x)"])
def test_grammars_beyond_gbnf_are_refused(text: str) -> None:
    form = grammar_from(grammar_of(StructuredOutputsParams(grammar=text, backend="xgrammar")))
    with pytest.raises(SchemaError, match="GBNF"):
        source_of(form)


# -- with the library


def test_a_refusal_of_both_says_both() -> None:
    pytest.importorskip("xgrammar")
    says = (
        r"^the schema's type is 'text', must be one of: .*; xgrammar refuses it too: type is 'text'"
    )
    with pytest.raises(GrammarError, match=says):
        bench().compiled({"json": {"type": "text"}, "backend": "auto"})


def accepts(fields: dict[str, Any], text: str) -> bool:
    """Whether a text is accepted, by masks and by the check of tokens, in all its tokenisations."""
    if "backend" not in fields:
        pytest.importorskip("xgrammar")
    compilation = bench().compiled({"backend": "xgrammar", **fields})
    found = set()
    for tokens in bench().tokenisations(text):
        whole = [*tokens, bench().eos[0]]
        found.add(bench().num_accepted(compilation.wait(), tokens) == len(whole))
        found.add(compilation.wait().num_allowed(whole) == len(whole))
    assert len(found) == 1, text
    return found.pop()


@pytest.mark.parametrize("options", [{}, {"backend": "guidance", "property_order": "free"}])
@pytest.mark.parametrize("name", TAKEN)
def test_both_libraries_enforce_it(name: str, options: dict[str, Any]) -> None:
    schema, right, wrong = TAKEN[name]
    judge = json_judge(schema)
    for text in (*right, *wrong):
        assert accepts({"json": schema, **options}, text) == judge(text) == (text in right), text


@pytest.mark.parametrize("name", ["date", "time", "date-time", "uuid", "ipv4"])
def test_formats_are_enforced(name: str) -> None:
    zone = ["Z", "+01:30", "-24:00", ""]
    times = [f"{clock}{end}" for clock in ("23:59:59", "24:00:00", "09:07:1") for end in zone]
    texts = {
        "date": [f"2023-{month:02}-{day:02}" for month in range(14) for day in range(28, 33)],
        "time": [*times, "21:34:556118Z", "21:34:55.6118Z"],
        "date-time": [f"2024-02-29T{each}" for each in times],
        "uuid": ["3eD7Fd9e-7dcE-A2F8-6bc6-bdE172ffB23a", "3eD7Fd9e-7dcE-A2F8-6bc6-bdE172ffB23"],
        "ipv4": ["1.2.3.4", "255.249.199.99", "256.1.1.1", "1.2.3", "01.2.3.4"],
    }[name]
    schema = {"type": "string", "format": name}
    verdicts = [accepts({"json": schema}, f'"{text}"') for text in texts]
    assert verdicts == [json_judge(schema)(f'"{text}"') for text in texts]
    assert {True, False} == set(verdicts)


def test_drafts_are_filled_up_to_the_first_that_is_wrong_and_change_nothing() -> None:
    import numpy as np

    pytest.importorskip("xgrammar")
    matcher = bench().compiled({"json": {"const": "abc"}, "backend": "xgrammar"}).wait()
    (tokens, *_) = bench().tokenisations('"abc"')
    masks = np.zeros((len(tokens) + 1, 4096 // 32), dtype=np.int32)
    for _ in range(2):
        masks[:] = 0
        matcher.fill(masks, tokens)
        for mask, token in zip(masks, [*tokens, bench().eos[0]], strict=True):
            assert mask[token // 32] >> (token % 32) & 1
    assert matcher.num_allowed([tokens[0], tokens[0]]) == 1
    masks[:] = 0
    matcher.fill(masks, [tokens[0], tokens[0], *tokens[2:]])
    assert masks[1].any() and not masks[2].any()
    with pytest.raises(GrammarError, match="is not allowed there"):
        matcher.advance([tokens[0], tokens[0]])
    matcher.advance(tokens)
    assert matcher.num_allowed([bench().eos[0]]) == 1 and not list(matcher.forced([], 5))


def test_patterns_let_no_wrong_text_pass() -> None:
    """The library lets `12Z` through `^[0-9](\\.[0-9]+)?Z$` as it stands."""
    schema = {"type": "string", "pattern": "^[0-9](\\.[0-9]+)?Z$"}
    assert accepts({"json": schema}, '"1.23Z"') and not accepts({"json": schema}, '"12Z"')
    assert not accepts({"json": {"type": "string", "pattern": "b"}}, '"ac"')


def test_a_grammar_in_gbnf() -> None:
    asked = {"grammar": 'root ::= "a" [0-9]{2} # two'}
    assert accepts(asked, "a12") and not accepts(asked, "a1")


def test_dense_and_closed_as_of_llguidance() -> None:
    asked = {"json": {"type": "object", "properties": NULLS}}
    dense = {**asked, "disable_any_whitespace": True}
    assert accepts(asked, '{"a": null}') and not accepts(dense, '{"a": null}')
    assert not accepts({"json_object": True, "disable_additional_properties": True}, '{"a":1}')


def test_what_takes_it_too_long_fails_alone() -> None:
    """The other library goes on, and so does this one once it is done."""
    go_on = Event()

    class Slow(XGrammars):
        def compiled(self, form: Any, source: Any, eos: Any) -> Any:
            go_on.wait(WAIT_SECONDS)
            return super().compiled(form, source, eos)

    pytest.importorskip("xgrammar")
    slow = compiler(max_seconds=0.2, other=Slow(4096))
    asked = {"json": {"type": "null"}, "backend": "xgrammar"}
    late, other = (
        slow.submit(grammar_of(StructuredOutputsParams(**fields)), bench().eos)
        for fields in (asked, {"choice": ["yes"]})
    )
    other.wait()
    with pytest.raises(GrammarError, match=r"compiling took longer than 0\.2 seconds"):
        late.wait()
    go_on.set()
    late.future.result()
    assert late.num_bytes > 0 and late.poll() is not None
    slow.shutdown()

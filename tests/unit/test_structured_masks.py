"""What a compiled grammar lets pass, token by token."""

from __future__ import annotations

import gc
import json
import weakref
from contextlib import suppress
from enum import Enum
from typing import Any

import numpy as np
import pytest
from structured.checks import bench

from engine import RequestError
from engine.messages.structured import StructuredOutputsParams, grammar_from, grammar_of
from engine.structured.guidance import GrammarError, GuidanceCompilation, guidance_of
from policylab.verify.case import VOCAB_SIZE
from policylab.verify.halves import CHARACTERS, END, WORDS, small_tokenizer

LEVEL = {
    "type": "object",
    "properties": {"level": {"type": "null"}},
    "required": ["level"],
    "additionalProperties": False,
}
ASKED: dict[str, tuple[dict[str, Any], str]] = {
    "json": ({"json": LEVEL}, '{"level":null}'),
    "expression": ({"regex": "level [0-9]"}, "level 7"),
    "choice": ({"choice": ["level", "other"]}, "level"),
    "Lark": ({"grammar": 'start: "level" /[0-9]/'}, "level7"),
    "GBNF": ({"grammar": 'root ::= "level" [0-9]'}, "level7"),
}


@pytest.mark.parametrize("name", ASKED)
def test_every_way_to_spell_a_text_is_allowed(name: str) -> None:
    """Also where the grammar leaves one text only: the model chooses among its tokens."""
    fields, text = ASKED[name]
    compilation = bench().compiled(fields)
    ways = list(bench().tokenisations(text))
    assert len(ways) == 2 and len(ways[0]) < len(ways[1]) == len(text)
    for tokens in ways:
        assert bench().num_accepted(compilation.wait(), tokens) == len(tokens) + 1


@pytest.mark.parametrize("name", ["json", "choice of one", "Lark"])
def test_forced_tokens_are_how_the_tokenizer_cuts_what_must_follow(name: str) -> None:
    """Less what may be one token with what follows; looking changes nothing."""
    fields, text = {**ASKED, "choice of one": ({"choice": ["level"]}, "level")}[name]
    matcher = bench().compiled(fields).wait()
    (tokens, *_) = bench().tokenisations(text)
    forced = list(matcher.forced([], 99))
    assert forced == list(matcher.forced([], 99)) == tokens[: len(forced)]
    assert list(matcher.forced([], 1)) == forced[:1]
    assert bench().num_accepted(matcher, tokens) == len(tokens) + 1


def test_nothing_is_forced_where_there_is_a_choice() -> None:
    matcher = bench().compiled({"choice": ["level", "other"]}).wait()
    assert list(matcher.forced([], 9)) == []
    (tokens, *_) = bench().tokenisations("level")
    matcher.advance(tokens)
    assert list(matcher.forced(tokens, 9)) == []


def accepts(schema: Any, text: str) -> bool:
    compilation = bench().compiled({"json": schema})
    (tokens, *_) = bench().tokenisations(text)
    return bench().num_accepted(compilation.wait(), tokens) == len(tokens) + 1


FORMATS: dict[str, tuple[list[str], list[str]]] = {
    "date": (
        ["2024-02-29", "2000-02-29", "0004-02-29", "2023-02-28", "0001-01-01", "9999-12-31"],
        ["2023-02-29", "1900-02-29", "0000-02-29", "0000-01-01", "2023-04-31", "2023-02-30"],
    ),
    "date-time": (
        ["2024-02-29T00:00:00Z", "2023-12-31T23:59:59.5+01:00"],
        ["2023-02-29T00:00:00Z", "0000-01-01T00:00:00Z", "2024-02-29"],
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_enforced_wholly(name: str) -> None:
    """Days that are in the calendar; a pattern beside it holds too."""
    right, wrong = FORMATS[name]
    schema = {"type": "string", "format": name}
    narrow = {**schema, "pattern": right[0][:3], "allOf": [{"minLength": 7}]}
    for text in right:
        assert accepts(schema, f'"{text}"'), text
    for text in wrong:
        assert not accepts(schema, f'"{text}"'), text
    assert accepts(narrow, f'"{right[0]}"')


REFUSED: dict[str, tuple[Any, str]] = {
    "options of the library": (
        {"type": "array", "x-guidance": {"lenient": True}, "uniqueItems": True},
        "x-guidance",
    ),
    "options in a definition": (
        {"$defs": {"a": {"x-guidance": {"lenient": True}}}, "$ref": "#/$defs/a"},
        "x-guidance",
    ),
    "draft 3, a number": ({"type": "integer", "divisibleBy": 2}, "multipleOf"),
    "draft 3, types": ({"disallow": "string"}, "disallow"),
    "draft 3, another schema": ({"extends": {"type": "string"}}, "allOf"),
    "draft 3, required": (
        {"type": "object", "properties": {"a": {"type": "string", "required": True}}},
        "required",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_ignored_is_refused_by_name(name: str) -> None:
    schema, says = REFUSED[name]
    with pytest.raises(GrammarError, match=says):
        bench().compiled({"json": schema})


def test_no_name_is_written_twice() -> None:
    schema = {"type": "object", "minProperties": 2, "additionalProperties": {"type": "integer"}}
    assert accepts(schema, '{"a":1,"b":2}')
    assert not accepts(schema, '{"a":1,"a":2}')
    assert not accepts({"type": "object"}, '{"a":1,"a":2}')
    assert not accepts({"type": "object", "properties": {"x": {}}}, '{"x":[{"a":1,"a":2}]}')


NEVER_RIGHT = ['{"a": 1e99999}', '{"a": [1.5E-123456, 2]}', '{"a": "\\ud800"}', '{"\\udc00": 1}']


@pytest.mark.parametrize("text", NEVER_RIGHT)
@pytest.mark.parametrize("schema", [{"type": "object"}, {"type": "object", "properties": {}}])
def test_masks_forbid_what_is_never_right(schema: dict[str, Any], text: str) -> None:
    """Where any JSON may be written, too: a token that a mask lets pass may follow."""
    forms: list[dict[str, Any]] = [{"json": schema}, {"json_object": True}]
    for fields in forms:
        for tokens in bench().tokenisations(text):
            assert bench().num_accepted(bench().compiled(fields).wait(), tokens) < len(tokens)


IDLE: dict[str, dict[str, Any]] = {
    "uniqueItems": {"type": "array", "uniqueItems": False},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": True},
    "dependentRequired": {"type": "object", "dependentRequired": {}},
    "minProperties": {"type": "object", "properties": {"a": {}}, "minProperties": 0},
}


@pytest.mark.parametrize("name", IDLE)
def test_what_says_nothing_is_no_reason_to_refuse(name: str) -> None:
    assert accepts(IDLE[name], "[]" if name == "uniqueItems" else "{}")


def test_names_of_properties_are_no_keywords() -> None:
    names = {name: {"type": "integer"} for name in ("extends", "x-guidance", "required", "format")}
    assert accepts({"properties": names, "const": {"divisibleBy": 2}}, '{"divisibleBy":2}')
    assert accepts({"type": "object", "properties": names}, '{"extends":1,"format":2}')


def test_a_run_that_is_recorded_waits_for_no_grammar_longer_than_others() -> None:
    """Its requests are compiled within the step: what never ends would end the engine."""
    endless = GuidanceCompilation((0,), {("guidance", (0,)): 0.0}, max_seconds=0.1)
    with pytest.raises(GrammarError, match=r"longer than 0\.1 seconds"):
        endless.wait()


def test_drafts_to_where_a_text_cannot_go_on_take_nothing_of_the_text_before() -> None:
    """No token of this vocabulary spells the exclamation mark. That is said of the place where it
    must stand, when the text has come there, and neither earlier nor of what is right."""
    compiler = guidance_of(small_tokenizer, VOCAB_SIZE)
    asked = grammar_of(StructuredOutputsParams(choice=["ab!"]))
    matcher = compiler.submit(asked, [END]).wait()
    a, b = (CHARACTERS.index(letter) for letter in "ab")
    for _ in range(2):
        masks = np.zeros((3, WORDS), dtype=np.int32)
        matcher.fill(masks, [a, b])
        assert masks.any(axis=1).tolist() == [True, True, False]
        assert matcher.num_allowed([a, b]) == matcher.num_allowed([a, b, END]) == 2
    matcher.advance([a, b])
    with pytest.raises(GrammarError, match="no text can follow here"):
        matcher.fill(np.zeros((1, WORDS), dtype=np.int32), [])
    compiler.shutdown()


def test_texts_that_are_enums_or_numpys_are_taken_for_what_they_say():
    class Form(str, Enum):  # noqa: UP042 - whose str() is no value
        NUMBER = "[0-9]+"

    assert grammar_from(grammar_of(StructuredOutputsParams(regex=Form.NUMBER))).text == "[0-9]+"
    choice = grammar_of(StructuredOutputsParams(choice=[np.str_("yes"), Form.NUMBER, "é"]))
    assert json.loads(grammar_from(choice).text) == ["yes", "[0-9]+", "é"]


def test_a_schema_that_is_no_json_is_refused_however_it_is_read():
    for value in ({1, 2}, b"x", float("nan"), float("inf"), object()):
        with pytest.raises(RequestError, match="which is not JSON"):
            StructuredOutputsParams(json={"const": value})
    with pytest.raises(RequestError, match=r"^the json of structured_outputs has '\\ud800'"):
        StructuredOutputsParams(json={"const": "\ud800"})
    large = StructuredOutputsParams(json={"const": 10**300, "enum": (1, 2), "x": {1: 2}})
    read = json.loads(grammar_from(grammar_of(large)).text)
    assert read == {"const": 10**300, "enum": [1, 2], "x": {"1": 2}}


def test_a_kept_refusal_forgets_those_it_was_raised_for() -> None:
    """The same wrong grammar, asked for again and again, must not keep every request in memory."""
    compiler = guidance_of(small_tokenizer, VOCAB_SIZE)

    class Requester:
        """Stands for all that the frames of a request hold."""

    def is_refused() -> weakref.ref[Requester]:
        held = Requester()
        with suppress(GrammarError):
            compiler.submit("no grammar", [END]).wait()
            pytest.fail("it was compiled")
        return weakref.ref(held)

    try:
        requesters = [is_refused() for _ in range(3)]
        gc.collect()
        assert [requester() for requester in requesters] == [None] * 3
    finally:
        compiler.shutdown()

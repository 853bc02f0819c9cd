"""Patterns that look ahead or back: refused where a text could go on for ever."""

import json

import pytest
from structured.checks import bench

from engine import StructuredOutputsParams
from engine.messages.structured import Grammar
from engine.structured.plans import plan_of
from engine.structured.schemas import SchemaError

IDLE = "which has a look-ahead that excludes nothing; rewrite the pattern without it"


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        *(("^(?!a)b$", IDLE), ("^(?!a*b)c$", IDLE)),
        *(
            (each, "cannot be enforced; rewrite the pattern without it")
            for each in ("(?=a)[a-z]+", "^x(?<!y)$")
        ),
    ],
)
def test_a_string_that_nothing_else_holds_is_refused(pattern: str, why: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
    with pytest.raises(SchemaError, match=why):
        plan_of(schema, Grammar("json", ""))
    assert plan_of(schema, Grammar("json", "", is_lenient=True)).needs_checker


# Patterns that look ahead at their beginning, with texts they match and texts they do not.
APART: dict[str, tuple[list[str], list[str]]] = {
    "^(?!all$).*$": (["", "al", "allx", "b"], ["all"]),
    "^(?!interactive|name|style).+$": (["names"[:3], "i", "x"], ["name", "names", "styled"]),
    r"^(?=.*\d)(?=.*[a-z]).{3,}$": (["a1b", "12z"], ["abc", "123", "a1"]),
    r"^(?!\.)(?!.*\.\.)[a.]{1,9}$": (["a.a.", "a"], [".a", "a..a"]),
    "^(?!-)(?!.*--)[a-z-]+$": (["a-b-c"], ["-a", "a--b"]),
    "^(?![ab])[a-d]*$": (["", "cab"], ["ac", "b"]),
    "^(?!(?:con|prn)$)[a-z]+$": (["co", "conx", "prn"[:2]], ["con", "prn"]),
}


@pytest.mark.parametrize("pattern", APART)
def test_what_looks_ahead_at_the_beginning_is_in_the_grammar(pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert not plan_of(schema, Grammar("json", "")).needs_checker
    right, wrong = APART[pattern]
    for text in (*right, *wrong):
        form = StructuredOutputsParams(json=schema)
        assert bench().takes(form, json.dumps(text)) == (text in right), text


def test_a_format_ends_the_text_and_names_are_few() -> None:
    dated = {"type": "string", "format": "date", "pattern": "^2(?!024)"}
    named = {"type": "object", "patternProperties": {"^(?!x)[a-z]$": {"type": "integer"}}}
    for schema in (dated, named):
        assert plan_of(schema, Grammar("json", "")).needs_checker

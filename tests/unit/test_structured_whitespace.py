"""Whitespace in JSON is what ``whitespace_pattern`` says, wherever a schema stands."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from structured.checks import bench

from engine import StructuredOutputsParams
from engine.errors import RequestError
from engine.messages.structured import grammar_of
from engine.structured.decide import GrammarError

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"type": "array", "items": {"type": ["null", "string"]}},
        "c": {"const": {"x": [1]}},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOKENS = ["{", '"a"', ":", "-7", ",", '"b"', ":", "[", "null", ",", '"x, [y]: "', "]", "}"]
EMPTY = ["{", '"a"', ":", "0", ",", '"b"', ":", "[", "]", "}"]
CONSTANT = [*EMPTY[:-1], ",", '"c"', ":", "{", '"x"', ":", "[", "1", "]", "}", "}"]
# The pattern, what may stand between two tokens, and what may not.
PATTERNS: dict[str, tuple[list[str], list[str]]] = {
    "[ ]{1,2}": ([" ", "  "], ["", "   ", "\n"]),
    " ": ([" "], ["", "  "]),
    r"[\n ]*": (["", " ", "\n  ", "\n\n"], ["\t"]),
    "[\n ]+": ([" ", "\n  "], ["", "\t"]),
    r"\s?": (["", "\t"], ["\u00a0", "  "]),
    r"\n|\r\n": (["\n", "\r\n"], ["", "\r", " "]),
    "( {2}){2}": (["    "], ["", "  ", "     "]),
    r"\t{0,1}": (["", "\t"], ["\t\t", " "]),
    "": ([""], [" ", "\n"]),
}
CASES = [(pattern, space) for pattern, (right, _) in PATTERNS.items() for space in right]
WRONG = [(pattern, space) for pattern, (_, wrong) in PATTERNS.items() for space in wrong]


def is_written(fields: dict[str, Any], text: str) -> bool:
    compilation = bench().compiled(fields)
    found = [
        bench().num_accepted(compilation.wait(), tokens) == len(tokens) + 1
        for tokens in bench().tokenisations(text)
    ]
    assert len(set(found)) == 1
    return found[0]


def with_tag(begin: str, end: str, **fields: Any) -> dict[str, Any]:
    tag = {"begin": begin, "schema": SCHEMA, "end": end}
    return {"structural_tag": {"structures": [tag], "triggers": [begin]}, **fields}


@pytest.mark.parametrize("tokens", [TOKENS, EMPTY, CONSTANT])
@pytest.mark.parametrize(("pattern", "space"), CASES)
def test_what_the_pattern_allows_is_written(pattern: str, space: str, tokens: list[str]) -> None:
    text = space.join(tokens)
    json.loads(text)
    assert is_written({"json": SCHEMA, "whitespace_pattern": pattern}, text)
    assert is_written({"json_object": True, "whitespace_pattern": pattern}, text)


@pytest.mark.parametrize(("pattern", "space"), WRONG)
def test_nothing_else_is_written_between_any_two_tokens(pattern: str, space: str) -> None:
    right = PATTERNS[pattern][0][0]
    fields = {"json": SCHEMA, "whitespace_pattern": pattern}
    for at in range(1, len(TOKENS)):
        text = right.join(TOKENS[:at]) + space + right.join(TOKENS[at:])
        assert not is_written(fields, text), text
    text = right.join(TOKENS)
    assert is_written(fields, text)
    assert not is_written(fields, f" {text}") and not is_written(fields, f"{text} ")


@pytest.mark.parametrize(
    ("begin", "end"), [("<f>", "</f>"), ("<f>\n", "\n</f>"), ("[f ", "]"), ("{", "}"), ("f", " ,")]
)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_in_tags_it_holds_for_their_schemas_alone(pattern: str, begin: str, end: str) -> None:
    right, wrong = PATTERNS[pattern]
    fields = with_tag(begin, end, whitespace_pattern=pattern)
    for space in right:
        text = f"Say:   \t{begin}{space.join(TOKENS)}{end}   and\n\n so on"
        assert is_written(fields, text), text
    for space in wrong:
        assert not is_written(fields, f"Say: {begin}{space.join(TOKENS)}{end}"), space


def test_none_at_all_is_said_in_two_ways() -> None:
    forms: list[dict[str, Any]] = [{"json": SCHEMA}, {"json_object": True}, with_tag("<", ">")]
    forms.append({"json": SCHEMA, "backend": "xgrammar"})
    for fields in forms:
        dense = StructuredOutputsParams(**fields, disable_any_whitespace=True)
        empty = StructuredOutputsParams(**fields, whitespace_pattern="")
        both = StructuredOutputsParams(**fields, whitespace_pattern="", disable_any_whitespace=True)
        assert grammar_of(dense) == grammar_of(empty) == grammar_of(both)
        assert grammar_of(dense) != grammar_of(StructuredOutputsParams(**fields))


def test_a_pattern_of_other_characters_is_refused() -> None:
    with pytest.raises(RequestError, match="whitespace_pattern with regex"):
        StructuredOutputsParams(regex="a", whitespace_pattern="")
    for pattern in ("x+", "[ ", " (?= )", ",?x"):
        with pytest.raises(GrammarError, match="must be a regular expression that matches"):
            bench().compiled({"json": SCHEMA, "whitespace_pattern": pattern}).wait()


def test_masks_of_drafts_and_forced_tokens_follow_the_pattern() -> None:
    fields = {"json": {"const": {"a": [1, 2]}}, "whitespace_pattern": "[ ]{2}"}
    text = '{  "a"  :  [  1  ,  2  ]  }'
    (tokens, *_) = bench().tokenisations(text)
    matcher = bench().compiled(fields).wait()
    forced = list(matcher.forced([], 100))
    assert text.startswith(bench().tokenizer.decode(forced))
    assert matcher.num_allowed(tokens) == len(tokens)
    (wrong, *_) = bench().tokenisations(re.sub("  ", "", text))
    assert matcher.num_allowed(wrong) < len(wrong)

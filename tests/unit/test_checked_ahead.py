"""The checker looks ahead: what it lets pass can be finished."""

from __future__ import annotations

import json
import os
import random

import pytest
from jsonschema import Draft202012Validator

from engine.structured.checked.checker import Checker, CheckerState
from engine.structured.checked.few import few_texts

SEED = int(os.environ.get("METRONOME_SEED", "36"))
BYTES = [bytes([byte]) for byte in b'{}[],:"abcnx0123456789truefalsenull']
COLOURS = {"enum": ["ab", "a", "b"]}
INTEGER = {"type": "integer", "minimum": 0, "maximum": 3}
BOOLEAN = {"type": "boolean"}


def closed(properties: dict, **more: object) -> dict:
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        **more,
    }


ABC = {"a": INTEGER, "b": BOOLEAN, "c": COLOURS}
SCHEMAS = {
    "an enum that is used up": {"type": "array", "items": COLOURS, "uniqueItems": True},
    "all of an enum": {"type": "array", "items": COLOURS, "uniqueItems": True, "minItems": 3},
    "booleans": {"type": "array", "items": BOOLEAN, "uniqueItems": True, "minItems": 2},
    "numbers in a range": {"type": "array", "items": INTEGER, "uniqueItems": True, "minItems": 4},
    "texts of a pattern": {
        "type": "array",
        "items": {"type": "string", "pattern": "^[ab][12]$"},
        "uniqueItems": True,
        "minItems": 3,
    },
    "a first item that the others leave": {
        "type": "array",
        "prefixItems": [COLOURS],
        "items": {"enum": ["a", "b"]},
        "uniqueItems": True,
        "minItems": 3,
    },
    "unique pairs": {
        "type": "array",
        "items": closed({"a": {"enum": [1, 2]}, "b": BOOLEAN}, required=["a", "b"]),
        "uniqueItems": True,
        "minItems": 3,
        "maxItems": 3,
    },
    "the last item is what must be contained": {
        "type": "array",
        "items": COLOURS,
        "contains": {"const": "b"},
        "maxItems": 3,
    },
    "two of them": {
        "type": "array",
        "items": COLOURS,
        "contains": {"const": "ab"},
        "minContains": 2,
        "maxContains": 2,
        "maxItems": 4,
    },
    "names that need others": closed(ABC, dependentRequired={"a": ["b"], "b": ["c"]}),
    "at least two": closed(ABC, minProperties=2, maxProperties=2),
    "one of two": closed(ABC, oneOf=[{"required": ["a"]}, {"required": ["b"]}]),
    "not both": closed(ABC, **{"not": {"required": ["a", "b"]}}, minProperties=2),
    "if and then": closed(
        ABC,
        required=["c"],
        **{
            "if": {"properties": {"c": {"const": "a"}}},
            "then": {"required": ["a"], "properties": {"b": False}},
            "else": {"properties": {"a": {"const": 3}}, "required": ["b"]},
        },
    ),
    "a tag": {
        "oneOf": [
            closed({"a": {"const": 1}, "b": BOOLEAN}, required=["a", "b"]),
            closed({"a": {"const": 2}, "c": COLOURS}, required=["a", "c"]),
        ]
    },
    "names of an enum": {
        "type": "object",
        "propertyNames": {"enum": ["a", "ab"]},
        "additionalProperties": INTEGER,
        "minProperties": 2,
    },
    "not an enum's value": closed({"c": {**COLOURS, "not": {"const": "ab"}}}, minProperties=1),
    "what is left of two enums": closed(
        {"c": COLOURS}, minProperties=1, allOf=[{"properties": {"c": {"enum": ["x", "ab"]}}}]
    ),
    "numbers that may not go on": {
        "type": "array",
        "items": {
            "type": "integer",
            "minimum": 0,
            "maximum": 139,
            "oneOf": [{"multipleOf": 7}, {"multipleOf": 3}],
        },
        "minItems": 2,
    },
    "numbers by a condition": closed(
        {"c": COLOURS, "n": {"type": "integer", "minimum": 0, "maximum": 999}},
        required=["c", "n"],
        **{
            "if": {"properties": {"c": {"const": "a"}}, "required": ["c"]},
            "then": {"properties": {"n": {"minimum": 230, "maximum": 239}}},
            "else": {"properties": {"n": {"multipleOf": 49}}},
        },
    ),
    "unevaluated": {
        "allOf": [{"properties": {"a": INTEGER}}],
        "anyOf": [{"properties": {"b": {"const": 1}}, "required": ["b"]}, {"required": ["a"]}],
        "unevaluatedProperties": False,
        "type": "object",
    },
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_walk_along_what_is_allowed_never_gets_stuck(name: str) -> None:
    checker, oracle = Checker(SCHEMAS[name]), Draft202012Validator(SCHEMAS[name])
    for seed in range(SEED, SEED + 25):
        dice = random.Random(seed)
        state, text = checker.begin(), b""
        while not state.may_end:
            # A number in other digits is no grammar's: 1e0 for 1.
            others = b"e" if text[-1:].isdigit() else b""
            found = further(state, dice, others, is_long=len(text) > 60)
            assert found is not None, f"METRONOME_SEED: {seed}, stuck after {text!r}"
            state, byte = found
            text += byte
            assert len(text) < 2000, f"METRONOME_SEED: {seed}, no end of {text!r}"
        assert oracle.is_valid(json.loads(text)), f"METRONOME_SEED: {seed}, {text!r}"


def further(
    state: CheckerState, dice: random.Random, but: bytes, *, is_long: bool
) -> tuple[CheckerState, bytes] | None:
    """The state after one more byte that is allowed, at random; one that ends things, if the text
    is long."""
    ends = [b'"', b"}", b"]"] if is_long else []
    for byte in [*ends, *dice.sample(BYTES, len(BYTES))]:
        if byte == but:
            continue
        ahead = state.copy()
        if ahead.feed(byte):
            return ahead, byte
    return None


def test_the_texts_of_a_pattern_are_found_where_they_are_few() -> None:
    for pattern, texts in (
        ("^(a|b)[0-1]$", ["a0", "a1", "b0", "b1"]),
        ("^x?y{1,2}$", ["y", "yy", "xy", "xyy"]),
        (r"^\d\.a$", [f"{digit}.a" for digit in range(10)]),
        (r"^[a\-c]$", ["a", "-", "c"]),
        ("^$", [""]),
    ):
        assert few_texts(pattern) == texts
    for pattern in ("ab", "^a*$", "^[^a]$", "^a|b$", "^(?=a)a$", r"^[\w]$", "^[a-z]{2}$", "^(a$"):
        assert few_texts(pattern) is None, pattern


def test_an_exponent_that_leads_out_of_the_range_is_not_begun() -> None:
    low, high = -3.4e38, 3.4e38
    checker = Checker({"type": "number", "minimum": low, "maximum": high, "multipleOf": 0.5})
    for text, is_begun in (
        *((b"1e38", True), (b"1e39", False), (b"-1e+38", True), (b"-1E+39", False)),
        *((b"340.5e36", False), (b"0e99", True), (b"5e-1", True), (b"1" * 50, True)),
    ):
        assert checker.begin().feed(text) == is_begun, text

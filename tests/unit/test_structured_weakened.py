"""What the grammar of a schema is written from: as little more than the schema allows as can be."""

from __future__ import annotations

from typing import Any

import pytest

from engine.structured.closed import closed
from engine.structured.schemas import SchemaError
from engine.structured.weakened.writer import written

INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
KIND = {"properties": {"kind": {"enum": ["a", "b"]}}, "required": ["kind"]}


def with_kind(value: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"kind": {"const": value}, **more},
        "required": ["kind"],
    }


# All of it is in the grammar: nothing is to be checked.
HELD: dict[str, dict[str, Any]] = {
    "plain": {
        "type": "object",
        "properties": {"a": INTEGER, "b": {"type": "array", "items": TEXT}},
    },
    "oneOf by a constant": {"oneOf": [with_kind("a", x=TEXT), with_kind("b", y=TEXT)]},
    "oneOf by a property": {
        "oneOf": [{"properties": {n: INTEGER}, "required": [n]} for n in ("a", "b")]
    },
    "if": {
        **KIND,
        "type": "object",
        "if": {"properties": {"kind": {"const": "a"}}},
        "then": {"properties": {"x": INTEGER}, "required": ["x"]},
    },
    "many ifs": {
        "type": "object",
        "properties": {"kind": {"enum": [f"k{n}" for n in range(30)]}},
        "required": ["kind"],
        "allOf": [
            {
                "if": {"properties": {"kind": {"const": f"k{n}"}}},
                "then": {"properties": {f"x{n}": INTEGER}},
            }
            for n in range(30)
        ],
    },
    "not both": {
        "type": "object",
        "properties": {"a": INTEGER, "b": INTEGER},
        "not": {"required": ["a", "b"]},
    },
    "dependentRequired": {
        "type": "object",
        "properties": {"a": INTEGER, "b": INTEGER},
        "dependentRequired": {"a": ["b"]},
    },
    "unevaluatedProperties": {
        "allOf": [{"type": "object", "properties": {"a": INTEGER}}],
        "unevaluatedProperties": False,
    },
    "a reference next to properties, recursive": {
        "$defs": {"a": {"properties": {"next": {"$ref": "#"}}}},
        "type": "object",
        "$ref": "#/$defs/a",
        "properties": {"b": INTEGER},
    },
    "minProperties": {
        "type": "object",
        "properties": {"a": INTEGER, "b": TEXT},
        "minProperties": 1,
    },
}
CHECKED: dict[str, dict[str, Any]] = {
    "uniqueItems": {"type": "array", "items": INTEGER, "uniqueItems": True},
    "contains": {"type": "array", "items": INTEGER, "contains": {"const": 1}},
    "oneOf that overlap": {"oneOf": [TEXT, {"type": "string", "maxLength": 3}]},
    "not a text": {"type": "string", "not": {"const": "x"}},
    "a back reference": {"type": "string", "pattern": r"^(a|b)-\1$"},
    "patterns that overlap": {
        "type": "object",
        "patternProperties": {"^a": INTEGER, "b$": {"minimum": 3}},
    },
    "a format": {"type": "string", "format": "json-pointer"},
}


@pytest.mark.parametrize("name", HELD)
def test_what_the_grammar_holds_needs_no_checker(name: str) -> None:
    assert not written(closed(HELD[name])).needs_checker


@pytest.mark.parametrize("name", CHECKED)
def test_what_it_does_not_hold_is_left_to_the_checker(name: str) -> None:
    assert written(closed(CHECKED[name])).needs_checker


def test_only_objects_with_any_names_may_have_one_twice() -> None:
    assert not written(closed(HELD["plain"])).may_repeat
    assert written({"type": "object"}).may_repeat
    assert written(closed({"type": "object", "properties": {"a": {}}})).may_repeat


def test_too_many_ways_are_left_to_the_checker() -> None:
    """Two to the power of twelve."""
    ways = [{"anyOf": [{"required": [f"a{n}"]}, {"required": [f"b{n}"]}]} for n in range(12)]
    found = written({"type": "object", "allOf": ways})
    assert found.needs_checker and len(str(found.schema)) < 100_000


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "text"}, "type is 'text'"),
        ({"properties": []}, r"properties is \[\], must be an object"),
        ({"minLength": -1}, "minLength is -1, must be a whole number"),
        ({"allOf": [1]}, "a schema is 1, must be an object or a bool"),
        ({"$ref": "other.json"}, "'other.json', which is another file"),
        ({"allOf": [TEXT, INTEGER]}, "contradicts itself: see allOf"),
        # One that is large is not written again without each keyword.
        ({"allOf": [TEXT, INTEGER], "description": "x" * 20_000}, "contradicts itself$"),
        (
            {"items": {"enum": [1]}, "uniqueItems": True, "minItems": 2, "type": "array"},
            "see items, uniqueItems, minItems, type",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_value(schema: dict[str, Any], says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        written(schema)

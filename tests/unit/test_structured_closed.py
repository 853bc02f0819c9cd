"""Objects have the properties that their schema names, in its order, unless a request says
otherwise; no name comes twice."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from structured.checks import bench

from engine import RequestError, StructuredOutputsParams
from engine.messages.structured import ObjectRules, grammar_from, grammar_of
from engine.structured.closed import closed

INTEGER = {"type": "integer"}
A, B, C = ({"properties": {name: INTEGER}} for name in "abc")
POINT = {"type": "object", "properties": {"x": INTEGER, "y": INTEGER}}


def takes(schema: dict[str, Any], value: Any, **options: Any) -> bool:
    text = value if isinstance(value, str) else json.dumps(value)
    return bench().takes(StructuredOutputsParams(json=schema, **options), text)


# A schema, objects that may be written, and objects that may not, although the schema allows them.
CLOSED: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "properties": ({"type": "object", **A}, [{}, {"a": 1}], [{"z": 1}, {"a": 1, "z": 1}]),
    "within each other": (
        {"type": "object", "properties": {"p": POINT, "l": {"type": "array", "items": POINT}}},
        [{"p": {"x": 1}, "l": [{"y": 1}]}],
        [{"p": {"z": 1}}, {"l": [{"z": 1}]}],
    ),
    "allOf": ({"allOf": [A, B], **C}, [{"a": 1, "b": 1, "c": 1}, {"b": 1}], [{"d": 1}]),
    "anyOf": (
        {**A, "anyOf": [{**B, "required": ["b"]}, {**C, "required": ["c"]}]},
        [{"a": 1, "b": 1}, {"a": 1, "c": 1}, {"b": 1, "c": 1}],
        [{"a": 1, "b": 1, "d": 1}],
    ),
    "oneOf": (
        {"oneOf": [{**A, "required": ["a"]}, {**B, "required": ["b"]}], **C},
        [{"a": 1}, {"b": 1, "c": 1}],
        [{"a": 1, "d": 1}],
    ),
    "a reference": (
        {"$defs": {"base": A}, "$ref": "#/$defs/base", **B},
        [{"a": 1, "b": 1}],
        [{"z": 1}],
    ),
    "if": (
        {
            "properties": {"k": {"enum": ["a", "b"]}},
            "required": ["k"],
            "if": {"properties": {"k": {"const": "a"}}},
            "then": A,
            "else": B,
        },
        [{"k": "a", "a": 1}, {"k": "b", "b": 1}],
        [{"k": "a", "b": 1}, {"k": "b", "a": 1}, {"k": "b", "z": 1}],
    ),
    "dependentSchemas": (
        {**A, "dependentSchemas": {"a": B}},
        [{"a": 1, "b": 1}, {}],
        [{"b": 1}, {"a": 1, "z": 1}],
    ),
    "a property that two schemas describe": (
        {
            "allOf": [
                {"type": "object", "properties": {"p": {"type": "object", **A}}},
                {"properties": {"p": {**B, "required": ["c"]}}},
            ]
        },
        [{"p": {"a": 1, "b": 1, "c": []}}, {"p": {"c": 1}}],
        [{"p": {"c": 1, "z": 1}}, {"z": 1}],
    ),
    "a tree": (
        {"$defs": {"n": {"properties": {"l": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
        [{"l": {"l": {}}}],
        [{"l": {"z": {}}}],
    ),
    "a reference of draft 7": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"p": POINT},
            "$ref": "#/definitions/p",
        },
        [{"x": 1}],
        [{"z": 1}],
    ),
    "a model or nothing": ({"anyOf": [POINT, {"type": "null"}]}, [{"x": 1}, None], [{"z": 1}]),
    "patterns": ({"patternProperties": {"^x-": INTEGER}}, [{"x-a": 1}], [{"z": 1}]),
}
OPEN: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "names none": ({"type": "object"}, [{"z": 1}]),
    "says what others are": ({**A, "additionalProperties": INTEGER}, [{"a": 1, "z": 1}]),
    "an alternative that names none": ({"anyOf": [POINT, {"type": "object"}]}, [{"z": 1}]),
    "only required": ({**A, "required": ["z"]}, [{"z": [1]}, {"a": 1, "z": "b"}]),
    "required by an alternative": (
        {**A, "anyOf": [{"required": ["y"]}, {"required": ["z"]}]},
        [{"y": 1}, {"a": 1, "z": None}],
    ),
    "a constant": ({**A, "const": {"z": 1}}, [{"z": 1}]),
    "more than it names": ({**A, "minProperties": 2}, [{"a": 1, "z": 1}]),
    "the value of an open one": ({"type": "object", "additionalProperties": {}}, [{"z": {"y": 1}}]),
}


@pytest.mark.parametrize("name", CLOSED)
def test_an_object_that_names_properties_has_no_others(name: str) -> None:
    schema, right, wrong = CLOSED[name]
    for value in right:
        assert takes(schema, value), value
        assert jsonschema.Draft202012Validator(closed(schema)).is_valid(value)
    for value in wrong:
        assert not takes(schema, value), value


@pytest.mark.parametrize("name", OPEN)
def test_others_stay_open(name: str) -> None:
    schema, right = OPEN[name]
    for value in right:
        assert takes(schema, value), value


@pytest.mark.parametrize("name", CLOSED)
def test_open_by_request(name: str) -> None:
    schema, right, wrong = CLOSED[name]
    options = {"additional_properties": "open", "property_order": "free"}
    for value in [*right, *wrong]:
        is_right = jsonschema.validators.validator_for(schema)(schema).is_valid(value)
        assert takes(schema, value, **options) == is_right, value


def test_the_order_is_the_schema_s_or_free() -> None:
    for schema in (POINT, {**POINT, "required": ["y", "x"]}):
        assert takes(schema, '{"x":1,"y":2}') and not takes(schema, '{"y":2,"x":1}')
        assert takes(schema, '{"y":2,"x":1}', property_order="free")
        assert not takes(schema, '{"y":2,"x":1,"y":1}', property_order="free")
    assert not takes({**POINT, "required": ["x"]}, '{"y":2}', property_order="free")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2},
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 1},
    ],
)
def test_how_many_properties(schema: dict[str, Any]) -> None:
    for value in ({}, {"a": 1}, {"c": 1}, {"a": 1, "c": 1}, {"b": 1, "c": 1}, {"a": 1, "b": 1}):
        assert takes(schema, value) == jsonschema.Draft202012Validator(schema).is_valid(value)


def test_only_what_a_schema_names_itself() -> None:
    schema = {"allOf": [A], **B}
    assert takes(schema, {"a": 1, "b": 1})
    assert not takes(schema, {"a": 1, "b": 1}, disable_additional_properties=True)
    assert not takes({"type": "object"}, {"z": 1}, disable_additional_properties=True)


def test_what_was_chosen_travels_and_equal_grammars_have_equal_texts() -> None:
    plain = grammar_of(StructuredOutputsParams(json=POINT))
    said = StructuredOutputsParams(
        json=POINT, additional_properties="closed", property_order="schema"
    )
    assert grammar_of(said) == grammar_of(said, ObjectRules("open", "free")) == plain
    opened = grammar_of(StructuredOutputsParams(json=POINT), ObjectRules("open", "free"))
    assert opened != plain
    assert grammar_from(opened).additional_properties == "open"


def test_what_cannot_be_chosen_is_an_error() -> None:
    with pytest.raises(RequestError, match=r"additional_properties of .* is 'shut'.* closed, open"):
        StructuredOutputsParams(json={}, additional_properties="shut")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="has property_order with regex"):
        StructuredOutputsParams(regex="a", property_order="free")
    with pytest.raises(RequestError, match="leave one of them out"):
        StructuredOutputsParams(
            json={}, additional_properties="open", disable_additional_properties=True
        )


@pytest.mark.parametrize("key", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_ranges_that_end_far_from_zero_are_followed(key: str, kind: str) -> None:
    end = -(2**100) if "min" in key.lower() else 2**100
    schema = {"type": kind, key: end}
    assert takes(schema, "12") and takes(schema, str(end // 2))
    assert not takes(schema, str(2 * end))
    assert takes(schema, str(end)) == (not key.startswith("exclusive"))


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("email", "a" * 64 + "@b.c", "a" * 65 + "@b.c"),
        ("hostname", ".".join(["a" * 50] * 4), ".".join(["a" * 63] * 4)),
        ("time", "23:59:59Z", "12:00:60Z"),
        ("date-time", "2024-02-29T23:59:59Z", "2024-02-29T12:00:60Z"),
    ],
)
def test_formats_have_the_limits_of_their_documents(name: str, right: str, wrong: str) -> None:
    schema = {"type": "string", "format": name}
    assert takes(schema, json.dumps(right)) and not takes(schema, json.dumps(wrong))

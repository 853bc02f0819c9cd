"""Schemas without a value that ends are refused by whoever makes the request, and no others."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from structured.bombs import all_any, chain, wide_any
from structured.checks import bench
from structured.schemas import ENDLESS, schemas

from engine import StructuredOutputsParams
from engine.errors import RequestError
from engine.messages.finite import check_finite, endless, without_endless
from engine.messages.structured import grammar_of

A = {"$ref": "#/$defs/a"}
B = {"$ref": "#/$defs/b"}


def hold(schema: Any, *names: str, **more: Any) -> dict[str, Any]:
    """An object that must have these properties."""
    return {
        "type": "object",
        "properties": dict.fromkeys(names, schema),
        "required": [*names],
        **more,
    }


def at_a(a: Any, **definitions: Any) -> dict[str, Any]:
    return {**A, "$defs": {"a": a, **definitions}}


FINE: dict[str, Any] = {
    "anything": True,
    "a tree": at_a({"type": "object", "properties": {"x": A}}),
    "a list of its kind": at_a({"type": "array", "items": A}),
    "a list that may be full": at_a({"type": "array", "items": A, "maxItems": 3}),
    "null ends it": at_a({"anyOf": [hold(A, "x"), {"type": "null"}]}),
    "a type ends it": at_a({"type": ["object", "null"], "properties": {"x": A}, "required": ["x"]}),
    "a constant ends it": at_a({"oneOf": [{"const": 1}, hold(A, "x")]}),
    "no type, so a number": at_a({"properties": {"x": A}, "required": ["x"]}),
    "ends at the third level": at_a(
        hold(B, "b"), b=hold({"$ref": "#/$defs/c"}, "c"), c={"anyOf": [A, {"type": "string"}]}
    ),
    "twice the same": at_a({"allOf": [B, B]}, b={"type": "integer"}),
    "the same by two ways": at_a({"anyOf": [B, B], **B}, b={"type": "integer"}),
    "not allowed, not required": at_a({"type": "object", "properties": {"x": False, "y": A}}),
    "not more than it needs": at_a(
        {"allOf": [hold({}, "x", maxProperties=1), {"type": "object"}], "properties": {"y": A}}
    ),
    "not longer than it needs": at_a(
        {"type": "array", "items": {}, "minItems": 1, "allOf": [{"maxItems": 1}], "not": A}
    ),
    "an enum": at_a({"enum": [{"x": 1}], "properties": {"x": A}, "required": ["x"]}),
    "the empty list of a prefix": at_a({"type": "array", "prefixItems": [A]}),
    "a prefix that ends": at_a({"type": "array", "prefixItems": [{}], "items": A, "minItems": 1}),
    "others by their names": at_a({"type": "object", "minProperties": 2, "properties": {"x": A}}),
    "two named of three": at_a(
        {
            "type": "object",
            "properties": {"x": A, "y": {"type": "null"}, "z": {"type": "null"}},
            "additionalProperties": False,
            "minProperties": 2,
        }
    ),
    "a pattern nobody can read": at_a(
        {"type": "object", "required": ["x"], "patternProperties": {"^(?<": A}}
    ),
    "another pattern": at_a(hold({}, "x", patternProperties={"^y": A})),
    "elsewhere": {"$ref": "https://example.org/other.json"},
    "an anchor": {"$ref": "#x", "$defs": {"a": {"$anchor": "x", "type": "string"}}},
    "a property named $ref": hold({"type": "string"}, "$ref"),
    "not what it is not": at_a({"type": "string", "not": {"const": "x"}}),
}


# Those that may stand within another schema: with no name that would not move.
BY_PATH = [
    name for name, schema in ENDLESS.items() if not re.search("[aA]nchor|[$]id", json.dumps(schema))
]


@pytest.mark.parametrize("name", ENDLESS)
def test_a_schema_without_an_end_is_refused(name: str) -> None:
    schema = ENDLESS[name]
    assert "no finite value" in endless(schema)
    with pytest.raises(RequestError, match="json of structured_outputs has no finite value"):
        check_finite(grammar_of(StructuredOutputsParams(json=schema)))
    tags = {"structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}], "triggers": ["<a>"]}
    with pytest.raises(RequestError, match=r"structures\[0\] in structural_tag .* no finite value"):
        check_finite(grammar_of(StructuredOutputsParams(structural_tag=tags)))


@pytest.mark.parametrize("name", BY_PATH)
def test_one_within_another_is_found(name: str) -> None:
    moved = json.loads(json.dumps(ENDLESS[name]).replace('"#', '"#/$defs/it'))
    deeper = {"type": "array", "items": {"$ref": "#/$defs/it"}, "$defs": {"it": moved}}
    assert endless({**deeper, "minItems": 1}) and not endless(deeper)


@pytest.mark.parametrize("name", FINE)
def test_a_schema_with_an_end_is_not(name: str) -> None:
    assert endless(FINE[name]) == ""


def test_no_schema_of_the_corpus_is_refused() -> None:
    for group, schema in schemas():
        assert endless(schema) == "", (group, schema)


def test_the_place_is_named() -> None:
    schema = {"type": "object", "properties": {"ok": {}, "bad": A}, "required": ["ok", "bad"]}
    why = endless({**schema, "$defs": {"a": hold(B, "b"), "b": hold(A, "a")}})
    assert "#/$defs/" in why and "ok" not in why


def test_closed_objects_have_no_other_properties() -> None:
    schema = at_a({"type": "object", "properties": {"x": A}, "minProperties": 1})
    assert not endless(schema) and endless(schema, is_closed=True)
    with pytest.raises(RequestError, match="no finite value"):
        form = StructuredOutputsParams(json=schema, disable_additional_properties=True)
        check_finite(grammar_of(form))


def is_written(schema: Any, text: str) -> bool:
    (tokens, *_) = bench().tokenisations(text)
    compilation = bench().compiled({"json": schema})
    return bench().num_accepted(compilation.wait(), tokens) == len(tokens) + 1


@pytest.mark.parametrize("name", BY_PATH)
def test_a_way_that_never_ends_is_not_gone(name: str) -> None:
    """One that need not be gone, to whatever depth, is left out by the compiler."""
    moved = json.loads(json.dumps(ENDLESS[name]).replace('"#', '"#/$defs/it'))
    optional = {
        "type": "object",
        "properties": {"on": {"$ref": "#/$defs/it"}, "end": {"type": "null"}},
        "additionalProperties": False,
        "$defs": {"it": moved},
    }
    assert without_endless(optional)["properties"]["on"] is False
    choice = {"anyOf": [{"$ref": "#/$defs/it"}, {"type": "null"}], "$defs": {"it": moved}}
    assert is_written(optional, '{"end":null}') and is_written(choice, "null")
    (tokens, *_) = bench().tokenisations('{"on"')
    compilation = bench().compiled({"json": optional})
    assert bench().num_accepted(compilation.wait(), tokens) < len(tokens)


@pytest.mark.parametrize("name", FINE)
def test_what_has_an_end_is_left_as_it_is(name: str) -> None:
    assert without_endless(FINE[name]) == FINE[name]


def test_what_is_referred_to_from_outside_stays() -> None:
    inner = {"type": "integer", "maximum": 5, "minimum": 5}
    schema = {
        "$defs": {"a": {**hold(A, "x"), "$defs": {"five": inner}}},
        "type": "object",
        "properties": {"a": A, "five": {"$ref": "#/$defs/a/$defs/five"}},
        "additionalProperties": False,
    }
    assert is_written(schema, '{"five":5}') and not is_written(schema, '{"five":4}')


@pytest.mark.parametrize(
    "schema", [chain(5_000), all_any(24), wide_any(5, 6), {"anyOf": [chain(50)] * 300}]
)
def test_large_schemas_are_looked_at_for_a_while(schema: Any) -> None:
    assert endless(schema) == ""

"""Schemas as large as those of real programs are followed; larger ones are refused by a limit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from structured.checks import bench

from engine import RequestError, StructuredOutputsParams
from engine.structured.decide import GrammarError
from engine.structured.weakened.writer import written

TEXT = {"type": "string"}


def flat(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{n}": TEXT for n in range(count)}}


def many(count: int) -> dict[str, Any]:
    """Objects of ten properties each."""
    ten = {f"o{n}": {**flat(10), "title": f"object {n}"} for n in range(count // 10)}
    return {"type": "object", "properties": ten}


def nested(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        found = {"type": "object", "properties": {"a": found}, "required": ["a"]}
    return found


def linked(count: int) -> dict[str, Any]:
    """Definitions that refer to each other."""
    definitions = {
        f"d{n}": {
            "type": "object",
            "properties": {"next": {"$ref": f"#/$defs/d{(7 * n + 1) % count}"}, f"n{n}": TEXT},
        }
        for n in range(count)
    }
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def takes(schema: dict[str, Any], value: Any, **options: Any) -> bool:
    form = StructuredOutputsParams(json=schema, **options)
    return bench().takes(form, json.dumps(value))


def test_an_object_of_20_000_properties() -> None:
    schema = {**flat(20_000), "required": ["p19999"]}
    assert takes(schema, {"p19999": "a", "p7": "b"})
    assert not takes(schema, {"p7": "b"})
    assert not takes(schema, {"p19999": "a", "p20000": "b"})


def test_objects_of_20_000_properties_in_all() -> None:
    assert takes(many(20_000), {"o3": {"p1": "a"}, "o1999": {"p9": "b"}})
    assert not takes(many(20_000), {"o3": {"p10": "a"}})


def test_three_thousand_definitions() -> None:
    assert takes(linked(3_000), {"next": {"next": {"n8": "a"}}})
    assert not takes(linked(3_000), {"next": {"next": {"n9": "a"}}})


def test_three_hundred_levels() -> None:
    value: Any = 1
    for _ in range(300):
        value = {"a": value}
    assert takes(nested(300), value) and not takes(nested(301), value)


def test_two_million_characters() -> None:
    plain = flat(400)["properties"]
    notes = {name: {**each, "description": "x" * 6_000} for name, each in plain.items()}
    schema = {"type": "object", "properties": notes}
    assert len(json.dumps(schema)) > 2_000_000
    assert takes(schema, {"p3": "a", "p4": "b"}) and not takes(schema, {"p4": "a", "p3": "b"})


def test_what_nothing_refers_to_is_not_written() -> None:
    schema = {**flat(3), "$defs": linked(500)["$defs"]}
    assert len(json.dumps(written(schema).schema)) < 1_000


def test_equal_parts_are_written_once() -> None:
    """Descriptions and titles are no difference."""
    assert len(written(many(5_000)).schema["$defs"]) < 10


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (flat(25_001), "properties has at least 25001 entries .* the limit is 25000"),
        ({"enum": [*range(50_001)]}, "enum has at least 50001 entries .* the limit is 50000"),
    ],
)
def test_more_is_refused_with_its_size_and_the_limit(schema: dict[str, Any], says: str) -> None:
    with pytest.raises(GrammarError, match=says):
        bench().compiled({"json": schema})


def test_too_long_a_text_is_refused_at_once() -> None:
    form = StructuredOutputsParams(json={"description": "x" * 5_000_000})
    with pytest.raises(RequestError, match=r"has 50\d+ characters, the limit is 4194304"):
        bench().compiled_form(form)

"""A random schema that some small value satisfies has a value that ends, and keeps it when parts
without an end are taken out."""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Any

import jsonschema
import pytest

from engine.messages.finite import endless, without_endless

NAMES = "xy"
REFERENCES = tuple({"$ref": f"#/$defs/{name}"} for name in "abc")
LEAVES: tuple[Any, ...] = ({"type": "null"}, {"const": 1}, {"enum": ["s"]}, True, False)


def values(depth: int) -> list[Any]:
    """Small ones, the smallest first."""
    found: list[Any] = [None, True, 1, "s", [], {}]
    if depth:
        inner = values(depth - 1)[:14]
        found += [made for v in inner for made in ([v], {"x": v}, {"y": v})]
        found += [made for v, w in product(inner, inner) for made in ([v, w], {"x": v, "y": w})]
    return found


VALUES = values(2)


def part(dice: Random, depth: int) -> Any:
    """A schema of a value within another."""
    chance = dice.random()
    if chance < 0.4:
        return dice.choice(REFERENCES)
    return dice.choice(LEAVES) if chance < 0.5 else whole(dice, depth + 1)


def whole(dice: Random, depth: int = 0) -> dict[str, Any]:
    """A schema that refers to others only for values within its own."""
    schema: dict[str, Any] = {}
    if dice.random() < 0.7:
        kinds = ["object", "array", "null", ["object", "array"]]
        schema["type"] = dice.choice(kinds[:2] + kinds)
    if depth > 2:
        return schema
    makers: dict[str, Any] = {
        "properties": lambda: {n: part(dice, depth) for n in dice.sample(NAMES, 2)},
        "required": lambda: dice.sample(NAMES, dice.randint(1, 2)),
        "additionalProperties": lambda: part(dice, depth),
        "patternProperties": lambda: {"^x": part(dice, depth)},
        "minProperties": lambda: dice.randint(0, 2),
        "maxProperties": lambda: dice.randint(0, 2),
        "items": lambda: part(dice, depth),
        "prefixItems": lambda: [part(dice, depth) for _ in range(dice.randint(1, 2))],
        "minItems": lambda: dice.randint(0, 2),
        "maxItems": lambda: dice.randint(0, 2),
        "contains": lambda: part(dice, depth),
        "anyOf": lambda: [whole(dice, depth + 1) for _ in range(dice.randint(1, 2))],
        "allOf": lambda: [whole(dice, depth + 1) for _ in range(dice.randint(1, 2))],
        "oneOf": lambda: [whole(dice, depth + 1)],
    }
    for key in dice.sample([*makers], dice.randint(1, 4)):
        schema[key] = makers[key]()
    return schema


@pytest.mark.parametrize("seed", range(8))
def test_what_a_value_satisfies_is_never_refused(seed: int) -> None:
    dice, num_fine, num_endless = Random(seed), 0, 0
    for _ in range(60):
        schema = {**whole(dice), "$defs": {name: whole(dice) for name in "abc"}}
        judge = jsonschema.Draft202012Validator(schema)
        found = next((value for value in VALUES if judge.is_valid(value)), ...)
        why = endless(schema)
        if found is ...:
            num_endless += bool(why)
            continue
        num_fine += 1
        assert not why, (schema, found)
        kept = jsonschema.Draft202012Validator(without_endless(schema))
        assert kept.is_valid(found), (schema, found)
    assert num_fine > 20

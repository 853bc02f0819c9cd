"""Random schemas, and values that lie near what they allow."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("a", "b", "c", "ab")
PATTERNS = ("^a", "b$", "^[ab]+$", "c")
SCALARS = (None, True, False, 0, 1, 2, 1.5, 10, -3, 0.3, 1e2, "", "a", "b", "ab", "2020-02-30", "é")


def any_value(dice: random.Random, depth: int = 3) -> Any:
    kind = dice.random()
    if depth == 0 or kind < 0.5:
        return dice.choice(SCALARS)
    if kind < 0.75:
        return [any_value(dice, depth - 1) for _ in range(dice.randrange(4))]
    names = dice.sample(NAMES, dice.randrange(len(NAMES) + 1))
    return {name: any_value(dice, depth - 1) for name in names}


def any_schema(dice: random.Random, depth: int = 3, *, has_defs: bool = False) -> Any:
    """One of draft 2020-12; has_defs: the document has ``#/$defs/x``."""
    if dice.random() < 0.08:
        return dice.random() < 0.6
    schema: dict[str, Any] = {}
    for _ in range(dice.choice((1, 1, 2, 2, 3))):
        maker = dice.choice(_SIMPLE if depth == 0 else _MAKERS)
        schema.update(maker(dice, lambda: any_schema(dice, depth - 1, has_defs=has_defs)))
    if has_defs and dice.random() < 0.2:
        schema["$ref"] = dice.choice(("#/$defs/x", "#/$defs/y"))
    return schema


def any_document(dice: random.Random) -> Any:
    """A schema with definitions, which refer to others only through a member or an item."""
    schema = any_schema(dice, 3, has_defs=True)
    if not isinstance(schema, dict):
        return schema
    inner = any_schema(dice, 1)
    schema["$defs"] = {
        "x": any_schema(dice, 1),
        "y": {"properties": {"a": {"$ref": "#/$defs/y"}, "b": inner}, "items": {"$ref": "#"}},
    }
    return schema


def _type(dice, sub):
    kinds = ("null", "boolean", "integer", "number", "string", "array", "object")
    picked = dice.sample(kinds, dice.choice((1, 1, 2, 3)))
    return {"type": picked[0] if len(picked) == 1 else picked}


def _enum(dice, sub):
    return {"enum": [any_value(dice, 2) for _ in range(dice.randint(1, 4))]}


def _some(dice, sub):
    return [sub() for _ in range(dice.randint(1, 3))]


def _object(dice, sub):
    found = {}
    if dice.random() < 0.7:
        found["properties"] = {name: sub() for name in dice.sample(NAMES, dice.randint(1, 3))}
    if dice.random() < 0.3:
        found["patternProperties"] = {dice.choice(PATTERNS): sub()}
    if dice.random() < 0.3:
        found["additionalProperties"] = dice.choice((False, sub()))
    if dice.random() < 0.3:
        found["required"] = dice.sample(NAMES, dice.randint(1, 2))
    return found


def _counts(dice, sub):
    low, kind = dice.randrange(3), dice.choice(("Items", "Properties", "Length"))
    return {f"min{kind}": low, f"max{kind}": low + dice.randrange(3)}


def _array(dice, sub):
    found = {}
    if dice.random() < 0.4:
        found["prefixItems"] = _some(dice, sub)
    if dice.random() < 0.5:
        found["items"] = sub()
    if dice.random() < 0.4:
        found["contains"] = sub()
        if dice.random() < 0.4:
            found["minContains"] = dice.randrange(3)
        if dice.random() < 0.4:
            found["maxContains"] = dice.randrange(1, 3)
    return found


_SIMPLE = (
    _type,
    _enum,
    _counts,
    lambda dice, sub: {"const": any_value(dice, 2)},
    lambda dice, sub: {"minimum": dice.choice((0, 1, 1.5))},
    lambda dice, sub: {"exclusiveMaximum": dice.choice((1, 2, 10))},
    lambda dice, sub: {"multipleOf": dice.choice((1, 2, 0.5, 5))},
    lambda dice, sub: {"pattern": dice.choice(PATTERNS)},
    lambda dice, sub: {"required": dice.sample(NAMES, dice.randint(1, 2))},
    lambda dice, sub: {"dependentRequired": {dice.choice(NAMES): [dice.choice(NAMES)]}},
    lambda dice, sub: {"uniqueItems": True},
)
_MAKERS = (
    *_SIMPLE,
    *(_object, _object, _object, _array, _array),
    lambda dice, sub: {"allOf": _some(dice, sub)},
    lambda dice, sub: {"anyOf": _some(dice, sub)},
    lambda dice, sub: {"oneOf": _some(dice, sub)},
    lambda dice, sub: {"not": sub()},
    lambda dice, sub: {"if": sub(), "then": sub()},
    lambda dice, sub: {"if": sub(), "then": sub(), "else": sub()},
    lambda dice, sub: {"propertyNames": sub()},
    lambda dice, sub: {"dependentSchemas": {dice.choice(NAMES): sub()}},
    lambda dice, sub: {"unevaluatedProperties": dice.choice((False, sub()))},
    lambda dice, sub: {"unevaluatedItems": dice.choice((False, sub()))},
)

"""Proves that alternatives of ``oneOf`` exclude each other, where that is easy to see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.structured.checked.exact import Exact, exact
from engine.structured.keywords import KEYWORDS_OF, enumerated, named, texts_in
from engine.structured.weakened.opposites import EXCEPT
from engine.structured.weakened.readings import SchemaReading

Schema = dict[str, Any]


def part_types(readings: Sequence[SchemaReading]) -> None:
    """Remove a type from two readings of different ``oneOf`` alternatives if both have the same
    keywords for it: its values satisfy either both alternatives or none."""
    same: list[tuple[SchemaReading, set[str]]] = []
    for at, one in enumerate(readings):
        for other in readings[:at]:
            if _differ(one, other):
                found = _same_types(one, other)
                same += [(one, found), (other, found)]
    for reading, types in same:
        reading.types -= types


def _same_types(one: SchemaReading, other: SchemaReading) -> set[str]:
    common = {id(part.schema) for part in one.parts} & {id(part.schema) for part in other.parts}
    own = [part.schema for part in (*one.parts, *other.parts) if id(part.schema) not in common]
    keys = {key for schema in own for key in schema}
    if keys & {"enum", "const", EXCEPT}:
        return set()
    return {
        kind
        for kind, speaks in KEYWORDS_OF.items()
        if kind in one.types & other.types and not keys & speaks
    }


def are_apart(readings: Sequence[SchemaReading]) -> bool:
    """Whether surely no value satisfies two readings of different alternatives of a ``oneOf``."""
    return all(
        _are_apart(one, other)
        for at, one in enumerate(readings)
        for other in readings[:at]
        if _differ(one, other)
    )


def _differ(one: SchemaReading, other: SchemaReading) -> bool:
    return any(other.taken.get(each, way) != way for each, way in one.taken.items())


def _are_apart(one: SchemaReading, other: SchemaReading) -> bool:
    common = one.types & other.types
    if common == {"number"} or not common:
        return not common
    own, others = _values(one), _values(other)
    if own is not None and others is not None:
        return not own & others
    if common != {"object"}:
        return False
    return _lacks(one, other) or _lacks(other, one) or _have_another(one, other)


def _have_another(one: SchemaReading, other: SchemaReading) -> bool:
    """Whether some property that one of two readings requires can have no type or no value that
    both readings allow."""
    for name in _required(one) | _required(other):
        own, others = one.constants.get(name), other.constants.get(name)
        if own is not None and others is not None and not set(own) & set(others):
            return True
        if own is not None and others is None and set(own) <= set(other.excluded.get(name, ())):
            return True
        types = [_types_at(each, name) for each in (one, other)]
        if not types[0] & types[1]:
            return True
    return False


def _required(reading: SchemaReading) -> set[str]:
    return {name for part in reading.parts for name in texts_in(part.schema.get("required"))}


def _types_at(reading: SchemaReading, name: str) -> frozenset[str]:
    """Return the types that a reading allows for a property; "integer" counts as "number"."""
    found = frozenset({"null", "boolean", "number", "string", "array", "object"})
    for part in reading.parts:
        schema = named(part.schema.get("properties")).get(name)
        if isinstance(schema, dict) and "type" in schema:
            kind = schema["type"]
            names = {kind} if isinstance(kind, str) else set(kind)
            found &= {"number" if each == "integer" else each for each in names}
    return found


def _lacks(one: SchemaReading, other: SchemaReading) -> bool:
    """Whether ``one`` forbids a property that ``other`` requires."""
    for name in _required(other):
        if one.constants.get(name) == []:
            return True
        is_closed = any(
            part.schema.get("additionalProperties") is False
            and name not in named(part.schema.get("properties"))
            and not part.schema.get("patternProperties")
            for part in one.parts
        )
        if is_closed or _is_left_out(one, name):
            return True
    return False


def _is_left_out(reading: SchemaReading, name: str) -> bool:
    """Whether an ``unevaluatedProperties: false`` of the reading forbids this name."""
    for number, holder in reading.holders.items():
        if holder.get("unevaluatedProperties") is not False:
            continue
        group = [part.schema for part in reading.parts if number in part.holders]
        speaks = ("additionalProperties", "patternProperties")
        if not any(
            any(key in each for key in speaks) or name in named(each.get("properties"))
            for each in group
        ):
            return True
    return False


def _values(reading: SchemaReading) -> set[Exact] | None:
    found: set[Exact] | None = None
    for part in reading.parts:
        if "const" in part.schema or "enum" in part.schema:
            own = {exact(each) for each in enumerated(part.schema)}
            found = own if found is None else found & own
    return found

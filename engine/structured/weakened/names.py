"""Finds the schemas that apply to each property of an object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.structured.checked.expressions import searcher
from engine.structured.keywords import listed, named
from engine.structured.schemas import SchemaError
from engine.structured.weakened.readings import SchemaPart, SchemaReading

Schema = dict[str, Any]
UNEVALUATED = "unevaluatedProperties"
LAST = 1 << 30  # a rank after all keywords of a schema


@dataclass
class NameGroup:
    """An ``unevaluatedProperties`` schema, and the property names to which it does not apply."""

    others: Any  # the schema of all other properties
    covers_all: bool = False
    names: set[str] = field(default_factory=set)
    patterns: set[str] = field(default_factory=set)

    def covers(self, name: str) -> bool:
        if self.covers_all or name in self.names:
            return True
        return any(matches(pattern, name) for pattern in self.patterns)


class SchemasByName:
    """Finds the schemas for each property of an object, given one choice from every ``anyOf``."""

    def __init__(self, reading: SchemaReading) -> None:
        self._by_name: dict[str, list[Any]] = {}
        self._general: list[SchemaPart] = []  # with patterns or ``additionalProperties``
        for part in reading.parts:
            for name, each in named(part.schema.get("properties")).items():
                self._by_name.setdefault(name, []).append(each)
            if part.schema.get("patternProperties") or covers_others(part):
                self._general.append(part)
        self._groups = [
            _group(holder[UNEVALUATED], number, reading.parts)
            for number, holder in reading.holders.items()
            if UNEVALUATED in holder
        ]

    def of_name(self, name: str) -> list[Any]:
        """Return the schemas that apply to a property with this name."""
        found = list(self._by_name.get(name, ()))
        for part in self._general:
            found += _in_general(part, name)
        return [*found, *(each.others for each in self._groups if not each.covers(name))]

    def of_others(self) -> list[Any]:
        """Return the schemas of properties that match no ``properties`` or
        ``patternProperties``."""
        found = [
            part.schema["additionalProperties"] for part in self._general if covers_others(part)
        ]
        return [*found, *(each.others for each in self._groups if not each.covers_all)]

    def of_pattern(self, pattern: str, group: Sequence[str]) -> list[Any]:
        """Return the schemas that apply to properties whose names match ``pattern``. group:
        ``pattern`` and all other patterns that such a name may match."""
        found: list[Any] = []
        for part in self._general:
            patterns = named(part.schema.get("patternProperties"))
            if pattern in patterns:
                found.append(patterns[pattern])
            elif covers_others(part) and not any(each in patterns for each in group):
                found.append(part.schema["additionalProperties"])
        for each in self._groups:
            if not each.covers_all and each.patterns.isdisjoint(group):
                found.append(each.others)
        return found


def close(reading: SchemaReading) -> Schema | None:
    """Forbid properties that ``reading`` neither names nor requires, by adding a schema. Returns
    this schema, which must be kept alive; ``None`` if no property is named or a keyword decides."""
    schemas = [part.schema for part in reading.parts if not part.is_silent]
    keywords = {key for schema in schemas for key in schema}
    held = any(UNEVALUATED in holder for holder in reading.holders.values())
    if held or keywords & {"additionalProperties", "const", "enum"}:
        return None
    names = {name for schema in schemas for name in named(schema.get("properties"))}
    patterns = {each for schema in schemas for each in named(schema.get("patternProperties"))}
    least = max((schema.get("minProperties", 0) for schema in schemas), default=0)
    if not (names or patterns) or (least > len(names) and not patterns):
        return None
    required = [name for schema in schemas for name in listed(schema.get("required"))]
    unnamed = dict.fromkeys((name for name in required if name not in names), True)
    closing: Schema = {"properties": unnamed, UNEVALUATED: False}
    reading.holders[id(closing)] = closing
    whole = [*reading.parts, SchemaPart(closing, rank=(LAST,))]
    reading.parts[:] = [part._replace(holders=(*part.holders, id(closing))) for part in whole]
    return closing


def _group(others: Any, number: int, parts: Sequence[SchemaPart]) -> NameGroup:
    """Make the group of names that a schema's ``unevaluatedProperties`` does not cover. others:
    this keyword's value; number: the ``id()`` of the schema; parts: all schemas of the object."""
    found = NameGroup(others)
    for part in parts:
        if number not in part.holders or part.is_silent:
            continue
        is_inner = id(part.schema) != number and UNEVALUATED in part.schema
        found.covers_all = found.covers_all or covers_others(part) or is_inner
        found.names |= named(part.schema.get("properties")).keys()
        found.patterns |= named(part.schema.get("patternProperties")).keys()
    return found


def _in_general(part: SchemaPart, name: str) -> list[Any]:
    patterns = named(part.schema.get("patternProperties"))
    found = [each for pattern, each in patterns.items() if matches(pattern, name)]
    if found or name in named(part.schema.get("properties")) or not covers_others(part):
        return found
    return [part.schema["additionalProperties"]]


def covers_others(part: SchemaPart) -> bool:
    return "additionalProperties" in part.schema


def matches(pattern: str, name: str) -> bool:
    try:
        return searcher(pattern)(name)
    except SchemaError:
        return False  # llguidance reports the error in the pattern

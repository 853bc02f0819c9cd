"""What the schemas of an object say of its properties, by their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.structured.checked.expressions import searcher
from engine.structured.schemas import SchemaError
from engine.structured.weakened.readings import SchemaPart, SchemaReading
from engine.structured.weakened.shapes import listed, named

Schema = dict[str, Any]
UNEVALUATED = "unevaluatedProperties"
LAST = 1 << 30  # after all that is written in a schema


@dataclass
class NameGroup:
    """The schema of properties that no schema of a group names."""

    others: Any
    speaks_of_all: bool = False
    names: set[str] = field(default_factory=set)
    patterns: set[str] = field(default_factory=set)

    def speaks_of(self, name: str) -> bool:
        if self.speaks_of_all or name in self.names:
            return True
        return any(matches(pattern, name) for pattern in self.patterns)


class SchemasByName:
    """The schemas that hold for each property of one reading, by the property's name."""

    def __init__(self, reading: SchemaReading) -> None:
        self._by_name: dict[str, list[Any]] = {}
        self._general: list[SchemaPart] = []  # parts that speak of names without naming them
        for part in reading.parts:
            for name, each in named(part.schema.get("properties")).items():
                self._by_name.setdefault(name, []).append(each)
            if part.schema.get("patternProperties") or speaks_of_others(part):
                self._general.append(part)
        self._groups = [
            _group(holder[UNEVALUATED], number, reading.parts)
            for number, holder in reading.holders.items()
            if UNEVALUATED in holder
        ]

    def of_name(self, name: str) -> list[Any]:
        """The schemas that hold for a property of this name."""
        found = list(self._by_name.get(name, ()))
        for part in self._general:
            found += _in_general(part, name)
        return [*found, *(each.others for each in self._groups if not each.speaks_of(name))]

    def of_others(self) -> list[Any]:
        """Schemas that hold for properties that have no name or pattern."""
        found = [
            part.schema["additionalProperties"] for part in self._general if speaks_of_others(part)
        ]
        return [*found, *(each.others for each in self._groups if not each.speaks_of_all)]

    def of_pattern(self, pattern: str, group: Sequence[str]) -> list[Any]:
        """Schemas that hold for names that match this pattern, and perhaps others of the group."""
        found: list[Any] = []
        for part in self._general:
            patterns = named(part.schema.get("patternProperties"))
            if pattern in patterns:
                found.append(patterns[pattern])
            elif speaks_of_others(part) and not any(each in patterns for each in group):
                found.append(part.schema["additionalProperties"])
        for each in self._groups:
            if not each.speaks_of_all and each.patterns.isdisjoint(group):
                found.append(each.others)
        return found


def close(reading: SchemaReading) -> Schema | None:
    """Leave the properties that it names and those that are only required, if it names some and
    says nothing of others. Returns the schema that says so, which must stay."""
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
    """number: that of the schema whose ``unevaluatedProperties`` holds."""
    found = NameGroup(others)
    for part in parts:
        if number not in part.holders or part.is_silent:
            continue
        is_inner = id(part.schema) != number and UNEVALUATED in part.schema
        found.speaks_of_all = found.speaks_of_all or speaks_of_others(part) or is_inner
        found.names |= named(part.schema.get("properties")).keys()
        found.patterns |= named(part.schema.get("patternProperties")).keys()
    return found


def _in_general(part: SchemaPart, name: str) -> list[Any]:
    patterns = named(part.schema.get("patternProperties"))
    found = [each for pattern, each in patterns.items() if matches(pattern, name)]
    if found or name in named(part.schema.get("properties")) or not speaks_of_others(part):
        return found
    return [part.schema["additionalProperties"]]


def speaks_of_others(part: SchemaPart) -> bool:
    return "additionalProperties" in part.schema


def matches(pattern: str, name: str) -> bool:
    try:
        return searcher(pattern)(name)
    except SchemaError:
        return False  # the library says what is wrong with it

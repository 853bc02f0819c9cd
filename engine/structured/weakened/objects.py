"""Merges the keywords for objects of several schemas into schemas for llguidance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Any, Literal

from engine.structured.keywords import listed, named, texts_in
from engine.structured.schemas import of_rust, quoted
from engine.structured.weakened.arrays import Writes
from engine.structured.weakened.library import is_taken, no_name_matches
from engine.structured.weakened.names import SchemasByName, matches
from engine.structured.weakened.readings import SchemaReading
from engine.structured.weakened.scalars import Loosen, limits, widened

Schema = dict[str, Any]
Order = Literal["schema", "free", "small"]
"""The order in which properties are written: the schema's, any, or the schema's unless the grammar
for any order is smaller."""

MOST_SETS = 32  # sets of optional properties, one of which must be present
MOST_GROUPS = 128  # groups of properties with equal schemas, in any order: all pairs are compared
MOST_AT_ONCE = 32  # schemas of the properties beyond that; more are left to the checker
FEW_GROUPS = 8  # up to this many, an object in any order is smaller than one in a fixed order
MOST_PATTERNS = 48
# Limits for a fixed order: compiling time grows with the square of the properties, to a second for
# this many, and a mask takes 10 ms where this many optional properties may follow.
MOST_IN_ORDER = 4_000
MOST_OPTIONAL = 500
# Where one of these is only partly enforced, another way of the choice may require names that a
# fixed order could no longer write; any order can.
ORDERED = ("if", "not", "anyOf", "oneOf", "dependentRequired", "dependentSchemas", "dependencies")


@dataclass
class ObjectSchema:
    """The properties of an object, each with its schema; ``False`` forbids a property."""

    properties: dict[str, Any]  # by name, in the order of the schema
    patterns: dict[str, Any]  # schemas by a pattern of names
    additional: Any  # the schema of all other properties
    required: list[str]


class Objects:
    """Writes schemas for llguidance: objects that satisfy all schemas in ``reading``."""

    def __init__(
        self, reading: SchemaReading, writer: Writes, loosen: Loosen, order: Order = "schema"
    ) -> None:
        self._parts = reading.parts
        self._writer = writer
        self._loosen = loosen
        self._is_free = order == "free" or any(key in reading.loose for key in ORDERED)
        self._is_small = order == "small"
        self._by_name = SchemasByName(reading)
        self._name_schemas = [
            part.schema["propertyNames"]
            for part in self._parts
            if part.schema.get("propertyNames", True) not in (True, {})
        ]

    def written(self) -> list[Schema]:
        """Return alternative schemas for the object; empty if no object can be valid."""
        schemas = [part.schema for part in self._parts]
        found = limits(schemas, "minProperties", "maxProperties")
        if found is None:
            return []
        names = self._names()
        if names is None:
            return []
        least, most = found.get("minProperties", 0), found.get("maxProperties")
        if most is not None and most < len(names.required):
            return []
        if self._is_free or self._is_too_large(names):
            return [self._free(names, least, most)]
        return self._counted(names, least, most)

    def _is_too_large(self, names: ObjectSchema) -> bool:
        """Whether to allow any order of properties, as a schema with a fixed order is too large."""
        num_properties = len(names.properties)
        if num_properties > MOST_IN_ORDER or num_properties - len(names.required) > MOST_OPTIONAL:
            return True
        return self._is_small and _num_schemas(names.properties) <= FEW_GROUPS

    # -- the schemas of each name

    def _names(self) -> ObjectSchema | None:
        """Write the schema of each property; ``None`` if a required property is impossible."""
        required = texts_in(
            [name for part in self._parts for name in listed(part.schema.get("required"))]
        )
        patterns = self._patterns()
        additional = self._writer.place(self._by_name.of_others())
        if additional is not False or patterns:
            self._loosen("names", True)  # a name may come twice
        limited, by_pattern = self._limited_names()
        own = [*self._own_names(), *required, *(limited or ())]
        properties: dict[str, Any] = {}
        needed, able = set(required), None if limited is None else set(limited)
        for name in dict.fromkeys(own):
            is_right = self._allows(name) and (able is None or name in able)
            written = self._writer.place(self._by_name.of_name(name)) if is_right else False
            if written is False and name in needed:
                return None
            properties[name] = written
        if limited is not None:
            additional = False
            patterns = {}
        elif by_pattern is not None and not patterns and additional is not False:
            patterns, additional = {by_pattern: additional}, False
        if additional is False and not patterns:
            properties = {name: each for name, each in properties.items() if each is not False}
        return self._apart(ObjectSchema(properties, patterns, additional, required))

    def _own_names(self) -> Iterator[str]:
        for part in sorted(self._parts, key=lambda part: (part.is_silent, part.rank)):
            yield from named(part.schema.get("properties"))

    # -- patterns of names

    def _patterns(self) -> dict[str, Any]:
        """Return the schemas of pattern properties by pattern. No name matches two patterns."""
        patterns = list(
            dict.fromkeys(
                pattern
                for part in self._parts
                for pattern in named(part.schema.get("patternProperties"))
            )
        )
        found: dict[str, Any] = {}
        for group in _overlapping(patterns, self._loosen):
            values = [self._writer.place(self._by_name.of_pattern(each, group)) for each in group]
            kept = [each for each in values if each is not False]
            if len(group) > 1:
                self._loosen("patternProperties", group)
            pattern = "|".join(f"(?:{each})" for each in map(_rust, group))
            found[pattern if len(group) > 1 else _rust(group[0])] = one_of(kept)
        return found

    def _apart(self, names: ObjectSchema) -> ObjectSchema:
        """Drop each named property that also matches a pattern if both have recursive schemas,
        which llguidance cannot merge. Then only the pattern's schema applies."""
        for pattern, value in names.patterns.items():
            if "$ref" not in str(value):
                continue
            for name in [each for each in names.properties if matches(pattern, each)]:
                if "$ref" in str(names.properties[name]):
                    del names.properties[name]
                    self._loosen("patternProperties", pattern)
                    names.required = [each for each in names.required if each != name]
        return names

    # -- propertyNames

    def _limited_names(self) -> tuple[list[str] | None, str | None]:
        """Return the names that ``propertyNames`` allows: a list and ``None``, or ``None`` and a
        pattern. Both are ``None`` if names are not limited."""
        schemas = self._name_schemas
        if not schemas:
            return None, None
        self._loosen("propertyNames", schemas[0])
        written = self._writer.place([*schemas, {"type": "string"}])
        if written is False:
            return [], None
        if isinstance(written, dict) and "enum" in written:
            return [each for each in written["enum"] if isinstance(each, str)], None
        return None, _pattern_of(written)

    def _allows(self, name: str) -> bool:
        """Whether a property name satisfies the string keywords of ``propertyNames``; other
        keywords are not checked."""
        return all(each is not False and _is_name(each, name) for each in self._name_schemas)

    # -- how many

    def _counted(self, names: ObjectSchema, least: int, most: int | None) -> list[Schema]:
        """Return alternative schemas for objects with ``least`` to ``most`` properties, in the
        schema's order."""
        written = _written(names)
        writable = [name for name, each in names.properties.items() if each is not False]
        needed = set(names.required)
        optional = [name for name in writable if name not in needed]
        is_closed = names.additional is False and not names.patterns
        if most is not None and (not is_closed or most < len(writable)):
            if optional:
                self._loosen("maxProperties", most)
            else:
                written["maxProperties"] = most
        missing = least - len(names.required)
        if missing <= 0:
            return [written]
        if not optional:
            return [] if is_closed else [{**written, "minProperties": least}]
        if not is_closed:
            self._loosen("minProperties", least)  # unnamed ones may follow
            return [written]
        if missing > len(optional):
            return []
        if comb(len(optional), missing) > MOST_SETS:
            self._loosen("minProperties", least)
            return [self._free(names, least, most)]
        return [_with_first(written, optional, each) for each in combinations(optional, missing)]

    def _free(self, names: ObjectSchema, least: int, most: int | None) -> Schema:
        """Return a schema for objects with properties in any order. It enforces neither
        ``required`` nor unique names; a checker must."""
        self._loosen("required", names.required)
        writable = {name: each for name, each in names.properties.items() if each is not False}
        own = {
            name: each
            for name, each in writable.items()  # a pattern covers names that match it
            if all(no_name_matches(pattern, f"^{quoted(name)}$") for pattern in names.patterns)
        }
        groups = {**names.patterns, **_grouped(own)}
        least = max(least, len(names.required))
        found: Schema = {"patternProperties": groups} if groups else {}
        if banned := [name for name, each in names.properties.items() if each is False]:
            found["properties"] = dict.fromkeys(banned, False)
        if names.additional is False and not names.patterns:
            most = len(writable) if most is None else min(most, len(writable))
        if names.additional not in (True, {}):
            found["additionalProperties"] = names.additional
        if not banned:
            found |= {"minProperties": least} if least else {}
            found |= {} if most is None else {"maxProperties": most}
        return found


def _written(names: ObjectSchema) -> Schema:
    found: Schema = {}
    if names.properties:
        found["properties"] = names.properties
    if names.required:
        found["required"] = names.required
    if names.patterns:
        found["patternProperties"] = names.patterns
    if names.additional not in (True, {}):
        found["additionalProperties"] = names.additional
    return found


def _with_first(written: Schema, optional: list[str], first: tuple[str, ...]) -> Schema:
    """Narrow a schema to objects whose first optional properties are those in ``first``."""
    last = optional.index(first[-1])
    left = {name for name in optional[:last] if name not in first}
    properties = {name: each for name, each in written["properties"].items() if name not in left}
    return {**written, "properties": properties, "required": [*written.get("required", []), *first]}


def _grouped(properties: dict[str, Any]) -> dict[str, Any]:
    """Convert properties to ``patternProperties``: names with equal schemas share a pattern."""
    by_value: dict[str, list[str]] = {}
    values: dict[str, Any] = {}
    for name, each in properties.items():
        values[repr(each)] = each
        by_value.setdefault(repr(each), []).append(name)
    groups = [(names, values[key]) for key, names in by_value.items()]
    if len(groups) > MOST_GROUPS:
        rest = groups[MOST_GROUPS - 1 :]
        whole = [name for names, _ in rest for name in names]
        any_of_them = one_of([each for _, each in rest]) if len(rest) <= MOST_AT_ONCE else True
        groups = [*groups[: MOST_GROUPS - 1], (whole, any_of_them)]
    return {f"^(?:{'|'.join(map(quoted, names))})$": value for names, value in groups}


def _num_schemas(properties: dict[str, Any]) -> int:
    return len({repr(each) for each in properties.values()})


def one_of(schemas: list[Any]) -> Any:
    """Return a schema that allows what any of these schemas allows."""
    if any(each in (True, {}) for each in schemas):
        return True
    kept = list({repr(each): each for each in schemas}.values())
    if not kept:
        return False
    return kept[0] if len(kept) == 1 else {"anyOf": kept}


def _is_name(schema: Schema, name: str) -> bool:
    if "const" in schema and schema["const"] != name:
        return False
    if "enum" in schema and name not in listed(schema["enum"]):
        return False
        return False
    if "maxLength" in schema and len(name) > schema["maxLength"]:
        return False
    if "minLength" in schema and len(name) < schema["minLength"]:
        return False
    return not ("pattern" in schema and not matches(schema["pattern"], name))


def _pattern_of(written: Any) -> str | None:
    """Return a pattern that matches all strings that a schema allows; ``None`` if the schema has no
    pattern and no length."""
    if not isinstance(written, dict):
        return None
    if "pattern" in written:
        found: str = written["pattern"]
        return found
    if "minLength" in written or "maxLength" in written:
        return rf"^[\s\S]{{{written.get('minLength', 0)},{written.get('maxLength', '')}}}$"
    return None


def _rust(pattern: str) -> str:
    """Translate a pattern to llguidance's dialect, or else to one that matches more texts."""
    written = of_rust(pattern)
    if is_taken(written):
        return written
    wider = of_rust(widened(pattern))
    return wider if is_taken(wider) else written


def _overlapping(patterns: list[str], loosen: Loosen) -> Iterator[list[str]]:
    """Split patterns into groups: no property name matches patterns of two different groups."""
    for each in patterns:
        if not is_taken(of_rust(each)):
            loosen("patternProperties", each)
    if len(patterns) > MOST_PATTERNS:
        yield patterns
        return
    groups: list[list[str]] = []
    for each in patterns:
        own = _rust(each)
        joined = [
            group
            for group in groups
            if not all(no_name_matches(own, _rust(other)) for other in group)
        ]
        groups = [group for group in groups if group not in joined]
        groups.append([*(one for group in joined for one in group), each])
    yield from groups

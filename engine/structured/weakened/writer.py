"""Rewrites a JSON schema for llguidance, which does not support ``anyOf`` and other choices next to
keywords.

Each value in the document becomes a definition without such choices. The resulting grammar allows
everything that the schema allows, except unusual spellings. It allows more where a keyword is left
to the checker. A *place* is a set of schemas for the same value; it is written once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from engine.structured.checked.checker import Checker
from engine.structured.checked.documents import Document
from engine.structured.checked.exact import exact
from engine.structured.checked.known import KNOWN
from engine.structured.keywords import (
    ANNOTATIONS,
    OF_ARRAYS,
    OF_NUMBERS,
    OF_OBJECTS,
    OF_STRINGS,
    enumerated,
    listed,
)
from engine.structured.schemas import EVERY_TYPE, SchemaError, types_of_value
from engine.structured.weakened.alternatives import are_apart, part_types
from engine.structured.weakened.arrays import array
from engine.structured.weakened.digests import Digests
from engine.structured.weakened.names import close
from engine.structured.weakened.objects import Objects, Order, one_of
from engine.structured.weakened.opposites import EXCEPT
from engine.structured.weakened.readings import (
    REFERENCES,
    UNEVALUATED,
    SchemaReader,
    SchemaReading,
    together,
)
from engine.structured.weakened.scalars import numbers, strings

Schema = dict[str, Any]
MOST_ORDERED = 8_000  # properties in a fixed order in the whole document: seven symbols each
MOST_TRIED = 32  # keywords that are removed in turn, to name those that contradict each other
MOST_TRIED_BYTES = 10_000  # of the schema: each trial writes all of it
MOST_INLINE = 5_000  # properties whose schemas are written inline
MOST_REFERENCES = 100  # in a chain
Key = frozenset[Any]
Signature = tuple[Any, ...]
# Keywords that are read before the ones of a flat schema, or that do not limit values.
_SILENT = ANNOTATIONS | {*REFERENCES, *UNEVALUATED, "type", "allOf", "anyOf", "oneOf", "not"}
_SILENT |= {"if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies"}
_OF_SCALARS = OF_STRINGS | OF_NUMBERS


class Written(NamedTuple):
    """A schema that was rewritten for llguidance, and what it does not enforce."""

    schema: Any
    needs_checker: bool
    """Whether it allows more than the original schema."""
    may_repeat: bool
    """Whether it has objects in which a name may come twice."""


def written(
    schema: Any, *, is_free: bool = False, is_lenient: bool = False, is_closed: bool = False
) -> Written:
    """Rewrite a schema for llguidance. Raises ``SchemaError`` that names a keyword which cannot be
    enforced.

    is_free: properties may come in any order (always so in a very large schema); is_lenient: ignore
    keywords that cannot be enforced; is_closed: objects have no properties that the schema does not
    name."""
    try:
        return _written(schema, is_free, is_lenient, is_closed)
    except _ContradictionError as error:
        keywords = _contradicting(schema, is_free, is_lenient, is_closed)
        raise SchemaError(f"{error}{f': see {keywords}' if keywords else ''}") from None


def _written(schema: Any, is_free: bool, is_lenient: bool, is_closed: bool) -> Written:
    try:
        order: Order = "free" if is_free else "schema"
        return _SchemaWriter(schema, order, is_lenient=is_lenient, is_closed=is_closed).whole(
            schema
        )
    except _TooManyError:
        return _SchemaWriter(schema, "small", is_lenient=is_lenient, is_closed=is_closed).whole(
            schema
        )


def _contradicting(schema: Any, is_free: bool, is_lenient: bool, is_closed: bool) -> str:
    """Find top-level keywords without which a contradictory schema would allow a value. Returns
    their names, separated by commas; "" if there are none or the schema is large."""
    is_small = isinstance(schema, dict) and len(schema) <= MOST_TRIED
    if not is_small or len(msgspec.json.encode(schema)) > MOST_TRIED_BYTES:
        return ""
    found = []
    for keyword in schema:
        rest = {name: value for name, value in schema.items() if name != keyword}
        with suppress(SchemaError):
            _written(rest, is_free, is_lenient, is_closed)
            found.append(keyword)
    return ", ".join(found)


class _ContradictionError(SchemaError):
    """The schema allows no value."""


class _TooManyError(Exception):
    """Properties in a fixed order would need more grammar symbols than llguidance allows."""


class _SchemaWriter:
    """Rewrites one JSON schema document for llguidance."""

    def __init__(self, schema: Any, order: Order, *, is_lenient: bool, is_closed: bool) -> None:
        self._reader = SchemaReader(Document(schema), is_lenient=is_lenient)
        self._order = order
        self._is_closed = is_closed
        self._is_lenient = is_lenient
        self._found: dict[Key, Any] = {}
        self._digests = Digests()
        self._by_readings: dict[Signature, Any] = {}
        self._definitions: dict[str, Any] = {}
        self._waiting: deque[tuple[str, list[SchemaReading]]] = deque()
        self._kept: list[Any] = []  # schemas made here, kept alive so that their ids stay unique
        self._is_loose = False
        self._may_repeat = False

    def whole(self, schema: Any) -> Written:
        root = self.place([schema])
        num_ordered = 0
        while self._waiting:
            name, readings = self._waiting.popleft()
            self._definitions[name] = found = self._value(readings)
            num_ordered += sum(map(len, _named_in(found)))
            if num_ordered > MOST_ORDERED and self._order == "schema":
                raise _TooManyError
        self._leave_out_nothing()
        if root is True:
            root = {}
        elif root is False or self._at(root) is False:
            raise _ContradictionError("no value is valid: the schema contradicts itself")
        if self._definitions:
            root = {**root, "$defs": shared(self._definitions)}
        return Written(root, self._is_loose, self._may_repeat)

    # -- Writes

    def place(self, schemas: list[Any]) -> Any:
        """Return one schema, or a reference to it, for values that satisfy all of these schemas."""
        if any(each is False for each in schemas):
            return False
        kept = [each for each in schemas if not (each is True or _is_annotation(each))]
        if not kept:
            self._may_repeat = True
            return True
        self._kept.append(kept)
        key = frozenset(map(self._key, kept))
        if key not in self._found:
            self._found[key] = False  # a choice that leads back to itself allows nothing new
            self._found[key] = self._place(kept)
        return self._found[key]

    def num_values(self, written: Any) -> int | None:
        if not isinstance(written, dict):
            return None
        if "enum" in written:
            return len({exact(each) for each in written["enum"]})
        if written.keys() != {"type"}:
            return None
        kinds = written["type"] if isinstance(written["type"], list) else [written["type"]]
        counts = [{"boolean": 2, "null": 1}.get(kind) for kind in kinds]
        return None if None in counts else sum(filter(None, counts))

    def _key(self, schema: Any) -> Any:
        """Return a key that is equal for equivalent schemas."""
        schema = self._followed(schema)
        if isinstance(schema, dict) and _is_closing(schema) and len(listed(schema["allOf"])) == 1:
            return ("closed", self._key(schema["allOf"][0]))
        home = self._reader.home(schema)
        if home is None:
            return id(schema)
        return id(home), self._digests.of(schema)

    def _followed(self, schema: Any) -> Any:
        """Return the target of a schema that is only a reference; any other schema as it is."""
        for _ in range(MOST_REFERENCES):
            if not isinstance(schema, dict) or schema.keys() - ANNOTATIONS != {"$ref"}:
                break
            targets = self._reader.targets(schema, ["$ref"])
            if len(targets) != 1 or not isinstance(targets[0], dict):
                break
            schema = targets[0]
        return schema

    def _place(self, schemas: list[Any]) -> Any:
        ways = self._union(schemas[0]) if len(schemas) == 1 else None
        if ways is not None:
            return one_of([each for each in map(self.place, ways) if each is not False])
        readings = self._reader.readings(schemas)
        if not readings:
            return False
        if self._is_closed and len(schemas) > 1:
            self._kept += map(close, readings)
        if all(_is_scalar(each) for each in readings):
            return self._value(readings)
        if (known := self._by_readings.get(own := _signature(readings))) is not None:
            return known
        name = str(len(self._definitions))
        self._by_readings[own] = {"$ref": f"#/$defs/{name}"}
        self._definitions[name] = {}
        self._waiting.append((name, readings))
        return {"$ref": f"#/$defs/{name}"}

    def _union(self, schema: Any) -> list[list[Any]] | None:
        """Return the alternatives of a schema with only ``anyOf`` or ``oneOf``, or ``None``."""
        schema = self._followed(schema)
        is_closed = False
        if isinstance(schema, dict) and _is_closing(schema) and len(schema["allOf"]) == 1:
            is_closed, schema = True, self._followed(schema["allOf"][0])
        if not isinstance(schema, dict):
            return None
        keywords = self._reader.read(schema).keys() - ANNOTATIONS
        if schema.get("unevaluatedProperties") is False:
            is_closed, keywords = True, keywords - {"unevaluatedProperties"}
        if len(keywords) != 1 or (key := next(iter(keywords))) not in ("anyOf", "oneOf"):
            return None
        if key == "oneOf" and not are_apart(self._reader.readings([schema])):
            return None
        alternatives = listed(schema[key])
        ways = [[each] for each in alternatives]
        if is_closed:
            ways = [[self._closed(each)] for each in ways]
            if key == "anyOf":
                ways += [[self._closed(each)] for each in together(alternatives)]
        return ways

    def _closed(self, schemas: list[Any]) -> Schema:
        """Make a schema for values that satisfy all schemas, with no unnamed properties."""
        made = {"allOf": schemas, "unevaluatedProperties": False}
        self._kept.append(made)
        return made

    # -- readings

    def _value(self, readings: Sequence[SchemaReading]) -> Any:
        for reading in readings:
            for key, value in reading.loose.items():
                self._loosen(key, value)
        part_types(readings)
        # A number in a grammar may be a whole one too, so the alternatives may overlap.
        are_fractions = any(e.types & {"integer", "number"} == {"number"} for e in readings)
        if are_fractions or not are_apart(readings):
            self._loosen("oneOf", True)
        return one_of([way for each in readings for way in self._ways(each)])

    def _ways(self, reading: SchemaReading) -> list[Any]:
        """Translate one combination of choices to schemas. A value is allowed if it satisfies one
        of them."""
        if (values := self._values(reading)) is not None:
            return self._listed(values)
        types = self._types(reading)
        schemas = [part.schema for part in reading.parts]
        found: Schema = {}
        if "string" in types:
            self._join(found, types, "string", strings(schemas, self._loosen))
        if types & {"number", "integer"}:
            kind = "number" if "number" in types else "integer"
            self._join(found, types, kind, numbers(schemas, self._loosen))
        if "array" in types and _speaks(schemas, OF_ARRAYS):
            self._join(found, types, "array", array(reading, self, self._loosen))
        elif types & {"array", "object"} and not _speaks(schemas, OF_OBJECTS):
            self._may_repeat = True
        ways: list[Schema] = [found]
        if "object" in types and _speaks(schemas, OF_OBJECTS):
            objects = Objects(reading, self, self._loosen, self._order)
            whole = objects.written()
            if not whole:
                types.discard("object")
            ways = [{**found, **each} for each in whole] or ways
        if not types:
            return []
        return [_typed(types, each, at) for at, each in enumerate(ways)]

    def _listed(self, values: list[Any]) -> list[Any]:
        """Return schemas that allow exactly these values, in any property order if that is free."""
        is_free = self._order == "free"
        free = [each for each in values if is_free and isinstance(each, dict) and len(each) > 1]
        found = [self.place([self._constant(each)]) for each in free]
        rest = [each for each in values if not any(each is one for one in free)]
        return [{"enum": rest}, *found] if rest else found

    def _constant(self, value: dict[str, Any]) -> Schema:
        made = {
            "type": "object",
            "properties": {name: {"const": each} for name, each in value.items()},
            "required": [*value],
            "additionalProperties": False,
        }
        self._kept.append(made)
        return made

    def _join(self, found: Schema, types: set[str], kind: str, more: Schema | None) -> None:
        if more is None:
            types.discard(kind)
            if kind == "number":
                types.discard("integer")
            return
        both = [*found.pop("allOf", []), *more.pop("allOf", [])]
        found.update(more)
        if both:
            found["allOf"] = both

    def _types(self, reading: SchemaReading) -> set[str]:
        excluded = [each for part in reading.parts for each in part.schema.get(EXCEPT, ())]
        types = set(reading.types)
        if None in excluded:
            types.discard("null")
        if {True, False} <= {each for each in excluded if isinstance(each, bool)}:
            types.discard("boolean")
        if any(not _is_excluded(each, types) for each in excluded):
            self._loosen("not", excluded)
        return types

    def _values(self, reading: SchemaReading) -> list[Any] | None:
        """Return the valid values of enum and const; ``None`` without either keyword."""
        own = [part.schema for part in reading.parts if part.schema.keys() & {"enum", "const"}]
        lists = [*map(enumerated, own)]
        lists += [listed(each["enum"]) for each in own if "const" in each and "enum" in each]
        excluded = [each for part in reading.parts for each in part.schema.get(EXCEPT, ())]
        if not lists:
            if excluded and reading.types <= {"boolean", "null"}:
                lists = [[None, True, False]]
            else:
                return None
        first, *others = lists
        allowed = [{exact(each) for each in one} for one in others]
        banned = {exact(each) for each in excluded}
        checkers = [
            Checker({key: part.schema[key] for key in _OF_SCALARS & part.schema.keys()})
            for part in reading.parts
            if not _OF_SCALARS.isdisjoint(part.schema)
        ]
        found: dict[Any, Any] = {}
        for each in first:
            key = exact(each)
            is_in = all(key in one for one in allowed) and key not in banned
            if is_in and self._is_right(each, reading, checkers):
                found.setdefault(key, each)
        return list(found.values())

    def _is_right(self, value: Any, reading: SchemaReading, checkers: Sequence[Checker]) -> bool:
        """Whether an ``enum`` value has a valid type and, if a scalar, obeys the other keywords."""
        if not reading.types & types_of_value(value):
            return False
        if isinstance(value, dict | list):
            keys = OF_OBJECTS if isinstance(value, dict) else OF_ARRAYS
            if _speaks([part.schema for part in reading.parts], keys):
                self._loosen("enum", value)
            return True
        text = msgspec.json.encode(value)
        states = [each.begin() for each in checkers]
        return all(state.feed(text) and state.may_end for state in states)

    def _loosen(self, key: str, value: Any) -> None:
        if key == "names":
            self._may_repeat = True
            return
        if key in _HELD or self._is_lenient or key in KNOWN:
            self._is_loose = True
            return
        if key in _LOOKING:
            raise SchemaError(
                f"pattern is {value!r:.80}, {_LOOKING[key]}; rewrite the pattern without it"
            )
        raise SchemaError(f"{key} is {value!r:.80}, which cannot be enforced: leave it out")

    # -- definitions that allow nothing

    def _at(self, written: Any) -> Any:
        """Return the definition of a reference; any other schema is returned as it is."""
        if isinstance(written, dict) and written.keys() == {"$ref"}:
            return self._definitions[written["$ref"].rpartition("/")[2]]
        return written

    def _leave_out_nothing(self) -> None:
        """Remove references to definitions that allow no value."""
        while any(each is False for each in self._definitions.values()):
            nothing = {name for name, each in self._definitions.items() if each is False}
            for name in nothing:
                self._definitions[name] = None
            for name, each in self._definitions.items():
                if each is not None:
                    self._definitions[name] = _without(each, nothing)
        self._definitions = {
            name: False if each is None else each for name, each in self._definitions.items()
        }


# Keywords that the checker enforces in full, though the grammar enforces most of them.
_HELD = frozenset({"enum", "required", "format", "pattern", "anyOf"})
_LOOKING = {
    "look-around": "which has look-around that cannot be enforced",
    "idle look-ahead": "which has a look-ahead that excludes nothing",
}


def _without(schema: Any, nothing: set[str]) -> Any:
    """Remove references to the definitions named in ``nothing``, which allow no value."""
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return False if schema["$ref"].rpartition("/")[2] in nothing else schema
    if "anyOf" in schema:
        return one_of(
            [e for e in (_without(e, nothing) for e in schema["anyOf"]) if e is not False]
        )
    found = dict(schema)
    for key in ("properties", "patternProperties"):
        if key in schema:
            found[key] = {name: _without(each, nothing) for name, each in schema[key].items()}
    for key in ("items", "additionalProperties"):
        if key in schema:
            found[key] = _without(schema[key], nothing)
    if "prefixItems" in schema:
        found["prefixItems"] = [_without(each, nothing) for each in schema["prefixItems"]]
    return _typed_without(found)


def _typed_without(found: Schema) -> Any:
    """Remove types that have no valid value. Returns ``False`` if no type is left."""
    types = found.get("type", list(EVERY_TYPE))
    types = [types] if isinstance(types, str) else types
    names = [n for n in found.get("required", ()) if found.get("properties", {}).get(n) is False]
    if names:
        types = [each for each in types if each != "object"]
        for key in OF_OBJECTS:
            found.pop(key, None)
    prefix = found.get("prefixItems", [])
    is_short = False in prefix or (found.get("items") is False and not prefix)
    if is_short:
        room = prefix.index(False) if False in prefix else 0
        if found.get("minItems", 0) > room:
            types = [each for each in types if each != "array"]
    if not types:
        return False
    return {**found, "type": types[0] if len(types) == 1 else types}


def _typed(types: set[str], found: Schema, at: int) -> Any:
    """Add the allowed types to the schema ``found``. at: index of ``found`` among its alternatives;
    all but the first are only for objects."""
    kept = {"object"} & types if at else types
    if "number" in kept:
        kept = kept - {"integer"}
    names = [each for each in EVERY_TYPE if each in kept]
    if len(kept) == len(EVERY_TYPE) - 1 and "number" in kept:
        return found or True
    return {"type": names[0] if len(names) == 1 else names, **found}


def _speaks(schemas: Sequence[Schema], keys: frozenset[str]) -> bool:
    return any(not keys.isdisjoint(schema) for schema in schemas)


def shared(definitions: dict[str, Any]) -> dict[str, Any]:
    """Replace equal property schemas by references if there are too many for llguidance."""
    named = [names for each in definitions.values() for names in _named_in(each)]
    if sum(map(len, named)) < MOST_INLINE:
        return definitions
    names: dict[str, str] = {}
    found = {**definitions}
    for properties in named:
        for name, value in properties.items():
            if isinstance(value, dict) and value and "$ref" not in value:
                text = repr(value)
                if text not in names:
                    names[text] = f"v{len(names)}"
                    found[names[text]] = value
                properties[name] = {"$ref": f"#/$defs/{names[text]}"}
    return found


def _named_in(schema: Any) -> list[dict[str, Any]]:
    """Return the ``properties`` of an object schema and of each of its ``anyOf`` alternatives."""
    if not isinstance(schema, dict):
        return []
    objects = [each for each in (schema, *schema.get("anyOf", ())) if isinstance(each, dict)]
    return [each["properties"] for each in objects if "properties" in each]


def _signature(readings: Sequence[SchemaReading]) -> Signature:
    """Return a key that is equal for readings with the same types and schemas."""
    return tuple(_signature_of(each) for each in readings)


def _signature_of(reading: SchemaReading) -> Signature:
    speaking = [part for part in reading.parts if not part.schema.keys() <= _SILENT]
    groups = [
        (
            *((key, str(holder.get(key))) for key in UNEVALUATED),
            *sorted(
                (id(part.schema), part.is_silent) for part in speaking if number in part.holders
            ),
        )
        for number, holder in reading.holders.items()
    ]
    own = sorted((part.is_silent, part.rank, id(part.schema)) for part in speaking)
    order = tuple((is_silent, number) for is_silent, _, number in own)
    loose = tuple(sorted(reading.loose))
    return tuple(sorted(reading.types)), order, tuple(sorted(groups)), loose


def _is_closing(schema: Schema) -> bool:
    """Whether a schema has only ``allOf`` and ``unevaluatedProperties: false``."""
    keywords = schema.keys() - ANNOTATIONS
    return (
        keywords == {"allOf", "unevaluatedProperties"} and schema["unevaluatedProperties"] is False
    )


def _is_annotation(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.keys() <= ANNOTATIONS


def _is_scalar(reading: SchemaReading) -> bool:
    schemas = [part.schema for part in reading.parts]
    if _speaks(schemas, frozenset({"enum", "const"})):
        return True
    is_object = "object" in reading.types and _speaks(schemas, OF_OBJECTS)
    return not is_object and not ("array" in reading.types and _speaks(schemas, OF_ARRAYS))


def _is_excluded(value: Any, types: set[str]) -> bool:
    """Whether a value has none of these types."""
    return not types_of_value(value) & types

"""Writes a schema for the library: each value of the document as definitions without choices
next to other keywords, which the library would refuse or could not put together.

The grammar of what is written allows all that the schema allows, but for spellings that are never
written, and more where a keyword is left to the checker. A place is a set of schemas that hold for
the same value; each is written once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from engine.structured.checked.checker import Checker
from engine.structured.checked.documents import Document
from engine.structured.checked.exact import exact
from engine.structured.checked.known import KNOWN
from engine.structured.merged import EVERY_TYPE
from engine.structured.schemas import SchemaError
from engine.structured.weakened.alternatives import are_apart, part_types
from engine.structured.weakened.arrays import array
from engine.structured.weakened.objects import Objects, one_of
from engine.structured.weakened.opposites import EXCEPT
from engine.structured.weakened.readings import Reader, Reading
from engine.structured.weakened.scalars import numbers, strings
from engine.structured.weakened.shapes import (
    ANNOTATIONS,
    OF_ARRAYS,
    OF_NUMBERS,
    OF_OBJECTS,
    OF_STRINGS,
    listed,
)

Schema = dict[str, Any]
Key = frozenset[Any]
_SCALARS = frozenset({"null", "boolean", "integer", "number", "string"})
_OF_SCALARS = OF_STRINGS | OF_NUMBERS


class Written(NamedTuple):
    """A schema for the library."""

    schema: Any
    needs_checker: bool
    """Whether it allows more than it was made from."""
    may_repeat: bool
    """Whether it has objects in which a name might come twice."""


def written(schema: Any, *, is_free: bool = False, is_lenient: bool = False) -> Written:
    """The schema for the library. Raises ``SchemaError`` that names the keyword which nobody
    enforces.

    is_free: properties may be written in any order; is_lenient: what cannot be enforced is passed
    over.
    """
    return _Writer(schema, is_free=is_free, is_lenient=is_lenient).whole(schema)


class _Writer:
    """Writes one document. ``arrays.Writes``."""

    def __init__(self, schema: Any, *, is_free: bool, is_lenient: bool) -> None:
        self._reader = Reader(Document(schema), is_lenient=is_lenient)
        self._is_free = is_free
        self._is_lenient = is_lenient
        self._found: dict[Key, Any] = {}
        self._definitions: dict[str, Any] = {}
        self._waiting: deque[tuple[str, list[Reading]]] = deque()
        self._kept: list[Any] = []  # schemas that were made, so that no other gets their ids
        self._is_loose = False
        self._may_repeat = False

    def whole(self, schema: Any) -> Written:
        root = self.place([schema])
        while self._waiting:
            name, readings = self._waiting.popleft()
            self._definitions[name] = self._value(readings)
        self._leave_out_nothing()
        if root is True:
            root = {}
        elif root is False or self._at(root) is False:
            raise SchemaError("nothing is right: the schema contradicts itself")
        if self._definitions:
            root = {**root, "$defs": self._definitions}
        return Written(root, self._is_loose, self._may_repeat)

    # -- Writes

    def place(self, schemas: list[Any]) -> Any:
        """What satisfies all of these schemas, or a reference to it."""
        if any(each is False for each in schemas):
            return False
        kept = [each for each in schemas if not (each is True or _is_annotation(each))]
        if not kept:
            self._may_repeat = True
            return True
        self._kept.append(kept)
        key = frozenset(map(self._key, kept))
        if key not in self._found:
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
        """Equal for schemas that are the same in other words."""
        depth = 0
        while isinstance(schema, dict) and depth < 100:
            depth += 1
            said = schema.keys() - ANNOTATIONS
            if said == {"$ref"}:
                targets = self._reader.targets(schema, ["$ref"])
                if len(targets) != 1 or not isinstance(targets[0], dict):
                    break
                schema = targets[0]
            elif said == {"allOf", "unevaluatedProperties"} and len(listed(schema["allOf"])) == 1:
                if schema["unevaluatedProperties"] is not False:
                    break
                return ("closed", self._key(schema["allOf"][0]))
            else:
                break
        return id(schema)

    def _place(self, schemas: list[Any]) -> Any:
        readings = self._reader.readings(schemas)
        if not readings:
            return False
        if all(_is_scalar(each) for each in readings):
            return self._value(readings)
        name = str(len(self._definitions))
        self._definitions[name] = {}
        self._waiting.append((name, readings))
        return {"$ref": f"#/$defs/{name}"}

    # -- readings

    def _value(self, readings: Sequence[Reading]) -> Any:
        for reading in readings:
            for key, value in reading.loose.items():
                self._loosen(key, value)
        part_types(readings)
        if not are_apart(readings):
            self._loosen("oneOf", True)
        return one_of([way for each in readings for way in self._ways(each)])

    def _ways(self, reading: Reading) -> list[Any]:
        """What a reading allows: values that are listed, or types with what they must be."""
        if (values := self._values(reading)) is not None:
            return [{"enum": values}] if values else []
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
            objects = Objects(reading, self, self._loosen, is_free=self._is_free)
            whole = objects.written()
            if not whole:
                types.discard("object")
            ways = [{**found, **each} for each in whole] or ways
        if not types:
            return []
        return [_typed(types, each, at) for at, each in enumerate(ways)]

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

    def _types(self, reading: Reading) -> set[str]:
        excluded = [each for part in reading.parts for each in part.schema.get(EXCEPT, ())]
        types = set(reading.types)
        if None in excluded:
            types.discard("null")
        if {True, False} <= {each for each in excluded if isinstance(each, bool)}:
            types.discard("boolean")
        if any(not _is_excluded(each, types) for each in excluded):
            self._loosen("not", excluded)
        return types

    def _values(self, reading: Reading) -> list[Any] | None:
        """Those of enum and const that are right; ``None`` if there are none of both."""
        lists = [
            [part.schema["const"]] if "const" in part.schema else listed(part.schema["enum"])
            for part in reading.parts
            if "enum" in part.schema or "const" in part.schema
        ]
        both = [p.schema for p in reading.parts if "const" in p.schema and "enum" in p.schema]
        lists += [listed(each["enum"]) for each in both]
        excluded = [each for part in reading.parts for each in part.schema.get(EXCEPT, ())]
        if not lists:
            if excluded and reading.types <= {"boolean", "null"}:
                lists = [[None, True, False]]
            else:
                return None
        first, *others = lists
        allowed = [{exact(each) for each in one} for one in others]
        banned = {exact(each) for each in excluded}
        schemas = [part.schema for part in reading.parts]
        found: dict[Any, Any] = {}
        for each in first:
            key = exact(each)
            is_in = all(key in one for one in allowed) and key not in banned
            if is_in and self._is_right(each, reading, schemas):
                found.setdefault(key, each)
        return list(found.values())

    def _is_right(self, value: Any, reading: Reading, schemas: list[Schema]) -> bool:
        """Whether a value that is listed is not seen to break another keyword."""
        if not reading.types & _types_of(value):
            return False
        keys = OF_OBJECTS if isinstance(value, dict) else OF_ARRAYS
        if isinstance(value, dict | list):
            if _speaks(schemas, keys):
                self._loosen("enum", value)
            return True
        if not _speaks(schemas, _OF_SCALARS):
            return True
        return _keeps(value, schemas)

    def _loosen(self, key: str, value: Any) -> None:
        if key == "names":
            self._may_repeat = True
            return
        if key in _HELD or self._is_lenient or key in KNOWN:
            self._is_loose = True
            return
        raise SchemaError(f"{key} is {value!r:.80}, which is not enforced")

    # -- definitions that allow nothing

    def _at(self, written: Any) -> Any:
        """What a reference leads to."""
        if isinstance(written, dict) and written.keys() == {"$ref"}:
            return self._definitions[written["$ref"].rpartition("/")[2]]
        return written

    def _leave_out_nothing(self) -> None:
        """Put ``False`` in the place of references to what allows nothing."""
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


# What the checker enforces that is no keyword of its own, or one that the grammar mostly holds.
_HELD = frozenset({"enum", "required", "format", "pattern", "anyOf"})


def _without(schema: Any, nothing: set[str]) -> Any:
    """The same without references to these definitions."""
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
    """Less the types that have become impossible."""
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
    """With its types; only the first of several ways has those that are no objects."""
    kept = {"object"} & types if at else types
    if "number" in kept:
        kept = kept - {"integer"}
    names = [each for each in EVERY_TYPE if each in kept]
    if len(kept) == len(EVERY_TYPE) - 1 and "number" in kept:
        return found or True
    return {"type": names[0] if len(names) == 1 else names, **found}


def _speaks(schemas: Sequence[Schema], keys: frozenset[str]) -> bool:
    return any(not keys.isdisjoint(schema) for schema in schemas)


def _is_annotation(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.keys() <= ANNOTATIONS


def _is_scalar(reading: Reading) -> bool:
    schemas = [part.schema for part in reading.parts]
    if _speaks(schemas, frozenset({"enum", "const"})):
        return True
    is_object = "object" in reading.types and _speaks(schemas, OF_OBJECTS)
    return not is_object and not ("array" in reading.types and _speaks(schemas, OF_ARRAYS))


def _types_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"integer", "number"} if float(value).is_integer() else {"number"}
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return {names[type(value)]}


def _is_excluded(value: Any, types: set[str]) -> bool:
    """Whether a value is left out by the types already."""
    return not _types_of(value) & types


def _keeps(value: Any, schemas: Sequence[Schema]) -> bool:
    """Whether a scalar is right by what they say of scalars."""
    text = msgspec.json.encode(value)
    for schema in schemas:
        if own := {key: schema[key] for key in _OF_SCALARS & schema.keys()}:
            state = Checker(own).begin()
            if not (state.feed(text) and state.may_end):
                return False
    return True

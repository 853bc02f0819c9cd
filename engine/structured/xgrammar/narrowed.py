"""Rewrites JSON schemas with the keywords that xgrammar enforces.

xgrammar ignores ``not``, ``if``, ``uniqueItems`` and ``contains``. In some combinations it ignores
other keywords: next to a reference, ``anyOf`` or ``enum``, lengths next to a pattern, a minimum
without a type. So schemas of the same value are merged, and ``oneOf`` becomes ``anyOf`` (a checker
refuses values that two alternatives allow). Keywords that would still be ignored are refused by
name. Except for ``oneOf``, the new schema may allow less than the old one, never more: an object
with named properties has no others."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple

from engine.structured.schemas import (
    BYTE,
    DATE,
    EVERY_TYPE,
    SchemaError,
    types_of,
    types_of_value,
)
from engine.structured.xgrammar.merged import NothingAllowedError, as_object, merged, values_of
from engine.structured.xgrammar.patterns import of_length, of_whole_text

Schema = dict[str, Any]

# Compiling cannot be interrupted: these limits keep it to seconds.
MAX_SCHEMAS = 1_000  # written schemas in total
MAX_DEPTH = 24  # nesting between two references
MAX_NAMES = 500  # properties in total
MAX_VALUES = 2_000  # values of all enums
MAX_LENGTH = 1_000  # the largest limit of a text or an array
MAX_MULTIPLE = 1_000
EXACT = 1 << 53  # xgrammar reads numbers as doubles

_ANNOTATIONS = (
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$comment", "$id", "$anchor", "$defs", "definitions", "discriminator"),
    *("contentMediaType", "contentEncoding"),
)
_OF_TYPE = {
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"),
    "object": (
        *("properties", "required", "additionalProperties", "propertyNames", "minProperties"),
        *("maxProperties", "unevaluatedProperties"),
    ),
}
_OF_TYPE["number"] = _OF_TYPE["integer"]
# Keywords that xgrammar does not fully enforce, with the values that allow everything anyway.
_REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("not", "if", "then", "else", "contains", "minContains", "maxContains"), ()),
    **dict.fromkeys(("$dynamicRef", "$recursiveRef", "additionalItems", "x-guidance"), ()),
    **dict.fromkeys(("divisibleBy", "disallow", "extends", "contentSchema"), ()),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), ({},)),
    "uniqueItems": (False,),
    "patternProperties": ({},),
}
_HEX = "[0-9a-fA-F]"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
_ZONE = r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
FORMATS = {
    "date": f"^{DATE}$",
    "time": f"^{_TIME}{_ZONE}$",
    "date-time": f"^{DATE}T{_TIME}{_ZONE}$",
    "uuid": f"^{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}$",
    "ipv4": rf"^{BYTE}\.{BYTE}\.{BYTE}\.{BYTE}$",
}


class Narrowed(NamedTuple):
    """A schema that was rewritten for xgrammar."""

    schema: Schema
    needs_checker: bool
    """Whether it allows values that the original schema forbids."""


def narrowed(schema: Any, *, is_closed: bool) -> Narrowed:
    """Rewrite a schema for xgrammar. Raises ``SchemaError`` that names the keyword or the limit.

    is_closed: forbid properties that the schema does not name.
    """
    writer = _NarrowedWriter(schema, is_closed)
    return Narrowed(writer.whole(), writer.has_one_of)


class _NarrowedWriter:
    """Rewrites one schema and the definitions that it refers to."""

    def __init__(self, root: Any, is_closed: bool) -> None:
        self._root = root
        self._is_closed = is_closed
        self.has_one_of = False  # some ``oneOf`` was written as ``anyOf``
        self._left = {"schemas": MAX_SCHEMAS, "properties": MAX_NAMES, "values of enum": MAX_VALUES}
        self._names: dict[str, str] = {}  # names of definitions by reference
        self._written: dict[str, Schema] = {}

    def whole(self) -> Schema:
        found = self._write(self._root, 0)
        for name in self._names.values():
            self._check_ends(name)
        return {**found, "$defs": self._written} if self._written else found

    def _write(self, schema: Any, depth: int) -> Schema:
        self._spend("schemas", 1)
        if depth > MAX_DEPTH:
            raise SchemaError(f"the schema is nested more than {MAX_DEPTH} deep: use references")
        wanted = self._checked(schema)
        if "$ref" in wanted:
            return self._reference(wanted, depth)
        for key, write in (("allOf", self._all), ("oneOf", self._any), ("anyOf", self._any)):
            if key in wanted:
                return write(key, wanted, depth)
        if (values := values_of(wanted)) is not None:
            return self._values(values, wanted)
        return self._typed(wanted, depth)

    def _checked(self, schema: Any) -> Schema:
        """Drop keywords that limit nothing. Raises for a keyword that xgrammar does not enforce."""
        found = {}
        for key, value in as_object(schema).items():
            if key in _REFUSED:
                if not any(type(value) is type(idle) and value == idle for idle in _REFUSED[key]):
                    raise SchemaError(
                        f"{key} is {value!r:.80}, which xgrammar does not enforce: leave it out"
                    )
            elif key == "$id" and schema is not self._root:
                raise SchemaError(
                    f"$id is {value!r:.80} within a schema, which xgrammar does not support: use "
                    "it only at the root"
                )
            elif key not in _ANNOTATIONS:
                found[key] = value
        return found

    def _spend(self, what: str, count: int) -> None:
        self._left[what] -= count
        if self._left[what] < 0:
            limits = {"schemas": MAX_SCHEMAS, "properties": MAX_NAMES, "values of enum": MAX_VALUES}
            raise SchemaError(
                f"the schema has too many {what} for xgrammar, the limit is {limits[what]}"
            )

    # -- references, and schemas that are merged

    def _found(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise SchemaError(f"$ref is {reference!r:.80}, must be '#' or start with '#/'")
        place = self._root
        for part in reference.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            is_index = isinstance(place, list) and part.isdecimal() and int(part) < len(place)
            if not is_index and not (isinstance(place, dict) and part in place):
                raise SchemaError(f"$ref is {reference!r:.80}, which is not in the schema")
            place = place[int(part)] if is_index else place[part]
        return place

    def resolved(self, schema: Any) -> Schema:
        """Merge a schema with the target of its $ref and with its allOf."""
        wanted, seen = self._checked(schema), 0
        while "$ref" in wanted or "allOf" in wanted:
            self._spend("schemas", 1)
            seen += 1
            if seen > MAX_DEPTH:
                raise SchemaError(
                    "$ref and allOf lead to each other without end: break the cycle of references"
                )
            if "$ref" in wanted:
                rest = {key: value for key, value in wanted.items() if key != "$ref"}
                wanted = merged(rest, self._checked(self._found(wanted["$ref"])))
            else:
                rest = {key: value for key, value in wanted.items() if key != "allOf"}
                wanted = reduce(merged, map(self._checked, _list("allOf", wanted["allOf"])), rest)
        return wanted

    def _reference(self, wanted: Schema, depth: int) -> Schema:
        if len(wanted) > 1:
            return self._write(self.resolved(wanted), depth + 1)
        reference = wanted["$ref"]
        if reference not in self._names:
            found = self._found(reference)
            name = self._names[reference] = f"d{len(self._names)}"
            self._written[name] = {}  # references inside the definition only need its name
            self._written[name] = self._write(found, 0)
        return {"$ref": f"#/$defs/{self._names[reference]}"}

    def _check_ends(self, name: str) -> None:
        """Raise ``SchemaError`` if a definition is a reference that leads back to itself."""
        seen = {name}
        while "$ref" in self._written[name]:
            name = self._written[name]["$ref"].rpartition("/")[2]
            if name in seen:
                raise SchemaError(
                    "$ref leads back to itself with no schema in between: break the cycle"
                )
            seen.add(name)

    def _all(self, key: str, wanted: Schema, depth: int) -> Schema:
        return self._write(self.resolved(wanted), depth + 1)

    def _any(self, key: str, wanted: Schema, depth: int) -> Schema:
        rest = {name: value for name, value in wanted.items() if name != key}
        choices = _list(key, wanted[key])
        self._spend("schemas", len(choices))
        self.has_one_of |= key == "oneOf"
        found = []
        for choice in choices:
            try:
                whole = merged(rest, self.resolved(choice)) if rest else choice
                found.append(self._write(whole, depth + 1))
            except NothingAllowedError:
                continue
        if not found:
            raise NothingAllowedError(f"{key} is {choices!r:.80}, which allows nothing")
        return found[0] if len(found) == 1 else {"anyOf": found}

    # -- values and types

    def _values(self, values: list[Any], wanted: Schema) -> Schema:
        others = wanted.keys() - {"enum", "const", "type"}
        if wrong := sorted(key for keys in _OF_TYPE.values() for key in keys if key in others):
            raise SchemaError(
                f"{wrong[0]} next to enum or const is not enforced by xgrammar: leave it out"
            )
        allowed = types_of(wanted)
        kept = [each for each in values if types_of_value(each) & allowed]
        self._spend("values of enum", len(kept))
        if not kept:
            raise NothingAllowedError(
                f"enum is {values!r:.80}, none of which has an allowed type: {sorted(allowed)}"
            )
        for each in _leaves(kept):
            if isinstance(each, int | float) and abs(each) > EXACT:
                raise SchemaError(
                    f"enum has {each}, which xgrammar cannot compare exactly: the limit is {EXACT}"
                )
        return {"enum": kept}

    def _typed(self, wanted: Schema, depth: int) -> Schema:
        if not wanted.keys() & {"type", *(key for keys in _OF_TYPE.values() for key in keys)}:
            return {}
        types = types_of(wanted)
        found = []
        for kind in (name for name in EVERY_TYPE if name in types):
            if kind == "integer" and "number" in types:
                continue
            own = {key: wanted[key] for key in _OF_TYPE.get(kind, ()) if key in wanted}
            write = {"string": _string, "integer": _integer, "number": _number}.get(kind)
            try:
                if write is not None:
                    found.append({"type": kind, **write(own)})
                elif kind == "object":
                    found.append({"type": kind, **self._object(own, depth)})
                elif kind == "array":
                    found.append({"type": kind, **self._array(own, depth)})
                else:
                    found.append({"type": kind})
            except NothingAllowedError:
                if len(types) == 1:
                    raise
        if not found:
            raise NothingAllowedError(f"type is {wanted.get('type')!r:.80}, which allows nothing")
        return found[0] if len(found) == 1 else {"anyOf": found}

    def _array(self, own: Schema, depth: int) -> Schema:
        least, most = _counts(own, "minItems", "maxItems", MAX_LENGTH)
        first = _list("prefixItems", own["prefixItems"]) if "prefixItems" in own else []
        others = own.get("items", own.get("unevaluatedItems", True))
        if first and "unevaluatedItems" in own and "items" in own:
            raise SchemaError(
                "unevaluatedItems next to items is not enforced by xgrammar: leave one of them out"
            )
        if most is not None:
            first = first[:most]
        prefix = [self._write(each, depth + 1) for each in first]
        try:
            items: Any = self._write(others, depth + 1)
        except NothingAllowedError:
            items, most = False, len(prefix) if most is None else min(most, len(prefix))
        if most is not None and most < least:
            raise NothingAllowedError(f"minItems is {least}, at most {most} items are allowed")
        if most is not None and most <= len(prefix):
            items = False
        found: Schema = {"prefixItems": prefix} if prefix else {}
        if items is False and not prefix:
            return {"maxItems": 0}
        found["items"] = items
        found |= {"minItems": least} if least else {}
        return found if most is None or items is False else {**found, "maxItems": most}

    def _object(self, own: Schema, depth: int) -> Schema:
        named = _named(own)
        required = _list("required", own.get("required", []))
        others = own.get("additionalProperties", own.get("unevaluatedProperties", True))
        if self._is_closed and "additionalProperties" not in own:
            others = False
        least, most = _counts(own, "minProperties", "maxProperties", MAX_NAMES)
        if not named and not required:
            return self._map(own, others, (least, most), depth)
        if "propertyNames" in own:
            raise SchemaError(
                "propertyNames next to properties is not enforced by xgrammar: leave it out"
            )
        found: Schema = {}
        for name in [*named, *(each for each in required if each not in named)]:
            try:
                found[name] = self._write(named.get(name, others), depth + 1)
            except NothingAllowedError:
                if name in required:
                    raise
        self._spend("properties", len(found))
        if least > len(found) or (most is not None and most < len(set(required))):
            raise NothingAllowedError(
                f"minProperties is {least} and maxProperties {most}, of {len(found)} properties "
                f"{len(set(required))} are required: no object is allowed"
            )
        written: Schema = {"properties": found, "additionalProperties": False}
        written |= {"required": list(dict.fromkeys(required))} if required else {}
        written |= {"minProperties": least} if least > len(set(required)) else {}
        return written if most is None or most >= len(found) else {**written, "maxProperties": most}

    def _map(self, own: Schema, others: Any, limits: tuple[int, int | None], depth: int) -> Schema:
        """Write a schema for objects without named properties. others: schema of their values."""
        least, most = limits
        try:
            values: Any = self._write(others, depth + 1)
        except NothingAllowedError:
            values = False
        if values is False or most == 0:
            if least:
                raise NothingAllowedError(f"minProperties is {least}, no properties are allowed")
            return {"additionalProperties": False}
        if least > 1:
            raise SchemaError(
                f"minProperties is {least}, for xgrammar at most 1 without properties: "
                "name them in properties"
            )
        found: Schema = {"additionalProperties": values}
        if "propertyNames" in own and (names := self._names_of(own["propertyNames"])):
            found["propertyNames"] = names
        found |= {"minProperties": least} if least else {}
        return found if most is None else {**found, "maxProperties": most}

    def _names_of(self, schema: Any) -> Schema:
        wanted = self.resolved(schema)
        if wrong := wanted.keys() & {"anyOf", "oneOf"}:
            raise SchemaError(
                f"{min(wrong)} in propertyNames is not enforced by xgrammar: use one pattern"
            )
        written = self._write({**wanted, "type": "string"}, 0)
        return {key: value for key, value in written.items() if key != "type"}


def _named(own: Schema) -> Schema:
    named = own.get("properties", {})
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named):
        raise SchemaError(f"properties is {named!r:.80}, must be an object")
    return named


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or (name == "required" and not all(map(_is_text, value))):
        raise SchemaError(f"{name} is {value!r:.80}, must be a list")
    return value


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the scalars within a value."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)
    else:
        yield value


def _counts(own: Schema, low: str, high: str, limit: int) -> tuple[int, int | None]:
    """Return the values of the keywords ``low`` and ``high``; the defaults are 0 and ``None``."""
    for key in (low, high):
        value = own.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise SchemaError(f"{key} is {value!r:.80}, must be a whole number, 0 or more")
        if value > limit:
            raise SchemaError(f"{key} is {value}, for xgrammar the limit is {limit}")
    least, most = own.get(low, 0), own.get(high)
    if most is not None and most < least:
        raise NothingAllowedError(f"{low} is {least} and {high} is {most}, which allows nothing")
    return least, most


def _string(own: Schema) -> Schema:
    shape = [key for key in ("pattern", "format") if key in own]
    sizes = [key for key in ("minLength", "maxLength") if own.get(key)]
    if len(shape) == 2 or (shape and sizes):
        raise SchemaError(
            f"{(shape + sizes)[1]} next to {shape[0]} is not enforced by xgrammar: leave one out"
        )
    if not shape:
        least, most = _counts(own, "minLength", "maxLength", MAX_LENGTH)
        return {"pattern": of_length(least, most)} if least or most is not None else {}
    value = own[shape[0]]
    if shape[0] == "format":
        if value not in FORMATS:
            raise SchemaError(
                f"format is {value!r:.80}, for xgrammar must be one of: {', '.join(FORMATS)}"
            )
        return {"pattern": of_whole_text(FORMATS[value], is_proved=True)}
    if not isinstance(value, str):
        raise SchemaError(f"pattern is {value!r:.80}, must be text")
    return {"pattern": of_whole_text(value)}


def _bounds(own: Schema) -> dict[str, int | float]:
    found: dict[str, int | float] = {}
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
        value = own.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SchemaError(f"{key} is {value!r:.80}, must be a number")
        if abs(value) > EXACT or (isinstance(value, float) and "e" in repr(value)):
            raise SchemaError(
                f"{key} is {value}, which xgrammar cannot compare exactly: the limit is {EXACT}, "
                "without an exponent"
            )
        if key in own:
            found[key] = value
    return found


def _integer(own: Schema) -> Schema:
    bounds = _bounds(own)
    up, down = (
        math.floor(bounds.get("exclusiveMinimum", 0)) + 1,
        math.ceil(bounds.get("exclusiveMaximum", 0)),
    )
    lows = [math.ceil(bounds["minimum"])] if "minimum" in bounds else []
    highs = [math.floor(bounds["maximum"])] if "maximum" in bounds else []
    lows += [up] if "exclusiveMinimum" in bounds else []
    highs += [down - 1] if "exclusiveMaximum" in bounds else []
    if lows and highs and max(lows) > min(highs):
        raise NothingAllowedError(f"minimum {max(lows)} is above maximum {min(highs)}")
    found: Schema = {"minimum": max(lows)} if lows else {}
    found |= {"maximum": min(highs)} if highs else {}
    step = bounds.get("multipleOf")
    if step is None or step == 1:
        return found
    if found or step != int(step) or not 0 < step <= MAX_MULTIPLE:
        raise SchemaError(
            f"multipleOf is {step}, for xgrammar must be a whole number from 1 to {MAX_MULTIPLE}, "
            "without minimum and maximum"
        )
    return {"multipleOf": int(step)}


def _number(own: Schema) -> Schema:
    bounds = _bounds(own)
    if "multipleOf" in bounds:
        raise SchemaError("multipleOf of a number is not enforced by xgrammar: use type integer")
    low = max((bounds[key] for key in ("minimum", "exclusiveMinimum") if key in bounds), default=-1)
    high = min((bounds[key] for key in ("maximum", "exclusiveMaximum") if key in bounds), default=1)
    if "minimum" in bounds and "exclusiveMinimum" in bounds:
        bounds.pop("minimum" if bounds["exclusiveMinimum"] >= bounds["minimum"] else _EXCLUSIVE[0])
    if "maximum" in bounds and "exclusiveMaximum" in bounds:
        bounds.pop("maximum" if bounds["exclusiveMaximum"] <= bounds["maximum"] else _EXCLUSIVE[1])
    if bounds and low > high and len(bounds) == 2:
        raise NothingAllowedError(f"minimum is {low} and maximum is {high}, which allows nothing")
    return dict(bounds)


_EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")


def readable(text: str) -> Any:
    """Parse a schema from JSON. Raises ``SchemaError`` if it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise SchemaError("the schema is nested too deeply: use references") from error

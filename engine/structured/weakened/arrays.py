"""Merges the keywords for arrays of several schemas into one schema for llguidance."""

from __future__ import annotations

from typing import Any, Protocol

from engine.structured.keywords import is_idle, is_number, listed
from engine.structured.weakened.readings import SchemaPart, SchemaReading
from engine.structured.weakened.scalars import Loosen, limits

Schema = dict[str, Any]


class Writes(Protocol):
    """Writes llguidance's schemas for the items of arrays and the properties of objects."""

    def place(self, schemas: list[Any]) -> Any:
        """Write one schema for an item or a property that must satisfy all ``schemas``."""

    def num_values(self, written: Any) -> int | None:
        """Return how many values a written schema lists; ``None`` if it does not list values."""


def array(reading: SchemaReading, writer: Writes, loosen: Loosen) -> Schema | None:
    """Return a schema for the arrays that satisfy ``reading``; ``None`` if there are none."""
    schemas = [part.schema for part in reading.parts]
    found = limits([*schemas, *_contained(schemas)], "minItems", "maxItems")
    if found is None:
        return None
    least, most = found.get("minItems", 0), found.get("maxItems")
    for schema in schemas:
        for key in ("contains", "uniqueItems"):
            if key in schema and not is_idle(key, schema[key]):
                loosen(key, schema[key])
    prefix: list[Any] = []
    for at in range(max((len(_prefix(schema)) for schema in schemas), default=0)):
        if most is None or at < most:
            item = writer.place(_items(reading, at, loosen))
            most = at if item is False else most
            prefix.append(item)
    prefix = prefix[:most]
    items: Any = False
    if most is None or most > len(prefix):
        items = writer.place(_items(reading, len(prefix), loosen))
        is_unique = any(schema.get("uniqueItems") is True for schema in schemas)
        count = 0 if items is False else writer.num_values(items) if is_unique else None
        if count is not None:
            room = len(prefix) + count
            most = room if most is None else min(most, room)
    if most is not None and most < least:
        return None
    return _written(prefix, items, least, most)


def _written(prefix: list[Any], items: Any, least: int, most: int | None) -> Schema:
    if most == 0:
        return {"maxItems": 0}
    found: Schema = {"prefixItems": prefix[:most]} if prefix else {}
    if most is not None and most <= len(prefix):
        found["items"] = False
        most = None
    elif items not in (True, {}):
        found["items"] = items
    found |= {"minItems": least} if least else {}
    return found if most is None else {**found, "maxItems": most}


def _contained(schemas: list[Schema]) -> list[Schema]:
    """Return a schema ``{"minItems": n}`` for each ``contains``: n is its ``minContains``, or 1."""
    found = []
    for schema in schemas:
        if "contains" in schema and schema["contains"] is not True:
            least = schema.get("minContains", 1)
            found.append({"minItems": least if is_number(least) else 1})
    return found


def _items(reading: SchemaReading, at: int, loosen: Loosen) -> list[Any]:
    """Return all subschemas that the array's item at index ``at`` must satisfy."""
    found = [each for part in reading.parts if (each := _item(part.schema, at)) is not None]
    for number, holder in reading.holders.items():
        if "unevaluatedItems" not in holder:
            continue
        group = [part for part in reading.parts if number in part.holders]
        if any("contains" in part.schema for part in group):
            loosen("unevaluatedItems", holder["unevaluatedItems"])
        elif not any(_evaluates(part, at, number) for part in group):
            found.append(holder["unevaluatedItems"])
    return found


def _evaluates(part: SchemaPart, at: int, holder: int) -> bool:
    if part.is_silent:
        return False
    is_own = bool(part.holders) and part.holders[-1] == holder
    return _item(part.schema, at) is not None or (
        "unevaluatedItems" in part.schema and not (is_own and id(part.schema) == holder)
    )


def _prefix(schema: Schema) -> list[Any]:
    return listed(schema.get("prefixItems")) or listed(schema.get("items"))


def _item(schema: Schema, at: int) -> Any | None:
    """Return the subschema for the item at index ``at`` of an array; ``None`` if there is none."""
    prefix = _prefix(schema)
    if at < len(prefix):
        return prefix[at]
    is_old = isinstance(schema.get("items"), list)
    return schema.get("additionalItems" if is_old else "items")

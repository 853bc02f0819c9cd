"""Is there no value that two JSON schemas allow? Said only where it is proved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.structured.merged import are_same, types_of, values_of

Schema = dict[str, Any]

MAX_DEPTH = 6  # of proofs within each other
_TYPES = {bool: "boolean", str: "string", list: "array", dict: "object", type(None): "null"}


def are_disjoint(
    written: Any, other: Any, resolve: Callable[[Any], Schema], depth: int = 0
) -> bool:
    """Is nothing that is written for the one allowed by the other? ``False`` if it is not known.

    written: if it names properties, objects that are written have no others.
    resolve: puts what a schema refers to in its place.
    """
    if written is False or other is False:
        return True
    if depth > MAX_DEPTH:
        return False
    one, two = resolve(written), resolve(other)
    for key in ("anyOf", "oneOf"):
        if key in one:
            return all(are_disjoint(each, two, resolve, depth + 1) for each in one[key])
        if key in two:
            return all(are_disjoint(one, each, resolve, depth + 1) for each in two[key])
    own, others = values_of(one), values_of(two)
    if own is not None and others is not None:
        return not any(are_same(a, b) for a in own for b in others)
    common = _types(one, own) & _types(two, others)
    if "number" in common:
        common.discard("integer")
    prove = {"integer": _numbers, "number": _numbers, "string": _lengths, "array": _items}
    return all(
        _objects(one, two, resolve, depth)
        if kind == "object"
        else kind in prove and prove[kind](one, two)
        for kind in common
    )


def _types(schema: Schema, values: list[Any] | None) -> set[str]:
    types = types_of(schema)
    if values is None:
        return types
    numbers = {"integer", "number"} if any(_is_number(value) for value in values) else set()
    return types & {*(_TYPES[type(each)] for each in values if not _is_number(each)), *numbers}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(one: Schema, two: Schema) -> bool:
    return _is_above(one, two) or _is_above(two, one)


def _is_above(one: Schema, two: Schema) -> bool:
    """Is every number of the one above every number of the other?"""
    for low in ("minimum", "exclusiveMinimum"):
        for high in ("maximum", "exclusiveMaximum"):
            if _is_number(one.get(low)) and _is_number(two.get(high)):
                if one[low] > two[high]:
                    return True
                if one[low] == two[high] and "exclusive" in low + high:
                    return True
    return False


def _apart(one: Schema, two: Schema, low: str, high: str) -> bool:
    return any(
        _is_number(more.get(low)) and _is_number(less.get(high)) and more[low] > less[high]
        for more, less in ((one, two), (two, one))
    )


def _lengths(one: Schema, two: Schema) -> bool:
    return _apart(one, two, "minLength", "maxLength")


def _items(one: Schema, two: Schema) -> bool:
    return _apart(one, two, "minItems", "maxItems")


def _objects(one: Schema, two: Schema, resolve: Callable[[Any], Schema], depth: int) -> bool:
    if _apart(one, two, "minProperties", "maxProperties"):
        return True
    named, others = one.get("properties", {}), two.get("properties", {})
    own, theirs = one.get("required", []), two.get("required", [])
    if (named or own) and any(name not in named and name not in own for name in theirs):
        return True  # the other needs what the one does not write
    closed = two.get("additionalProperties") is False and not two.get("patternProperties")
    if closed and any(name not in others for name in own):
        return True
    both = [name for name in own if name in named and name in others]
    return any(are_disjoint(named[name], others[name], resolve, depth + 1) for name in both)

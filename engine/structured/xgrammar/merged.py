"""Merges two JSON schemas of one value, so that no keyword is next to a reference or a choice."""

from __future__ import annotations

from typing import Any

from engine.structured.schemas import SchemaError, types_of

Schema = dict[str, Any]

_LARGER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_SMALLER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")


class NothingAllowedError(SchemaError):
    """The schema allows no value. As an alternative of a choice, it is dropped."""


def as_object(schema: Any) -> Schema:
    """Return a schema as an object: {} for ``True``. Raises ``SchemaError`` for anything else."""
    if schema is True:
        return {}
    if schema is False:
        raise NothingAllowedError("a schema is false, which allows nothing")
    if not isinstance(schema, dict):
        raise SchemaError(f"a schema is {schema!r:.80}, must be an object or a bool")
    return schema


def values_of(schema: Schema) -> list[Any] | None:
    """Return the values that enum and const both allow; ``None`` without either keyword."""
    found = [schema["const"]] if "const" in schema else None
    if "enum" not in schema:
        return found
    if not isinstance(schema["enum"], list):
        raise SchemaError(f"enum is {schema['enum']!r:.80}, must be a list")
    if found is None:
        return list(schema["enum"])
    return [each for each in schema["enum"] if are_same(each, found[0])]


def are_same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(are_same, one, other))
    return bool(one == other)


def merged(one: Schema, other: Schema) -> Schema:
    """Merge two schemas into one that allows what both allow. Raises ``SchemaError`` with the
    keywords that cannot be merged.

    other: a schema inside ``one``, or the target of its reference. Neither may have annotations."""
    if not one or not other:
        return {**one, **other}
    if wrong := other.keys() & {"unevaluatedProperties", "unevaluatedItems"}:
        raise SchemaError(
            f"{min(wrong)} of a schema within another is not enforced by xgrammar: leave it out"
        )
    found = {**one, **other}
    for key in one.keys() & other.keys():
        if key not in ("enum", "const"):
            found[key] = _both(key, one[key], other[key])
    if any("enum" in each or "const" in each for each in (one, other)):
        left, right = values_of(one), values_of(other)
        found.pop("const", None)
        found["enum"] = right if left is None else left
        if left is not None and right is not None:
            found["enum"] = [a for a in left if any(are_same(a, b) for b in right)]
    _check_arrays(one, other)
    if properties := _properties(one, other, found):
        found["properties"] = properties
    return found


def _both(key: str, one: Any, other: Any) -> Any:
    if key == "type":
        types = types_of({key: one}) & types_of({key: other})
        if not types:
            raise NothingAllowedError(f"no value has both type {one!r:.80} and type {other!r:.80}")
        return sorted(types)
    if key in ("properties", "additionalProperties"):
        return other if key == "properties" else _all_of(one, other)
    if key == "required":
        return [*one, *(name for name in other if name not in one)]
    if key in _LARGER + _SMALLER and not any(isinstance(each, bool) for each in (one, other)):
        try:
            return max(one, other) if key in _LARGER else min(one, other)
        except TypeError as error:
            raise SchemaError(f"{key} is {one!r:.80} and {other!r:.80}, must be numbers") from error
    if key in ("items", "propertyNames"):
        return _all_of(one, other)
    if type(one) is type(other) and one == other:
        return one
    raise SchemaError(
        f"{key} is {one!r:.80} and {other!r:.80} for one value; xgrammar does not enforce both"
    )


def _all_of(one: Any, other: Any) -> Any:
    return one if one == other and type(one) is type(other) else {"allOf": [one, other]}


def _check_arrays(one: Schema, other: Schema) -> None:
    """Raise ``SchemaError`` if both schemas limit array items, unless by ``items`` alone."""
    keys = {"items", "prefixItems", "unevaluatedItems"}
    if (
        (one.keys() | other.keys()) & keys != {"items"}
        and one.keys() & keys
        and other.keys() & keys
    ):
        raise SchemaError(
            "prefixItems or unevaluatedItems next to items of another schema is not enforced by "
            "xgrammar: put them into one schema"
        )


def _properties(one: Schema, other: Schema, found: Schema) -> Schema:
    """Return the merged properties. A property that only one schema lists must also be valid by the
    ``additionalProperties`` of the other."""
    if "unevaluatedProperties" in found and "additionalProperties" in found:
        raise SchemaError(
            "unevaluatedProperties next to additionalProperties is not enforced by xgrammar: leave "
            "one of them out"
        )
    names = {**_object(one), **_object(other)}
    properties = {}
    for name in names:
        parts = [
            _object(each)[name] if name in _object(each) else each["additionalProperties"]
            for each in (one, other)
            if name in _object(each) or "additionalProperties" in each
        ]
        properties[name] = parts[0] if len(parts) == 1 else _all_of(*parts)
    return properties


def _object(schema: Schema) -> Schema:
    found = schema.get("properties", {})
    if not isinstance(found, dict):
        raise SchemaError(f"properties is {found!r:.80}, must be an object")
    return found

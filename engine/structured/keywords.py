"""Checks the values of a schema's keywords, and reads them without raising."""

from __future__ import annotations

from typing import Any

from engine.structured.schemas import SchemaError

ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$comment", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"),
        *("$defs", "definitions", "$vocabulary", "discriminator", "nullable"),
        *("contentMediaType", "contentEncoding", "contentSchema"),
    }
)
_OBJECTS = (
    *("properties", "patternProperties", "$defs", "definitions"),
    *("dependentSchemas", "dependentRequired", "dependencies"),
)
_LISTS = ("allOf", "anyOf", "oneOf", "enum", "prefixItems", "required")
_NUMBERS = ("minimum", "maximum", "multipleOf")
_COUNTS = (
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("minContains", "maxContains"),
)
_TEXTS = ("$ref", "$dynamicRef", "$recursiveRef", "pattern", "format")
_SCHEMAS = (
    *("additionalProperties", "propertyNames", "unevaluatedProperties", "not", "if", "then"),
    *("else", "contains", "unevaluatedItems", "additionalItems"),
)


OF_OBJECTS = frozenset(
    {
        *("properties", "patternProperties", "additionalProperties", "required", "minProperties"),
        *("maxProperties", "propertyNames", "unevaluatedProperties"),
    }
)
OF_ARRAYS = frozenset(
    {
        *("items", "prefixItems", "additionalItems", "contains", "minItems", "maxItems"),
        *("uniqueItems", "unevaluatedItems"),
    }
)
OF_STRINGS = frozenset({"pattern", "format", "minLength", "maxLength"})
OF_NUMBERS = frozenset({"multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
KEYWORDS_OF: dict[str, frozenset[str]] = {
    "null": frozenset(),
    "boolean": frozenset(),
    "integer": OF_NUMBERS,
    "number": OF_NUMBERS,
    "string": OF_STRINGS,
    "array": OF_ARRAYS,
    "object": OF_OBJECTS,
}
"""For each type, the keywords that apply only to values of this type."""
IDLE: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "propertyNames": (True, {}),
}
# Keywords that are never enforced, with the way out.
REFUSED = {
    "x-guidance": "would set internal options of the grammar library: leave it out",
    "divisibleBy": "is a keyword of draft 3 and not enforced: use multipleOf",
    "disallow": "is a keyword of draft 3 and not enforced: use type",
    "extends": "is a keyword of draft 3 and not enforced: use allOf",
}


def is_idle(key: str, value: Any) -> bool:
    """Whether a keyword with this value allows everything."""
    return any(type(value) is type(each) and value == each for each in IDLE.get(key, ()))


def check_shapes(schema: dict[str, Any], *, is_lenient: bool) -> None:
    """Raise ``SchemaError`` if a keyword's value has the wrong type. Keywords that are never
    enforced raise it too, unless ``is_lenient``."""
    for key, value in schema.items():
        if key in REFUSED and not is_lenient:
            raise SchemaError(f"{key} is {value!r:.80}, which {REFUSED[key]}")
        if key == "required" and isinstance(value, bool):
            raise SchemaError(
                f"required is {value}, which is the syntax of draft 3 and not enforced: list the "
                "names in the object's required"
            )
        if (kind := _KINDS.get(key)) is not None and not _is(value, kind):
            raise SchemaError(f"{key} is {value!r:.80}, must be {kind}")


_KINDS: dict[str, str] = {
    **dict.fromkeys(_OBJECTS, "an object"),
    **dict.fromkeys(_LISTS, "a list"),
    **dict.fromkeys(_NUMBERS, "a number"),
    **dict.fromkeys(_COUNTS, "a whole number, 0 or more"),
    **dict.fromkeys(_TEXTS, "text"),
    **dict.fromkeys(_SCHEMAS, "a schema"),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), "a number or a bool"),
    "items": "a schema or a list of them",
    "uniqueItems": "a bool",
}


def _is(value: Any, kind: str) -> bool:
    if kind == "a whole number, 0 or more":
        return is_number(value) and value >= 0 and value == int(value)
    if kind == "a number or a bool":
        return isinstance(value, int | float)
    if kind == "a number":
        return is_number(value)
    return isinstance(value, _TYPES[kind])


_TYPES: dict[str, tuple[type, ...]] = {
    "an object": (dict,),
    "a list": (list,),
    "text": (str,),
    "a bool": (bool,),
    "a schema": (dict, bool),
    "a schema or a list of them": (dict, bool, list),
}


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def named(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def texts_in(value: Any) -> list[str]:
    """Return the strings in a list, without repeats; [] if the value is not a list."""
    return list(dict.fromkeys(each for each in listed(value) if isinstance(each, str)))


def enumerated(schema: dict[str, Any]) -> list[Any]:
    """Return the value of ``const``, or the values of ``enum`` if the schema has no ``const``."""
    return [schema["const"]] if "const" in schema else listed(schema["enum"])

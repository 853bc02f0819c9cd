"""Negates schemas: describes the values that fail a schema, as far as a grammar can express it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice, product
from typing import Any

from engine.structured.keywords import ANNOTATIONS, listed, named
from engine.structured.schemas import EVERY_TYPE, types_of

Schema = dict[str, Any]
Targets = Callable[[Schema], Sequence[Any]]  # the schemas that a schema refers to

EXCEPT = "\0except"  # our own keyword: any value but these
MOST_WAYS = 32
MAX_DEPTH = 8
# Limits by keyword: the type that they apply to, the keyword of the opposite limit, what to add.
_LIMITS: dict[str, tuple[str, str, int]] = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
# Keywords by the type that they apply to: a value that fails one has this type, no more is known.
_TYPES = {
    **dict.fromkeys(("pattern", "format"), "string"),
    "multipleOf": "number",
    **dict.fromkeys(("items", "prefixItems", "additionalItems", "uniqueItems"), "array"),
    **dict.fromkeys(("contains", "unevaluatedItems"), "array"),
    **dict.fromkeys(("patternProperties", "additionalProperties"), "object"),
    **dict.fromkeys(("propertyNames", "unevaluatedProperties"), "object"),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), "object"),
}


class UnknownError(Exception):
    """The opposite of a schema cannot be expressed."""


class Opposite:
    """The opposite of a schema: every value that fails the schema satisfies one of ``ways``."""

    def __init__(self, schema: Any, targets: Targets) -> None:
        self._targets = targets
        self.is_exact = True
        """Whether, conversely, every value that satisfies one of ``ways`` fails the schema."""
        try:
            self.ways = self._of(schema, 0)
            if len(self.ways) > MOST_WAYS:
                raise UnknownError
        except UnknownError:
            self.is_exact = False
            self.ways = [True]

    def _of(self, schema: Any, depth: int) -> list[Any]:
        if schema is True or schema is False:
            return [not schema] if schema is False else []
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            raise UnknownError
        found: list[Any] = []
        for key, value in schema.items():
            if key not in ANNOTATIONS:
                found += self._of_keyword(key, value, schema, depth + 1)
        return found

    def _of_keyword(self, key: str, value: Any, schema: Schema, depth: int) -> list[Any]:
        if key in _LIMITS and not isinstance(value, bool):
            return self._of_limit(key, value)
        if key in _TYPES:
            self.is_exact = False
            return [{"type": _TYPES[key]}]
        if key in _OF_KEYWORDS:
            return _OF_KEYWORDS[key](self, value, depth)
        if key in ("$ref", "$dynamicRef", "$recursiveRef"):
            return [way for each in self._targets(schema) for way in self._of(each, depth)]
        if key in ("then", "else") or key not in _UNKNOWN:
            return []  # never fails, or not by itself
        raise UnknownError

    def _of_limit(self, key: str, value: Any) -> list[Any]:
        kind, opposite, more = _LIMITS[key]
        if more < 0 and value + more < 0:
            return []
        return [{"type": kind, opposite: value + more if more else value}]

    def _of_type(self, value: Any, depth: int) -> list[Any]:
        own = types_of({"type": value})
        if "integer" in own and "number" not in own:
            self.is_exact = False
        rest = [each for each in EVERY_TYPE if each not in own]
        return [{"type": rest}] if rest else []

    def _of_required(self, value: Any, depth: int) -> list[Any]:
        return [{"type": "object", "properties": {name: False}} for name in listed(value)]

    def _of_properties(self, value: Any, depth: int) -> list[Any]:
        return [
            {"type": "object", "required": [name], "properties": {name: way}}
            for name, each in named(value).items()
            for way in self._of(each, depth)
        ]

    def _of_all(self, value: Any, depth: int) -> list[Any]:
        return [way for each in listed(value) for way in self._of(each, depth)]

    def _of_any(self, value: Any, depth: int) -> list[Any]:
        ways = [self._of(each, depth) for each in listed(value)]
        found = [*islice(product(*ways), MOST_WAYS + 1)]
        if len(found) > MOST_WAYS:
            raise UnknownError
        return [{"allOf": [*each]} for each in found]


_OF_KEYWORDS: dict[str, Callable[[Opposite, Any, int], list[Any]]] = {
    "type": Opposite._of_type,
    "required": Opposite._of_required,
    "properties": Opposite._of_properties,
    "allOf": Opposite._of_all,
    "anyOf": Opposite._of_any,
    "not": lambda opposite, value, depth: [value],
    "const": lambda opposite, value, depth: [{EXCEPT: [value]}],
    "enum": lambda opposite, value, depth: [{EXCEPT: listed(value)}],
    EXCEPT: lambda opposite, value, depth: [{"enum": value}],
}
_UNKNOWN = ("oneOf", "if")

"""What the grammar of a JSON schema cannot hold, and the checker enforces on the text so far."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.structured.checked.known import KNOWN

Schema = dict[str, Any]
BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
VALUES = ("enum", "const", "default", "examples")  # no schemas
# Keywords of which the grammar holds nothing, or a part.
WATCHED = frozenset(
    {
        *("not", "if", "then", "else", "oneOf"),
        *("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems"),
        *("propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
        *("unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
    }
)
# Keywords with a value for which they allow everything.
IDLE: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "propertyNames": (True, {}),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "minProperties": (0,),
}


def is_idle(key: str, value: Any) -> bool:
    """Whether a keyword with this value allows everything."""
    return any(type(value) is type(each) and value == each for each in IDLE.get(key, ()))


def is_left_to_checker(key: str) -> bool:
    """Whether the grammar may leave a keyword out, since the checker enforces it."""
    return key in WATCHED and key in KNOWN


def needs_checker(schema: Any) -> bool:
    """Whether the grammar of a schema allows more than the schema does."""
    return any(
        is_left_to_checker(key) and not is_idle(key, value)
        for each in _schemas(schema)
        for key, value in each.items()
    )


def _schemas(schema: Any) -> Iterator[Schema]:
    """All schemas within a schema; some of them may be no schemas at all."""
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += each
        if not isinstance(each, dict):
            continue
        yield each
        for key, value in each.items():
            if key in BY_NAME and isinstance(value, dict):
                waiting += value.values()
            elif key not in VALUES:
                waiting.append(value)

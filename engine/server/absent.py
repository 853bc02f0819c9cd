"""Fields that ask for nothing: null, and values that mean what leaving them out means.

Clients spell out fields that they do not use, and parameters of an API that this server does not
have. A struct's class attribute ``nothing`` lists, for such a parameter, the values with which it
asks for nothing; any other is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, get_args

import msgspec


def without_absent(given: Any, kind: type[msgspec.Struct]) -> Any:
    """The body of a request, or a part of it, without fields that ask for nothing."""
    if not isinstance(given, dict):
        return given
    nothing: Mapping[str, tuple[Any, ...]] = getattr(kind, "nothing", {})
    inner = _structs_of(kind)
    return {
        name: without_absent(value, inner[name]) if name in inner else value
        for name, value in given.items()
        if value is not None and not _is_in(value, nothing.get(name, ()))
    }


def _is_in(value: Any, values: tuple[Any, ...]) -> bool:
    """Equal and of the same type: 0 is not False."""
    return any(type(value) is type(each) and value == each for each in values)


@lru_cache(maxsize=32)
def _structs_of(kind: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """The fields that are structs themselves."""
    found = {}
    for field in msgspec.structs.fields(kind):
        for arm in (field.type, *get_args(field.type)):
            if isinstance(arm, type) and issubclass(arm, msgspec.Struct):
                found[field.encode_name] = arm
    return found

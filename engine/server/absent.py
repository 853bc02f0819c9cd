"""Fields that ask for nothing: null, and values that mean what leaving them out means.

Clients spell out fields that they do not use, and parameters of an API that this server does not
have. A struct's class attribute ``nothing`` lists, for such a parameter, the values with which it
asks for nothing; any other is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, get_args, get_origin

import msgspec


def without_absent(given: Any, kind: type[msgspec.Struct]) -> Any:
    """The body of a request, or a part of it, without fields that ask for nothing."""
    if not isinstance(given, dict):
        return given
    nothing: Mapping[str, tuple[Any, ...]] = getattr(kind, "nothing", {})
    inner = _structs_of(kind)
    plain = _plain_objects_of(kind)
    kept = {
        name: without_absent(value, inner[name]) if name in inner else value
        for name, value in given.items()
        if value is not None and not _is_in(value, nothing.get(name, ()))
    }
    for name in plain & kept.keys():
        if isinstance(kept[name], dict):
            kept[name] = {key: each for key, each in kept[name].items() if each is not None}
    return kept


def _is_in(value: Any, values: tuple[Any, ...]) -> bool:
    """Equal and of the same type: 0 is not False."""
    return any(type(value) is type(each) and value == each for each in values)


@lru_cache(maxsize=32)
def _plain_objects_of(kind: type[msgspec.Struct]) -> frozenset[str]:
    """The fields that are objects of texts or numbers: null says nothing in them."""
    return frozenset(
        field.encode_name
        for field in msgspec.structs.fields(kind)
        for arm in (field.type, *get_args(field.type))
        if get_origin(arm) is dict and get_args(arm)[1] is not Any
    )


@lru_cache(maxsize=32)
def _structs_of(kind: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """The fields that are structs themselves."""
    found = {}
    for field in msgspec.structs.fields(kind):
        for arm in (field.type, *get_args(field.type)):
            if isinstance(arm, type) and issubclass(arm, msgspec.Struct):
                found[field.encode_name] = arm
    return found

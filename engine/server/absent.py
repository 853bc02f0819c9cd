"""Drop fields of a request body that have no effect: null, and values that change nothing.

Clients often send fields that they do not use, also of features that this server does not have. The
class attribute ``no_effect`` of a struct lists such fields with their harmless values. With any
other value a field is kept, and is refused by name later.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, get_args, get_origin

import msgspec


def without_absent(given: Any, kind: type[msgspec.Struct]) -> Any:
    """Return decoded JSON without the fields that have no effect in a body of type ``kind``."""
    if not isinstance(given, dict):
        return given
    no_effect: Mapping[str, tuple[Any, ...]] = getattr(kind, "no_effect", {})
    inner = _structs_of(kind)
    plain = _plain_objects_of(kind)
    kept = {
        name: without_absent(value, inner[name]) if name in inner else value
        for name, value in given.items()
        if value is not None and not _is_in(value, no_effect.get(name, ()))
    }
    for name in plain & kept.keys():
        if isinstance(kept[name], dict):
            kept[name] = {key: each for key, each in kept[name].items() if each is not None}
    return kept


def _is_in(value: Any, values: tuple[Any, ...]) -> bool:
    """Whether ``values`` has an equal value of the same type: 0 does not match False."""
    return any(type(value) is type(each) and value == each for each in values)


@lru_cache(maxsize=32)
def _plain_objects_of(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Names of the fields that are dicts of texts or numbers. Null values in them are dropped."""
    return frozenset(
        field.encode_name
        for field in msgspec.structs.fields(kind)
        for arm in (field.type, *get_args(field.type))
        if get_origin(arm) is dict and get_args(arm)[1] is not Any
    )


@lru_cache(maxsize=32)
def _structs_of(kind: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """The struct type of each field that contains structs, by the field's name."""
    found = {}
    for field in msgspec.structs.fields(kind):
        for arm in (field.type, *get_args(field.type)):
            if isinstance(arm, type) and issubclass(arm, msgspec.Struct):
                found[field.encode_name] = arm
    return found

"""Checks that options have the declared types of their fields. Each class checks its own ranges."""

from __future__ import annotations

import sys
import types
from dataclasses import fields
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from engine.errors import ConfigError

WORDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
    tuple: "a tuple",
    dict: "a dict",
    type(None): "None",
}


def check_types(options: Any) -> None:
    """Raise ``ConfigError`` for the first field of a dataclass with a value of the wrong type.

    The error names option, value and type, or the choices of a ``Literal``."""
    cls: type = type(options)
    secrets = {option.name for option in fields(options) if not option.repr}
    for name, (kinds, choices) in _rules_by_field(cls).items():
        value = getattr(options, name)
        check_kind(name, value, kinds, is_secret=name in secrets)
        if choices and value not in choices:
            listed = ", ".join(map(str, choices))
            raise ConfigError(f"{name} is {value!r:.80}, must be one of: {listed}")


def check_kind(
    name: str, value: object, kinds: tuple[type, ...], *, is_secret: bool = False
) -> None:
    """Raise ``ConfigError`` if ``value`` has none of the types ``kinds``; ``()`` allows any type.
    ``is_secret``: the error does not show the value."""
    if kinds and not any(_is_a(value, kind) for kind in kinds):
        named = [kind for kind in kinds if kind is not tuple or list not in kinds]
        wanted = " or ".join(WORDS.get(kind, kind.__name__) for kind in named)
        shown = "not shown here" if is_secret else f"{value!r:.80}"
        is_digit = type(value) is int and value in (0, 1)
        hint = f": write {bool(value)}" if bool in kinds and is_digit else ""
        raise ConfigError(f"{name} is {shown} ({type(value).__name__}), must be {wanted}{hint}")


def check_range(options: Any, low: float, high: float | None, *names: str) -> None:
    """Raise ``ConfigError`` for the first field in ``names`` whose value is outside [low, high] and
    not ``None``.

    Without ``high`` there is no upper limit."""
    for name in names:
        value = getattr(options, name)
        if value is None or (low <= value and (high is None or value <= high)):
            continue
        limits = f"at least {low}" if high is None else f"in {low}..{high}"
        raise ConfigError(f"{name} is {value!r:.80}, must be {limits}")


@cache
def _rules_by_field(cls: type) -> dict[str, tuple[tuple[type, ...], tuple[object, ...]]]:
    """Return for each field its allowed types and its allowed values; an empty tuple allows all."""
    hints = {option.name: get_type_hints(cls)[option.name] for option in fields(cls)}
    return {name: (kinds_of(hint), _choices_of(hint)) for name, hint in hints.items()}


def _choices_of(hint: Any) -> tuple[object, ...]:
    """Return the values of a ``Literal``, including ``None`` if it is optional."""
    if get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint):
        (own, *others) = [part for part in get_args(hint) if part is not type(None)]
        choices = () if others else _choices_of(own)
        return (None, *choices) if choices else ()
    return get_args(hint) if get_origin(hint) is Literal else ()


def kinds_of(hint: Any) -> tuple[type, ...]:
    """Return the types that a value may have; ``()`` if any type is allowed, or for a
    ``Literal``."""
    if get_origin(hint) in (Union, types.UnionType):
        parts = [kinds_of(part) for part in get_args(hint)]
        return sum(parts, ()) if all(parts) else ()
    if hint is Any or get_origin(hint) is Literal:
        return ()
    return (get_origin(hint) or hint,)


def _is_a(value: object, kind: type) -> bool:
    if isinstance(value, bool):  # Python counts it as an int
        return kind is bool
    if kind is float and isinstance(value, int):
        return abs(value) <= sys.float_info.max
    return isinstance(value, kind)

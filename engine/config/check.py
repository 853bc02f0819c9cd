"""Are the options of the types their fields are declared with? Ranges are each class's own."""

from __future__ import annotations

import types
from dataclasses import fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from engine.errors import ConfigError

WORDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "a dict",
    type(None): "None",
}


def check_types(options: Any) -> None:
    """Raise ``ConfigError`` naming option, value and type for the first that does not fit.

    ``options`` is a dataclass. Fields that are a ``Literal`` name their choices themselves.
    """
    hints = get_type_hints(type(options))
    for option in fields(options):
        kinds, value = _kinds(hints[option.name]), getattr(options, option.name)
        if kinds and not any(_is_a(value, kind) for kind in kinds):
            wanted = " or ".join(WORDS.get(kind, kind.__name__) for kind in kinds)
            raise ConfigError(
                f"{option.name} is {value!r} ({type(value).__name__}), must be {wanted}"
            )


def _kinds(hint: Any) -> tuple[type, ...]:
    """The classes a value may be of; () if it may be anything or is checked elsewhere."""
    if get_origin(hint) in (Union, types.UnionType):
        parts = [_kinds(part) for part in get_args(hint)]
        return sum(parts, ()) if all(parts) else ()
    if hint is Any or get_origin(hint) is Literal:
        return ()
    return (get_origin(hint) or hint,)


def _is_a(value: object, kind: type) -> bool:
    if isinstance(value, bool):  # which Python counts among the numbers
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)

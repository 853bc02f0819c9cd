"""Converts JSON values to hashable values, equal exactly where JSON schema defines them as equal.

Numbers are equal by value (1 equals 1.0), booleans equal no number, and the order of an object's
members does not matter. A string stays a string, a number becomes an ``int`` or a ``Decimal``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

Exact = Any  # hashable
Number = int | Decimal

NULL, TRUE, FALSE = ("null",), ("true",), ("false",)
LITERALS: dict[bytes, Exact] = {b"null": NULL, b"true": TRUE, b"false": FALSE}
_KINDS = {"null": "null", "true": "boolean", "false": "boolean", "array": "array"}
MOST_DIGITS = 4_000  # of an integer: Python limits the conversion
HUGE = re.compile(rb"[eE][+-]?[0-9]{5}")  # hardly any program reads such a number
NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
NUMBER_PREFIX = re.compile(
    rb"-?(?:(?:0|[1-9][0-9]*)(?:\.(?:[0-9]+(?:[eE](?:[+-]?[0-9]*)?)?)?|[eE](?:[+-]?[0-9]*)?)?)?"
)


def number_of(text: str) -> Number:
    """Convert the JSON text of a number, without rounding."""
    if text.lstrip("-").isdecimal() and len(text) < MOST_DIGITS:
        return int(text)
    found = Decimal(text)
    if not found:
        return 0
    if _exponent(found) < -MOST_DIGITS or found.adjusted() > MOST_DIGITS:
        return found
    return int(found) if found == int(found) else found


def exact(value: Any) -> Exact:
    """Convert a value that was decoded from JSON to a hashable one."""
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool):
        return NULL if value is None else TRUE if value else FALSE
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return number_of(repr(value))
    if isinstance(value, Decimal):
        return number_of(str(value))
    if isinstance(value, dict):
        return object_of((name, exact(each)) for name, each in value.items())
    return array_of(map(exact, value))


def array_of(items: Iterable[Exact]) -> Exact:
    return ("array", tuple(items))


def object_of(members: Iterable[tuple[str, Exact]]) -> Exact:
    return ("object", frozenset(members))


def kind_of(value: Exact) -> str:
    """Return the JSON schema type of the value; ``number`` for integers too."""
    if isinstance(value, str):
        return "string"
    if isinstance(value, tuple):
        return _KINDS.get(value[0], "object")
    return "number"


def is_whole(value: Number) -> bool:
    return isinstance(value, int) or _exponent(value) >= 0


def is_multiple(value: Number, step: Number) -> bool:
    """Whether ``value`` is an exact multiple of ``step``."""
    if not value or not step:
        return not value
    number, exponent = _scaled(value)
    of, scale = _scaled(step)
    if exponent >= scale:
        return bool(number * pow(10, exponent - scale, of) % of == 0)
    if scale - exponent > MOST_DIGITS:
        return False
    return bool(number % (of * 10 ** (scale - exponent)) == 0)


def _scaled(value: Number) -> tuple[int, int]:
    """Return (n, e) so that the absolute value is n * 10**e."""
    if isinstance(value, int):
        return abs(value), 0
    return int("".join(map(str, value.as_tuple().digits))), _exponent(value)


def _exponent(value: Decimal) -> int:
    found = value.as_tuple().exponent
    assert isinstance(found, int), "JSON has no infinity"
    return found

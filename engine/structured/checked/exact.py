"""Values of JSON in a form that compares and hashes as JSON schema compares them.

Numbers are equal by value (1 and 1.0 are one), booleans equal no number, and the order of an
object's members says nothing. A string stands for itself, a number is an ``int`` or a ``Decimal``.
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
MOST_DIGITS = 4_000  # of a whole number that is one for Python
HUGE = re.compile(rb"[eE][+-]?[0-9]{5}")  # no program reads such a number
NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
NUMBER_PREFIX = re.compile(
    rb"-?(?:(?:0|[1-9][0-9]*)(?:\.(?:[0-9]+(?:[eE](?:[+-]?[0-9]*)?)?)?|[eE](?:[+-]?[0-9]*)?)?)?"
)


def number_of(text: str) -> Number:
    """A number as JSON writes it, exactly."""
    if text.lstrip("-").isdecimal() and len(text) < MOST_DIGITS:
        return int(text)
    found = Decimal(text)
    if not found:
        return 0
    if _exponent(found) < -MOST_DIGITS or found.adjusted() > MOST_DIGITS:
        return found
    return int(found) if found == int(found) else found


def exact(value: Any) -> Exact:
    """The form of a value that a library has read."""
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
    """The type that JSON schema calls it by; ``number`` for whole ones, too."""
    if isinstance(value, str):
        return "string"
    if isinstance(value, tuple):
        return _KINDS.get(value[0], "object")
    return "number"


def is_whole(value: Number) -> bool:
    return isinstance(value, int) or _exponent(value) >= 0


def is_multiple(value: Number, step: Number) -> bool:
    """Whether a number is a multiple of another, both taken as they are written in decimals."""
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
    """A positive whole number and the power of ten it is multiplied by."""
    if isinstance(value, int):
        return abs(value), 0
    return int("".join(map(str, value.as_tuple().digits))), _exponent(value)


def _exponent(value: Decimal) -> int:
    found = value.as_tuple().exponent
    assert isinstance(found, int), "JSON has no infinity"
    return found

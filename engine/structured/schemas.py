"""Shared helpers for JSON schemas: size limits, types, formats and the dialect of patterns."""

from __future__ import annotations

import re
from typing import Any

from engine.errors import EngineError

# Limits on the total number of entries in a schema. llguidance makes up to three symbols for each
# property and accepts 50,000.
MOST = {"properties": 25_000, "required": 25_000, "enum": 50_000}

_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = r"(?:[1-9]\d{3}|0[1-9]\d\d|00[1-9]\d|000[1-9])"
_DAY = r"(?:\d\d-(?:[01]\d|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|3[01]))"  # "MM-DD" in any year
_MONTH_AND_DAY = (
    r"(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1\d|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)"
    r"|(?:0[13578]|1[02])-31)"
)
DATE = f"(?:{_LEAP_YEAR}-02-29|{_YEAR}-{_MONTH_AND_DAY})"  # valid calendar dates from year 1
_DATED = f"(?:{_LEAP_YEAR}-02-29|{_YEAR}-{_DAY})"
_CLOCK = r"\d\d:\d\d:[0-5]"
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]+"
LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HOST = rf"(?:{LABEL}(?:\.{LABEL})*|\[(?:{BYTE}\.){{3}}{BYTE}\])"
# These replace llguidance's formats: it allows host labels of any length, RFC 1123 at most 63.
INSTEAD_OF_FORMAT: dict[str, dict[str, Any]] = {
    "email": {"pattern": rf"^{_ATOM}(?:\.{_ATOM})*@{_HOST}$"},
}
# These are added to llguidance's formats. It allows 29 February in every year, the year 0000 (most
# parsers reject it), second 60 in any minute, and hosts or local parts of addresses longer than
# RFC 1123 and RFC 5321 allow.
MORE_OF_FORMAT: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATED}"},
    "time": {"pattern": f"^{_CLOCK}"},
    "date-time": {"pattern": f"^{_DATED}[Tt]{_CLOCK}"},
    "email": {"pattern": "^[^@]{1,64}@.{1,253}$"},
    "hostname": {"pattern": "^.{1,253}$"},
}

# ECMAScript's \s. llguidance also counts U+0085 and does not count U+FEFF. Rust allows a class
# within a class.
SPACE = "\\t-\\r\\x20\\u00A0\\u1680\\u2000-\\u200A\\u2028\\u2029\\u202F\\u205F\\u3000\\uFEFF"
_CLASSES = {r"\s": f"[{SPACE}]", r"\S": f"[^{SPACE}]"}


EVERY_TYPE = ("null", "boolean", "integer", "number", "string", "array", "object")


class SchemaError(EngineError):
    """The schema cannot be enforced."""


def check_size(schema: Any) -> None:
    """Raise ``SchemaError`` for too many properties, required names or enum values in a schema."""
    counts = dict.fromkeys(MOST, 0)
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            for key in MOST.keys() & each.keys():
                if isinstance(each[key], list | dict):
                    counts[key] += len(each[key])
                if counts[key] > MOST[key]:
                    raise SchemaError(
                        f"{key} has at least {counts[key]} entries in the whole schema, the limit "
                        f"is {MOST[key]}: make the schema smaller"
                    )
            each = each.values()
        waiting.extend(item for item in each if isinstance(item, list | dict))


def types_of(schema: dict[str, Any]) -> set[str]:
    """Return the JSON types that a schema allows; if "number" is one of them, so is "integer"."""
    given = schema.get("type", list(EVERY_TYPE))
    found = [given] if isinstance(given, str) else given
    if not isinstance(found, list) or not found or not all(each in EVERY_TYPE for each in found):
        raise SchemaError(f"type is {given!r:.80}, must be one of: {', '.join(EVERY_TYPE)}")
    return {*found, "integer"} if "number" in found else set(found)


def types_of_value(value: Any) -> set[str]:
    """Return the types of a value; a whole number is both "integer" and "number"."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"integer", "number"} if float(value).is_integer() else {"number"}
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return {names[type(value)]}


def of_rust(pattern: str) -> str:
    """Translate an ECMAScript pattern to Rust's dialect: ``\\s`` and ``\\S`` become explicit
    classes, except next to a hyphen, where a class could be refused as the end of a range."""
    parts = _without_nesting(re.findall(r"\\.|.", pattern, flags=re.S))
    triples = zip(["", *parts], parts, [*parts[1:], ""], strict=False)
    return "".join(
        part if "-" in (before, after) else _CLASSES.get(part, part)
        for before, part, after in triples
    )


def _without_nesting(parts: list[str]) -> list[str]:
    """Escape brackets within a class: in ECMAScript they are literal, in Rust they nest."""
    found, is_within = [], False
    for part in parts:
        found.append("\\[" if is_within and part == "[" else part)
        is_within = part == "[" or (is_within and part != "]")
    return found


def as_given(text: str) -> str:
    """Show ``\\s`` and ``\\S`` in an error message about a pattern as the user wrote them."""
    for given, written in _CLASSES.items():
        text = text.replace(written, given).replace(written.replace("\\", "\\\\"), given)
    return text


def quoted(text: str) -> str:
    """Escape a text so that a regular expression of Rust's matches exactly this text."""
    return re.sub(r"([\\.+*?()|\[\]{}^$#&~/-])", r"\\\1", text)

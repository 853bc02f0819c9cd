"""JSON schemas as the library is given them: what it would ignore is refused by name, what it
enforces in part is said in words that it enforces wholly, what says nothing is left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from engine.errors import EngineError
from engine.structured.watched import is_idle, is_left_to_checker

# Entries in all. Compiling takes time by their square: a few seconds for so many.
MOST = {"properties": 3_000, "required": 3_000, "enum": 25_000}
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("enum", "const", "default", "examples")  # no schemas

_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = r"(?:[1-9]\d{3}|0[1-9]\d\d|00[1-9]\d|000[1-9])"
_DAY = r"(?:\d\d-(?:[01]\d|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|3[01]))"  # of any year, with its month
_MONTH_AND_DAY = (
    r"(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1\d|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)"
    r"|(?:0[13578]|1[02])-31)"
)
DATE = f"(?:{_LEAP_YEAR}-02-29|{_YEAR}-{_MONTH_AND_DAY})"  # in the calendar, from the year 1 on
# The library writes 29 February in every year, and the year 0000, which hardly a program can read.
_MORE_OF_FORMAT: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^(?:{_LEAP_YEAR}-02-29|{_YEAR}-{_DAY})"},
    "date-time": {"pattern": f"^(?:{_LEAP_YEAR}-02-29|{_YEAR}-{_DAY})"},
}

# What ECMAScript has for \s, of which the library takes U+0085 for one and U+FEFF for none. A class
# may stand within a class.
_SPACE = "\\t-\\r\\x20\\u00A0\\u1680\\u2000-\\u200A\\u2028\\u2029\\u202F\\u205F\\u3000\\uFEFF"
_CLASSES = {r"\s": f"[{_SPACE}]", r"\S": f"[^{_SPACE}]"}


Why = Callable[[Any, dict[str, Any]], str | None]  # what speaks against a keyword's value


class SchemaError(EngineError):
    """A schema asks for what cannot be enforced."""


def prepared(schema: Any, is_closed: bool, *, is_lenient: bool = False) -> Any:
    """The schema for the library. Raises ``SchemaError`` that names the keyword.

    is_closed: no properties but those that it names; is_lenient: what cannot be enforced is left
    out.
    """
    _check_size(schema)
    return _prepared(schema, is_closed, {} if is_lenient else _REFUSED)


def _check_size(schema: Any) -> None:
    """Count entries of all lists and objects with such a key, up to the first too many."""
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
                        f"{key} has {counts[key]} entries and perhaps more, the limit is "
                        f"{MOST[key]} in all"
                    )
            each = each.values()
        waiting.extend(item for item in each if isinstance(item, list | dict))


def _prepared(schema: Any, is_closed: bool, refused: Mapping[str, Why]) -> Any:
    if isinstance(schema, list):
        return [_prepared(item, is_closed, refused) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key in refused and (why := refused[key](value, schema)):
            raise SchemaError(f"{key} is {value!r:.80}, which {why}")
        if not (key == "x-guidance" or is_idle(key, value) or is_left_to_checker(key)):
            name = _of_rust(value) if key == "pattern" and isinstance(value, str) else value
            found[key] = _value(key, name, is_closed, refused)
    more = []  # what holds next to the rest
    if "oneOf" in schema and "oneOf" not in found:
        more.append({"anyOf": _prepared(schema["oneOf"], is_closed, refused)})
    name = found.get("format")
    if isinstance(name, str) and name in _MORE_OF_FORMAT:
        more.append(_MORE_OF_FORMAT[name])
    if more:
        found["allOf"] = [*found.get("allOf", []), *more]
    if is_closed and (
        "properties" in found or "patternProperties" in found or found.get("type") == "object"
    ):
        found.setdefault("additionalProperties", False)
    return found


def _value(key: str, value: Any, is_closed: bool, refused: Mapping[str, Why]) -> Any:
    if key not in _BY_NAME or not isinstance(value, dict):
        return value if key in _VALUES else _prepared(value, is_closed, refused)
    rename = _of_rust if key == "patternProperties" else str
    return {rename(name): _prepared(each, is_closed, refused) for name, each in value.items()}


def _of_rust(pattern: str) -> str:
    """The pattern, whose classes mean what they do in ECMAScript, in the library's dialect.

    One beside a hyphen is left: within a class it might become the end of a range, which the
    library refuses to have from a class.
    """
    parts = re.findall(r"\\.|.", pattern, flags=re.S)
    beside = zip(["", *parts], parts, [*parts[1:], ""], strict=False)
    return "".join(
        part if "-" in (before, behind) else _CLASSES.get(part, part)
        for before, part, behind in beside
    )


def as_given(text: str) -> str:
    """What is said of a pattern, as the user has it."""
    for given, written in _CLASSES.items():
        text = text.replace(written, given).replace(written.replace("\\", "\\\\"), given)
    return text


def _of_draft_3(instead: str) -> Callable[[Any, dict[str, Any]], str]:
    return lambda value, schema: f"is a keyword of draft 3 and not enforced: {instead}"


def _why_options(value: Any, schema: dict[str, Any]) -> str:
    return "would set the library's own options: leave it out"


def _why_required(value: Any, schema: dict[str, Any]) -> str | None:
    if isinstance(value, bool):
        return "is of draft 3 and not enforced: list the names in the object's required"
    return None


def _why_properties(value: Any, schema: dict[str, Any]) -> str | None:
    """Properties without a name may be written twice, and then count once for who reads them."""
    required = schema.get("required", [])
    if not isinstance(value, int) or not isinstance(required, list):
        return None  # the library says what is wrong
    named = len({name for name in required if isinstance(name, str)})
    if value > named + 1:
        return f"is only enforced up to one more than the {named} required: name them in required"
    return None


_REFUSED: dict[str, Why] = {
    "x-guidance": _why_options,
    "divisibleBy": _of_draft_3("use multipleOf"),
    "disallow": _of_draft_3("use type"),
    "extends": _of_draft_3("use allOf"),
    "required": _why_required,
    "minProperties": _why_properties,
}

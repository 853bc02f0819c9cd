"""Says whether a text is what was asked for. Knows nothing of the library that makes the masks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import date
from functools import cache
from ipaddress import IPv4Address, IPv6Address
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import jsonschema
from jsonschema import validators
from jsonschema.validators import validator_for

Judge = Callable[[str], bool]

_ZONE = r"(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_TIME = re.compile(rf"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?{_ZONE}", re.ASCII | re.I)
_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
# Of RFC 3339, in which nothing is left out between two parts.
_OF_TIME = r"T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S)"
_OF_DAYS = r"(\d+Y(\d+M(\d+D)?)?|\d+M(\d+D)?|\d+D)"
_DURATION = re.compile(rf"P(\d+W|{_OF_TIME}|{_OF_DAYS}({_OF_TIME})?)", re.ASCII)
# ECMAScript's \s: its WhiteSpace and LineTerminator.
_SPACE = r"\t-\r \u00A0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF"
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_ATOM = re.compile(r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:([A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*")

formats = jsonschema.FormatChecker(formats=())  # our own, from the RFCs that JSON schema names


@formats.checks("date", raises=ValueError)
def _is_date(text: object) -> bool:
    if not isinstance(text, str):
        return True
    return bool(_DATE.fullmatch(text)) and bool(date.fromisoformat(text))


@formats.checks("time")
def _is_time(text: object) -> bool:
    return not isinstance(text, str) or bool(_TIME.fullmatch(text))


@formats.checks("date-time", raises=ValueError)
def _is_date_time(text: object) -> bool:
    if not isinstance(text, str):
        return True
    day, clock = text[:10], text[11:]
    return text[10:11] in ("T", "t") and _is_date(day) and _is_time(clock)


@formats.checks("duration")
def _is_duration(text: object) -> bool:
    return not isinstance(text, str) or bool(_DURATION.fullmatch(text))


@formats.checks("hostname")
def _is_hostname(text: object) -> bool:
    if not isinstance(text, str):
        return True
    return len(text) <= 253 and all(_LABEL.fullmatch(part) for part in text.split("."))


@formats.checks("email", raises=ValueError)
def _is_email(text: object) -> bool:
    if not isinstance(text, str):
        return True
    name, _, host = text.rpartition("@")
    if not _ATOM.fullmatch(name) or len(name) > 64:
        return False
    if host.startswith("[") and host.endswith("]"):
        inner = host[1:-1]
        return bool(IPv6Address(inner[5:]) if inner.startswith("IPv6:") else IPv4Address(inner))
    return _is_hostname(host)


@formats.checks("ipv4", raises=ValueError)
def _is_ipv4(text: object) -> bool:
    return not isinstance(text, str) or bool(IPv4Address(text))


@formats.checks("ipv6", raises=ValueError)
def _is_ipv6(text: object) -> bool:
    return not isinstance(text, str) or ("%" not in text and bool(IPv6Address(text)))


@formats.checks("uuid", raises=ValueError)
def _is_uuid(text: object) -> bool:
    return not isinstance(text, str) or str(UUID(text)) == text.lower()


@formats.checks("uri", raises=ValueError)
def _is_uri(text: object) -> bool:
    if not isinstance(text, str):
        return True
    return bool(_URI.fullmatch(text)) and bool(urlsplit(text).scheme)


def json_judge(schema: Any) -> Judge:
    """By ``jsonschema``, with the formats above."""
    cls = validator_for(schema, default=jsonschema.Draft202012Validator)
    cls = validators.extend(cls, {"pattern": _pattern})
    validator = cls(schema, format_checker=formats)

    def is_right(text: str) -> bool:
        try:
            value = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return False
        return bool(validator.is_valid(value))

    return is_right


def _pattern(validator: Any, pattern: str, text: object, schema: Any) -> Iterator[Any]:
    r"""As JSON schema has it, in the dialect of ECMAScript, where \w and \d are of ASCII and \s is
    not."""
    if isinstance(text, str) and not re.search(_of_python(pattern), text, re.ASCII):
        yield jsonschema.ValidationError(f"{text!r} does not match {pattern!r}")


@cache
def _of_python(pattern: str) -> str:
    r"""The pattern with \s and \S spelt out, the latter where no class is around it."""
    found, is_in_class = [], False
    for part in re.findall(r"\\.|.", pattern, re.S):
        if part in ("[", "]"):
            is_in_class = part == "["
        elif part == r"\s":
            part = _SPACE if is_in_class else f"[{_SPACE}]"
        elif part == r"\S" and not is_in_class:
            part = f"[^{_SPACE}]"
        found.append(part)
    return "".join(found)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def regex_judge(expression: str) -> Judge:
    compiled = re.compile(expression)
    return lambda text: compiled.fullmatch(text) is not None


@cache
def parser_of(grammar: str) -> Any:
    """Lark's Earley parser, in which every character may begin a token."""
    from lark import Lark

    return Lark(grammar, parser="earley", lexer="dynamic_complete", ambiguity="resolve")


def grammar_judge(grammar: str) -> Judge:
    from lark.exceptions import LarkError

    def is_right(text: str) -> bool:
        try:
            parser_of(grammar).parse(text)
        except LarkError:
            return False
        return True

    return is_right

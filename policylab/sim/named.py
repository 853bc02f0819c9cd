"""Parsing of ``name(option=value, ...)``, which names policies and workloads on a command line."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Collection, Iterable, Mapping
from math import inf
from typing import Any, TypeVar

from engine.errors import ConfigError

Entry = TypeVar("Entry")


def split(text: str) -> list[str]:
    """Split a text at its commas, except at commas within parentheses, brackets or quotes."""
    parts = [""]
    depth, quote = 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        if char == "," and not quote and depth <= 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def call(text: str, flag: str, example: str) -> tuple[str, dict[str, Any]]:
    """Parse ``name(option=value, ...)`` into the name and the options. Values are Python literals;
    any other, such as ``fixed(prompt=8)``, is the text itself, as if it were in quotes.

    Raises ``ConfigError``, which names the ``flag`` and an ``example``.
    """
    name, is_call, options = text.partition("(")
    if not is_call:
        return text.strip(), {}
    try:
        source = f"_({options}"
        parsed = ast.parse(source, mode="eval").body
        if not isinstance(parsed, ast.Call) or parsed.args:
            raise ValueError("not one call with options by name")
        found = {str(word.arg): _value(source, word.value) for word in parsed.keywords}
    except (SyntaxError, ValueError) as error:
        raise ConfigError(
            f"{flag} has {text!r}, must be a name, optionally with options as in {example}"
        ) from error
    return name.strip(), found


def _value(source: str, node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.get_source_segment(source, node)


def entry_of(what: str, name: str, entries: Mapping[str, Entry]) -> Entry:
    """Look up a name in ``entries``. Raises ``ConfigError`` for an unknown name; ``what`` is the
    kind of thing, such as "policy", for the message."""
    if name not in entries:
        near = difflib.get_close_matches(name, entries, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        known = ", ".join(sorted(entries))
        raise ConfigError(f"{what} {name!r} is not known; {hint}known names are: {known}")
    return entries[name]


def check_options(what: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise ``ConfigError`` if ``given`` contains an option that is not in ``known``. ``what``: the
    owner of the options, for the message."""
    if unknown := set(given).difference(known):
        raise ConfigError(
            f"{what} has no option {min(unknown)!r}; its options are: {', '.join(known)}"
        )


def check_number(name: str, value: Any, least: float, most: float = inf) -> None:
    """Raise ``ConfigError`` if the value is not a number from ``least`` to ``most``."""
    if not (isinstance(value, int | float) and least <= value <= most):
        upto = "" if most == inf else f", and at most {most:g}"
        raise ConfigError(f"{name} is {value!r}, must be {least:g} or more{upto}")

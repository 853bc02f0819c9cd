"""``name(option=value, ...)``, as policies and workloads are requested on a command line."""

from __future__ import annotations

import ast
from typing import Any

from engine.errors import ConfigError


def split(text: str) -> list[str]:
    """What commas divide, those within parentheses, brackets or quotes aside."""
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
    """The name, and its options with values as Python writes them.

    Raises ``ConfigError``, which names the ``flag`` and an ``example``.
    """
    name, is_call, options = text.partition("(")
    if not is_call:
        return text.strip(), {}
    try:
        parsed = ast.parse(f"_({options}", mode="eval").body
        if not isinstance(parsed, ast.Call) or parsed.args:
            raise ValueError("not one call with options by name")
        found = {str(word.arg): ast.literal_eval(word.value) for word in parsed.keywords}
    except (SyntaxError, ValueError) as error:
        raise ConfigError(
            f"{flag} has {text!r}, must be a name, or one with options as in {example}"
        ) from error
    return name.strip(), found

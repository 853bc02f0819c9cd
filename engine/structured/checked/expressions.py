"""Searches texts for the ECMAScript patterns of schemas, with Python's ``regex`` package."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from engine.structured.schemas import SPACE, SchemaError

MAX_SECONDS = 0.5  # per search of one text, also on a busy machine
# Only lax readers accept these: repeats of nothing, unescaped brackets.
_ESCAPED_OR_CLASS = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]|\{\d+(?:,\d*)?\}", re.S)
_LOOSE = re.compile(
    r"(?:^|[\^$(|])[*+?](?<!\(\?)|[\]{}]|[*+?][*+]|\(\?[^:=!<]|\(\?<?[=!][^()]*\)[*+?]"
)
_NO_ESCAPE = re.compile(r"\\[^dDwWsSbBtnvfr0-9cxukpP^$\\.*+?()\[\]{}|/-]")
_CLASSES = {r"\d": "0-9", r"\w": "A-Za-z0-9_", r"\s": SPACE}
_OTHERS = {r"\D": "0-9", r"\W": "A-Za-z0-9_", r"\S": SPACE}
_PARTS = re.compile(r"\\c[A-Za-z]|\\u\{[0-9a-fA-F]+\}|\(\?<(?![=!])|\\k<|\\.|.", re.S)


@lru_cache(maxsize=1024)
def searcher(pattern: str) -> Callable[[str], bool]:
    """Compile a pattern to a search function. Raises ``SchemaError`` for a malformed pattern."""
    import regex

    try:
        found = regex.compile(_of_python(pattern), regex.V0)
    except regex.error as error:
        raise SchemaError(
            f"pattern is {pattern!r:.80}, which is not a regular expression: {error}"
        ) from error

    def is_found(text: str) -> bool:
        try:
            return found.search(text, timeout=MAX_SECONDS) is not None
        except TimeoutError as error:
            raise SchemaError(
                f"pattern is {pattern!r:.80}, which takes too long to search for: avoid nested "
                "repeats"
            ) from error

    return is_found


def is_expression(pattern: str) -> bool:
    """Whether the text is a regular expression by ECMAScript's strict rules."""
    bare = _ESCAPED_OR_CLASS.sub(_kept_repeat, pattern)
    if _LOOSE.search(bare) or _NO_ESCAPE.search(pattern.replace("\\\\", "")):
        return False
    try:
        searcher(pattern)
    except SchemaError:
        return False
    return True


def _kept_repeat(found: re.Match[str]) -> str:
    return "*" if found[0].startswith("{") else "a"


def _of_python(pattern: str) -> str:
    """Translate a pattern from ECMAScript to Python."""
    written = []
    in_class = False
    for part in _PARTS.findall(pattern):
        if in_class and part == "]":
            in_class = False
        elif not in_class and part == "[":
            in_class = True
        elif in_class and part == "[":
            part = "\\["
        written.append(_one(part, in_class))
    return "".join(written)


def _one(part: str, in_class: bool) -> str:
    if part in _CLASSES:
        return _CLASSES[part] if in_class else f"[{_CLASSES[part]}]"
    if part in _OTHERS and not in_class:
        return f"[^{_OTHERS[part]}]"
    if part.startswith("\\c") and len(part) == 3:
        return f"\\x{ord(part[2]) % 32:02x}"
    if part.startswith("\\u{"):
        return f"\\U{int(part[3:-1], 16):08x}"
    if part == "(?<":
        return "(?P<"
    if part == "\\k<":
        return "(?P="
    if part == "$" and not in_class:
        return "\\Z"
    if part == "\\/":
        return "/"
    return part

"""Replaces a pattern with leading look-aheads by patterns without them, which must all match."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

LOOKS = re.compile(r"\(\?(?:=|!|<=|<!)")
PARTS = re.compile(r"\\k<\w+>|\\[1-9]\d*|\\.|\(\?<(?![=!])|\[(?:\\.|[^\]\\])*\]|.", re.S)
_ANY = r"[\s\S]*"
_LITERAL = re.compile(r"(?:[\w\s/:@,;=!~&%#<>'\"-]|\\[^\w\s]|\\-)+")


def without_looks(pattern: str) -> list[str] | None:
    """Return patterns without look-aheads: a text that matches all of them matches ``pattern``.
    ``None`` if the pattern has no leading look-aheads or is not supported."""
    if not pattern.startswith("^") or _is_choice(pattern):
        return None
    found, rest = [], pattern[1:]
    while (look := re.match(r"\(\?([=!])", rest)) is not None:
        end = closing(rest)
        if end is None or rest[end + 1 : end + 2] in ("*", "+", "?", "{"):
            return None
        inner = rest[look.end() : end]
        made = _negated(inner) if look[1] == "!" else f"^(?:{inner})"
        if made is None or LOOKS.search(inner):
            return None
        found.append(made)
        rest = rest[end + 1 :]
    return None if not found or LOOKS.search(rest) else [*found, f"^{rest}"]


def excluded_by(pattern: str) -> list[tuple[str, str]]:
    """Return two patterns for each leading ``(?!...)``: what it excludes, and what follows all
    leading look-aheads."""
    found, rest = [], pattern.removeprefix("^")
    while (look := re.match(r"\(\?([=!])", rest)) is not None:
        end = closing(rest)
        if end is None:
            return []
        if look[1] == "!":
            found.append(f"^(?:{rest[look.end() : end]})")
        rest = rest[end + 1 :]
    return [(each, f"^{rest}") for each in found]


def closing(text: str) -> int | None:
    """Return the index of the bracket that closes the one at the start of the text."""
    depth = 0
    for part in PARTS.finditer(text):
        depth += part[0].startswith("(") - (part[0] == ")")
        if depth == 0:
            return part.start()
    return None


def _is_choice(pattern: str) -> bool:
    """Whether a pattern has alternatives outside of brackets."""
    depth = 0
    for part in PARTS.finditer(pattern):
        depth += part[0].startswith("(") - (part[0] == ")")
        if part[0] == "|" and depth == 0:
            return True
    return False


def _negated(inner: str) -> str | None:
    """A pattern for texts that start with no match of ``inner``; ``None`` if unsupported."""
    if (anywhere := re.fullmatch(r"\.\*(\\?[^\w\s]|\w)(\\?[^\w\s]|\w)?", inner)) is not None:
        return _not_within(*anywhere.groups())
    if (chars := re.fullmatch(r"\[((?:\\.|[^\]\\^])(?:\\.|[^\]\\])*)\]", inner)) is not None:
        return f"^(?:|[^{chars[1]}]{_ANY})$"
    end = ""
    if (group := re.fullmatch(r"\((?:\?:)?([^()]*)\)(\$?)", inner)) is not None:
        inner, end = group[1], group[2]
    words = Words()
    for each in inner.split("|"):
        text, is_whole = each.removesuffix("$"), bool(end) or each.endswith("$")
        if not _LITERAL.fullmatch(text):
            return None
        words.add(re.sub(r"\\(.)", r"\1", text), is_whole=is_whole)
    return f"^{words.pattern()}$"


def _not_within(first: str, second: str | None) -> str:
    """Return a pattern for texts without this character or, given two, this pair of characters."""
    a = re.escape(first[-1])
    if second is None:
        return f"^[^{a}]*$"
    b = re.escape(second[-1])
    if a == b:
        return f"^(?:{a}?[^{a}])*{a}?$"
    return f"^(?:[^{a}]|{a}+[^{a}{b}])*{a}*$"


@dataclass
class Words:
    """A node in a tree of words that a text must not start with, or must not equal."""

    following: dict[str, Words] = field(default_factory=dict)
    is_beginning: bool = False  # a text must not start with the word that ends here
    is_whole: bool = False  # a text must not equal it

    def add(self, word: str, *, is_whole: bool) -> None:
        at = self
        for char in word:
            at = at.following.setdefault(char, Words())
        at.is_whole = at.is_whole or is_whole
        at.is_beginning = at.is_beginning or not is_whole

    def pattern(self) -> str:
        """A pattern for what may follow the letters up to this node without a forbidden word."""
        ways = [] if self.is_whole else [""]
        chars = "".join(map(re.escape, self.following))
        ways.append(f"[^{chars}]{_ANY}" if chars else rf"[\s\S]{_ANY}")
        ways += [
            f"{re.escape(char)}{each.pattern()}"
            for char, each in self.following.items()
            if not each.is_beginning
        ]
        return f"(?:{'|'.join(ways)})"

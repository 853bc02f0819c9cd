"""Rewrites the patterns of JSON schemas so that xgrammar enforces them.

xgrammar applies a pattern to the raw text between quotation marks: it anchors both ends, allows
unescaped quotation marks and backslashes, and ignores look-around. The rewritten pattern covers the
whole text and only has characters that JSON does not escape. Each text that it allows matches the
original pattern; texts with escapes are never allowed.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from engine.structured.schemas import SchemaError

Ranges = list[tuple[int, int]]  # code points from first to last, inclusive

MAX_REPEATS = 1_000  # in one counted repeat
MAX_NESTED = 100  # the product of nested counts: compiling takes seconds
LAST = 0x10FFFF
# Characters that JSON escapes, and surrogates.
_ESCAPED: Ranges = [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0xD800, 0xDFFF)]
_DIGIT: Ranges = [(0x30, 0x39)]
_WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
# Dialects differ in which characters are spaces: those in all dialects, and those in any.
_SPACE: Ranges = [(0x9, 0xD), (0x20, 0x20)]
_ANY_SPACE: Ranges = [
    *(*_SPACE, (0x1C, 0x1F), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
]
_LINE_ENDS: Ranges = [(0xA, 0xA), (0xD, 0xD), (0x2028, 0x2029)]


def without(own: Ranges, others: Ranges) -> Ranges:
    """Return the code points in the first ranges that are not in the second."""
    for low, high in others:
        own = [
            part
            for first, last in own
            for part in ((first, min(last, low - 1)), (max(first, high + 1), last))
            if part[0] <= part[1]
        ]
    return own


ALL: Ranges = [(0, LAST)]
_CLASSES: dict[str, Ranges] = {
    "d": _DIGIT,
    "D": without(ALL, _DIGIT),
    "w": _WORD,
    "W": without(ALL, _WORD),
    "s": _SPACE,
    "S": without(ALL, _ANY_SPACE),
}
_CONTROLS = {"t": 0x9, "n": 0xA, "v": 0xB, "f": 0xC, "r": 0xD, "0": 0x0}
_BY_NUMBER = re.compile("x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})")
_SYNTAX = "\\^$.|?*+()[]{}/-\"'#%&,:;<=>@_`~! "


def of_whole_text(pattern: str, *, is_proved: bool = False) -> str:
    """Rewrite a regular expression so that xgrammar enforces it. Raises ``SchemaError`` if that is
    impossible.

    is_proved: allow alternatives that may start with the same character, with which xgrammar is
    wrong for some patterns; tests must show that it is right for this one."""
    return _PatternReader(pattern, is_proved).whole()


def of_length(least: int, most: int | None) -> str:
    """Return a pattern for ``least`` to ``most`` characters that JSON does not escape. most:
    ``None`` for no limit."""
    return f"{_written(without(ALL, _ESCAPED))}{{{least},{'' if most is None else most}}}"


class _WrittenPart(NamedTuple):
    """A rewritten part of a pattern."""

    text: str
    times: int  # the product of its nested counts
    may_be_empty: bool
    first: Ranges  # characters that it may start with


class _PatternReader:
    """Reads a regular expression from left to right and rewrites it for xgrammar."""

    def __init__(self, pattern: str, is_proved: bool) -> None:
        self._text = pattern
        self._is_proved = is_proved
        self._at = 0

    def whole(self) -> str:
        written = self._ways(is_outermost=True).text
        if self._at < len(self._text):
            raise self.refusal("closes a bracket that is not open")
        return written

    def _ways(self, *, is_outermost: bool) -> _WrittenPart:
        """Read alternatives."""
        found = [self._sequence(is_outermost=is_outermost)]
        while self._takes("|"):
            found.append(self._sequence(is_outermost=is_outermost))
        if len(found) > 1 and not self._is_proved and _are_alike(found):
            raise self.refusal(
                "closes a group whose alternatives may begin alike or be empty, which xgrammar "
                "cannot enforce: write a common start before the group, and no empty alternative"
            )
        return _WrittenPart(
            "|".join(f"(?:{way.text})" for way in found),
            max(way.times for way in found),
            any(way.may_be_empty for way in found),
            [part for way in found for part in way.first],
        )

    def _sequence(self, *, is_outermost: bool) -> _WrittenPart:
        anything = f"{_written(without(ALL, _ESCAPED))}*"
        before = after = anything if is_outermost else ""
        if is_outermost and self._takes("^"):
            before = ""
        parts = []
        while self._here() not in ("", "|", ")"):
            if is_outermost and self._here() == "$" and self._here(1) in ("", "|"):
                self._at += 1
                after = ""
                break
            parts.append(self._repeated(self._atom()))
        text = "".join([before, *(part.text for part in parts), after])
        times = max((part.times for part in parts), default=1)
        first: Ranges = without(ALL, _ESCAPED) if before else []
        for part in parts:
            first = [*first, *part.first]
            if not part.may_be_empty:
                break
        is_open = all(part.may_be_empty for part in parts)
        return _WrittenPart(text, times, is_open, [*first, *(ALL if after and is_open else [])])

    def _repeated(self, atom: _WrittenPart) -> _WrittenPart:
        sign, times = self._here(), atom.times
        if sign in ("*", "+", "?"):
            self._at += 1
        elif sign == "{":
            low, high = self._counts()
            sign = f"{{{low},{'' if high is None else high}}}"
            times *= max(low, high or 1)
            if times > (MAX_REPEATS if atom.times == 1 else MAX_NESTED):
                raise self.refusal(
                    f"repeats {times} times, the limit is {MAX_REPEATS}, and {MAX_NESTED} for "
                    "repeats within each other"
                )
            if atom.may_be_empty:  # xgrammar then miscounts
                raise self.refusal("counts repeats of what may be empty, which is not enforced")
        else:
            return atom
        self._takes("?")  # lazy or greedy, the same texts match
        if self._here() in ("*", "+", "?", "{"):
            raise self.refusal("repeats a repeat")
        may_be_empty = atom.may_be_empty or sign[0] in "*?" or sign.startswith("{0")
        if sign == "?":  # xgrammar's own allows half of a group that ends in a repeat
            return _WrittenPart(f"(?:{atom.text}|)", times, True, atom.first)
        return _WrittenPart(f"{atom.text}{sign}", times, may_be_empty, atom.first)

    def _counts(self) -> tuple[int, int | None]:
        end = self._text.find("}", self._at)
        low, comma, high = self._text[self._at + 1 : max(end, 0)].partition(",")
        if not low.isdecimal() or not (high.isdecimal() or high == "") or len(low + high) > 12:
            raise self.refusal("is not a count of repeats")
        self._at = end + 1
        most = int(high) if high else None if comma else int(low)
        if most is not None and most < int(low):
            raise self.refusal("is not a count of repeats")
        return int(low), most

    def _atom(self) -> _WrittenPart:
        """Read the next character, class or group of the pattern."""
        if self._takes("("):
            return self._group()
        if self._takes("["):
            return self._class(self._members())
        if self._takes("."):
            return self._class(without(ALL, _LINE_ENDS))
        if self._here() in ("^", "$", "*", "+", "?", "{"):
            raise self.refusal("is not supported at this position")
        return self._class(self._one())

    def _group(self) -> _WrittenPart:
        if self._takes("?") and not self._takes(":"):
            end = self._text.find(">", self._at)
            if self._here() != "<" or end < 0 or self._here(1) in ("=", "!"):
                raise self.refusal("is look-around or another extension, which is not enforced")
            self._at = end + 1
        inner = self._ways(is_outermost=False)
        if not self._takes(")"):
            raise self.refusal("leaves a bracket open")
        return inner._replace(text=f"(?:{inner.text})")

    def _class(self, members: Ranges) -> _WrittenPart:
        if kept := without(members, _ESCAPED):
            return _WrittenPart(_written(kept), 1, False, kept)
        raise self.refusal("allows only characters that JSON escapes, which is not supported")

    def _members(self) -> Ranges:
        """Read the characters of a class, after its opening bracket."""
        is_negated = self._takes("^")
        found: Ranges = []
        while not self._takes("]"):
            first = self._one()
            if self._here() == "-" and self._here(1) not in ("]", ""):
                self._at += 1
                last = self._one()
                if not _is_single(first) or not _is_single(last) or last < first:
                    raise self.refusal("is not a range of characters")
                first = [(first[0][0], last[0][0])]
            found += first
        return without(ALL, found) if is_negated else found

    def _one(self) -> Ranges:
        """Read one character or escape, and return the characters that it matches."""
        if self._at >= len(self._text):
            raise self.refusal("leaves a class open")
        char = self._here()
        self._at += 1
        if char != "\\":
            return [(ord(char), ord(char))]
        char = self._here()
        self._at += 1
        if char in _CLASSES:
            return _CLASSES[char]
        if char in _CONTROLS and not self._here().isdecimal():
            return [(_CONTROLS[char], _CONTROLS[char])]
        if char and char in _SYNTAX:
            return [(ord(char), ord(char))]
        if found := _BY_NUMBER.match(self._text, self._at - 1):
            self._at = found.end()
            code = int(found[1] or found[2], 16)
            return [(code, code)]
        self._at -= 1
        raise self.refusal("is an escape that is not enforced")

    def _here(self, ahead: int = 0) -> str:
        """Return the next character, or a later one; "" after the end."""
        return self._text[self._at + ahead : self._at + ahead + 1]

    def _takes(self, sign: str) -> bool:
        if self._here() != sign:
            return False
        self._at += 1
        return True

    def refusal(self, why: str) -> SchemaError:
        """Make an error that shows the current position."""
        shown = self._text[max(self._at - 4, 0) : self._at + 8]
        return SchemaError(f"pattern is {self._text!r:.80}, where {shown!r} {why}")


def _are_alike(ways: list[_WrittenPart]) -> bool:
    """Whether two alternatives may start with the same character, or one may be empty."""
    seen: Ranges = []
    for way in ways:
        if way.may_be_empty or sum(map(_size, _united(without(way.first, seen)))) < sum(
            map(_size, _united(way.first))
        ):
            return True
        seen += way.first
    return False


def _united(ranges: Ranges) -> Ranges:
    """Remove overlaps."""
    found: Ranges = []
    for each in ranges:
        found += without([each], found)
    return found


def _size(part: tuple[int, int]) -> int:
    return part[1] - part[0] + 1


def _is_single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _written(ranges: Ranges) -> str:
    shown = (
        _char(low) if low == high else f"{_char(low)}-{_char(high)}" for low, high in sorted(ranges)
    )
    return f"[{''.join(shown)}]"


def _char(code: int) -> str:
    char = chr(code)
    return f"\\{char}" if char in "]^-[" else char

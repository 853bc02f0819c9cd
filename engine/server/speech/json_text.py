"""Repair the JSON that models write while it is streamed.

Valid JSON is not changed. These are repaired: control characters and unescaped quotes in strings,
escapes that JSON does not have, lone surrogates, single quotes, words without quotes, Python's
literals, missing or additional commas, and missing brackets at the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import Any, Literal

from engine.server.speech.source import TextSource, Waits

Pieces = Generator[str | None, None, None]
"""Yields pieces of JSON text, and ``None`` where more input is needed."""

OPENERS = {"}": "{", "]": "["}
CLOSERS = {"{": "}", "[": "]"}
RUN = re.compile("[^\"'\\\\\x00-\x1f\ud800-\udfff]+")  # characters of a string to copy unchanged
HALVES = re.compile("[\ud800-\udfff]")
BARE = re.compile('[^,\\[\\]{}"<`\n\ud800-\udfff]+')  # numbers, literals, words without quotes
BARE_KEY = re.compile(r"[\w$-]+")
NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
UNICODE = re.compile(r"\\u([0-9a-fA-F]{4})")
PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
PART_OF_ESCAPE = re.compile(
    r"\\(?:u[0-9a-fA-F]{0,3})?|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?"
)
QUOTED_KEY = r"""(["'])(?:(?!\1)[^\\\n]|\\.)*"""
KEY = re.compile(rf"(?:{QUOTED_KEY}\1|[\w$-]+)\s*:", re.DOTALL)
PART_OF_KEY = re.compile(rf"{QUOTED_KEY}(?:\\|\1\s*)?|[\w$-]+\s*", re.DOTALL)
LONGEST_KEY = 80
BREAKS_OFF = re.compile(r'((?:[^"\\]|"(?:[^"\\]|\\.)*")*)"(?:[^"\\]|\\.)*\\?', re.DOTALL)
WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false"}
NO_NUMBERS = ("None", "NaN", "nan", "Infinity", "-Infinity", "undefined")
WORDS |= dict.fromkeys(NO_NUMBERS, "null")
VALUE_BEGINS = "\"'[{-0123456789tfnTFN"


def unchanged(text: str) -> str:
    return text


class JsonText:
    """Parses and repairs one JSON value in streamed text."""

    def __init__(
        self,
        source: TextSource,
        plain: Callable[[str], str] = unchanged,
        ends: tuple[str, ...] = (),
    ) -> None:
        """plain: replaces marker characters by the markers' texts; ends: texts that may come
        directly after the value."""
        self.end: Literal["whole", "mended", "cut"] = "whole"
        """How the value ended; ``mended``: missing brackets were added; ``cut``: incomplete."""
        self._source = source
        self._plain = plain
        self._ends = ends
        self._stack: list[str] = []
        self._held = ""  # a comma, a key, white space: output together with the next value
        self._is_after_value = False
        self._has_comma = False
        self._is_in_string = self._is_in_key = False
        self._has_bare_keys = False
        self._is_broken = False

    @property
    def is_open(self) -> bool:
        """Whether the text ended inside a string."""
        return self._is_in_string

    def read(self) -> Pieces:
        """Parse the value at the source's position and yield it in pieces."""
        yield from self._value()
        while self._stack and not self._is_broken:
            yield from self._next()
        if not self._is_broken:
            return
        if self._source.is_cut or (self._is_in_string and not self._is_in_key):
            self.end = "cut"
            yield self._take_held()
        else:
            self.end = "mended"
            yield "".join(CLOSERS[each] for each in reversed(self._stack))

    def string(self, *, is_key: bool) -> Pieces:
        """Parse a string and yield it in pieces, with its quotes."""
        source = self._source
        quote = source.text[source.at]
        source.at += 1
        self._is_in_string, self._is_in_key = True, is_key
        yield '"'
        while True:
            run = RUN.match(source.text, source.at)
            if run is not None:
                source.at = run.end()
                yield run[0]
            char = yield from source.peek()
            if not char:
                self._is_broken = True
                return
            if char == "\\":
                yield from self._escape()
            elif char == quote and (yield from self._closes(is_key)):
                source.at += 1
                break
            else:
                source.at += 1
                yield self._escaped(char)
        self._is_in_string = False
        yield '"'

    def text(self, *, is_key: bool) -> Generator[None, None, str | None]:
        """Parse a string and return its text, unescaped; ``None`` if the string has no end."""
        parts = []
        for piece in self.string(is_key=is_key):
            if piece is None:
                yield None
            else:
                parts.append(piece)
        return None if self._is_in_string else decoded("".join(parts)[1:-1])

    def _value(self) -> Pieces:
        char = yield from self._space()
        if char and char in "{[":
            self._source.at += 1
            self._stack.append(char)
            self._is_after_value = False
            yield self._take_held() + char
            return
        if char and char in "\"'":
            yield self._take_held()
            yield from self.string(is_key=False)
        elif char and char in ",}" and self._held:  # a key without a value
            yield self._take_held() + "null"
        else:
            yield from self._word()
        self._is_after_value = True

    def _word(self) -> Pieces:
        """Parse a number, a literal, or a word without quotes."""
        source, size = self._source, 0
        while True:
            match = BARE.match(source.text, source.at + size)
            size = size if match is None else match.end() - source.at
            if source.at + size < len(source.text) or source.is_ended:
                break
            yield None
        word = source.text[source.at : source.at + size].rstrip()
        if not word:
            self._is_broken = True
            return
        source.at += len(word)
        if source.is_cut and source.at == len(source.text):
            self._held += word
            self._is_broken = True
            return
        is_json = NUMBER.fullmatch(word)
        spelled = word if is_json else WORDS.get(word) or json.dumps(word, ensure_ascii=False)
        yield self._take_held() + spelled

    def _next(self) -> Pieces:
        """Parse the next comma, bracket, element or member in the innermost array or object."""
        char = yield from self._space()
        if char and char in "}]":
            yield from self._close(char)
        elif char == ",":
            self._source.at += 1
            if self._is_after_value and not self._has_comma:
                self._has_comma = True
                self._held += char
        elif not char or not (yield from self._begins(char)):
            self._is_broken = True
        elif self._stack[-1] == "[":
            yield from self._value()
        else:
            yield from self._member(char)

    def _begins(self, char: str) -> Waits[bool]:
        """Whether ``char`` begins an element or a member. Adds a missing comma before it."""
        is_array = self._stack[-1] == "["
        if self._is_after_value and not self._has_comma:
            if char not in (VALUE_BEGINS if is_array else "\"'"):
                return False
            self._held = f", {self._held.lstrip()}"
        return is_array or char in "\"'" or bool(BARE_KEY.match(char))
        yield

    def _member(self, char: str) -> Pieces:
        source = self._source
        if char in "\"'":
            for piece in self.string(is_key=True):
                if piece is None:
                    yield None
                else:
                    self._held += piece
            if self._is_in_string:
                return
        else:
            key = yield from source.match(BARE_KEY)
            assert key is not None
            self._has_bare_keys = True
            self._held += json.dumps(key[0], ensure_ascii=False)
        char = yield from self._space()
        if char != ":":
            self._is_broken = True
            return
        source.at += 1
        self._held += ":"
        yield from self._value()

    def _close(self, char: str) -> Pieces:
        """Close the innermost bracket of this kind, and the brackets that are open inside it."""
        if OPENERS[char] not in self._stack:
            self._is_broken = True
            return
        self._source.at += 1
        closed = "" if self._has_comma else self._take_held()
        self._held, self._has_comma = "", False
        while True:
            bracket = CLOSERS[self._stack.pop()]
            closed += bracket
            if bracket == char:
                break
        self._is_after_value = True
        yield closed

    def _space(self) -> Waits[str]:
        """Skip white space and return the next character. The space is output with the next
        piece."""
        source = self._source
        while True:
            char = yield from source.peek()
            if not char or not char.isspace():
                return char
            begin = source.at
            while source.at < len(source.text) and source.text[source.at].isspace():
                source.at += 1
            self._held += "".join(
                each if each in " \t\r\n" else " " for each in source.text[begin : source.at]
            )

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        self._has_comma = False
        return held

    def _closes(self, is_key: bool) -> Waits[bool]:
        """Guess by the text after a quotation mark at the position whether it ends the string."""
        source = self._source
        char, offset = yield from source.look(1)
        if not char:
            return True
        if (yield from source.standing(offset, self._ends)):
            return True
        if is_key:
            return char in ":,}]\"'"
        if char in "}]":
            return True
        if char == ",":
            return (yield from self._more_follows(offset + 1))
        # Either a comma is missing here, or the quote is inside of the string.
        return char == '"' and (yield from self._key_follows(offset, is_due=False))

    def _more_follows(self, offset: int) -> Waits[bool]:
        """Whether an element, a member or a closing bracket follows the comma before ``offset``."""
        char, offset = yield from self._source.look(offset)
        if not char or char in "]},":
            return True
        if self._stack and self._stack[-1] == "[":
            return char in VALUE_BEGINS
        if char not in "\"'" and not self._has_bare_keys:
            return False
        return (yield from self._key_follows(offset, is_due=True))

    def _key_follows(self, offset: int, *, is_due: bool) -> Waits[bool]:
        """Whether an object key and a colon follow at ``offset``; is_due: the result if the text
        ends before this is clear."""
        source = self._source
        while True:
            begin = source.at + offset
            text = source.text[begin : begin + LONGEST_KEY]
            if KEY.match(text) is not None:
                return True
            if PART_OF_KEY.fullmatch(text) is None:
                return False
            if source.is_ended or len(text) == LONGEST_KEY:
                return is_due
            yield None

    def _escape(self) -> Pieces:
        source = self._source
        while PART_OF_ESCAPE.fullmatch(source.text, source.at):
            if source.is_ended:
                source.at = len(source.text)
                return
            yield None
        char = source.text[source.at + 1]
        if char in '"\\/bfnrt':
            yield source.take(source.at + 2)
        elif char == "u":
            yield self._unicode()
        elif char == "'":
            source.at += 2
            yield char
        else:
            source.at += 1
            yield "\\\\"

    def _unicode(self) -> str:
        """Read a ``\\u`` escape and return it; a lone surrogate becomes U+FFFD."""
        source = self._source
        first = UNICODE.match(source.text, source.at)
        if first is None:
            source.at += 1
            return "\\\\"
        if not HALVES.match(chr(int(first[1], 16))):
            return source.take(first.end())
        pair = PAIR.match(source.text, source.at)
        if pair is not None:
            return source.take(pair.end())
        source.at = first.end()
        return "\ufffd"

    def _escaped(self, char: str) -> str:
        text = HALVES.sub("\ufffd", self._plain(char))
        return json.dumps(text, ensure_ascii=False)[1:-1]


def decoded(text: str) -> str:
    """Decode the text between the quotation marks of a JSON string."""
    return str(json.loads(f'"{text}"'))


def mended(text: str, *, is_cut: bool = False) -> str | None:
    """Repair the text of a JSON value. Returns ``None`` if that fails, or if other text follows the
    value. is_cut: the text may end before the value does, but not inside a string."""
    source = TextSource()
    source.feed(text)
    source.end(is_cut=False)
    value = JsonText(source)
    parts = [piece for piece in value.read() if piece]
    if (
        value.end == "cut"
        or (value.end == "mended" and not is_cut)
        or source.text[source.at :].strip()
    ):
        return None
    return "".join(parts)


def object_in(text: str) -> dict[str, Any]:
    """Parse a JSON object that may be cut off. Returns its complete members; {} for other texts."""
    begin = BREAKS_OFF.fullmatch(text)
    for part in (text, mended(text if begin is None else begin[1], is_cut=True) or ""):
        try:
            value = json.loads(part)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    return {}

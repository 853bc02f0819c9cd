"""Checks JSON text while it is written, and refuses bytes after which no valid text can follow.

state = Checker(schema).begin()
state.feed(b'{"names": ["a", "a"')   # False
state.why                            # "uniqueItems"
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from engine.structured.checked.ahead import Ahead, verdict_of
from engine.structured.checked.demands import UNKNOWN
from engine.structured.checked.exact import (
    HUGE,
    LITERALS,
    NUMBER,
    NUMBER_PREFIX,
    Exact,
    number_of,
)
from engine.structured.checked.frames import ValueFrame, with_news
from engine.structured.checked.places import PlaceIndex, Vector
from engine.structured.checked.rules import Elements, Rule, rules_of
from engine.structured.checked.vocabulary import SPACES, SPECIAL, Stops

_SPACES = re.compile(rb"[ \t\r\n]*")
_SPECIAL = re.compile(rb'[\x00-\x1f"\\\xff]')
_NUMBER_END = re.compile(rb"[^0-9eE.+-]")
_FRACTION = re.compile(rb"[.eE]")
_ESCAPES = b'"\\/bfnrtu'
_DIGITS = b"0123456789abcdefABCDEF"
# The modes of a state: what it reads next.
VALUE, NAME, COLON, AFTER, STRING, NUMERAL, LITERAL = range(7)
DUPLICATE = "a name that is written twice"
SYNTAX = "JSON"


class Checker:
    """A compiled JSON schema, which can check any number of texts."""

    def __init__(self, schema: Any) -> None:
        """Raises ``SchemaError`` for a schema that cannot be checked."""
        self.is_only_of_names = schema is True
        """Whether the checker only refuses repeated names and what is invalid in any JSON text:
        huge numbers and lone surrogates."""
        self.places = PlaceIndex()
        outermost = Rule()
        outermost.elements = Elements()
        outermost.elements.prefix = [rules_of(schema)]
        self._top = self.places.place((outermost,), (True,)).table("array")
        self.ahead = Ahead()

    def begin(self) -> CheckerState:
        """Return the state before the first byte."""
        return CheckerState(self, ValueFrame(self._top, None).at_item())


class CheckerState:
    """The state of checking one JSON text. It cannot be used any more after a failure."""

    __slots__ = ("buffer", "checker", "escape", "frame", "is_first", "mode", "options", "why")

    def __init__(self, checker: Checker, frame: ValueFrame) -> None:
        self.checker = checker
        self.frame = frame
        self.mode = VALUE
        self.buffer = b""  # the unfinished string, number or literal
        self.escape = 0  # characters that an unfinished escape still needs
        self.is_first = False  # right after an opening bracket
        self.options: tuple[bytes, ...] | None = None  # the only allowed contents of the string
        self.why = ""

    def copy(self) -> CheckerState:
        """Return an independent copy of the state."""
        other = CheckerState.__new__(CheckerState)
        other.checker, other.frame, other.mode = self.checker, self.frame, self.mode
        other.buffer, other.escape, other.is_first = self.buffer, self.escape, self.is_first
        other.options, other.why = self.options, self.why
        return other

    @property
    def stops(self) -> Stops | None:
        """The only bytes that the checker may refuse at this position; ``None`` for all bytes."""
        is_text = self.mode == STRING or (self.mode == NAME and self.buffer)
        return IN_STRINGS if is_text and self.options is None and not self.escape else None

    @property
    def skips(self) -> bytes:
        """Bytes, such as spaces, that are allowed here and do not change what may follow."""
        if self.mode == COLON:
            return SPACES + b":"
        is_between = self.mode in (VALUE, AFTER) or (self.mode == NAME and not self.buffer)
        return SPACES if is_between else b""

    @property
    def least_quotes(self) -> int:
        """Any text with fewer quotation marks than this may follow, if it is valid JSON."""
        if not self.checker.is_only_of_names:
            return 0
        if self.mode == NUMERAL and b"e" in self.buffer.lower():
            return 0  # further digits may make it huge
        if self.mode == STRING and b"\\" not in self.buffer:
            return 3  # the end of this string, and both ends of a name after it
        return 1 if self.buffer and self.mode in (NAME, STRING) else 2

    @property
    def pressing(self) -> list[bytes]:
        """Texts that would make the current string or name equal to one that must not be repeated.
        Each is a dead end unless the grammar allows a longer string; the caller must check this."""
        text, mode = self.buffer, self.mode
        if mode not in (VALUE, STRING, NAME) or not (taken := self._taken()):
            return []
        if mode == VALUE:
            return [space + b'"' + each for each in taken for space in (b"", b" ")]
        if self.escape or self.options is not None:
            return []
        if mode == NAME:
            text = text[1:]
        return [each[len(text) :] for each in taken if each.startswith(text)]

    def _taken(self) -> list[bytes]:
        """Return the strings or names that were used already and must not be repeated here; empty
        if the schema does not limit what may be used instead."""
        frame = self.frame
        if self.mode == NAME:
            names = frame.names if frame.table.place.has_names and self.buffer else ()
            return [name.encode("utf-8", "surrogatepass") for name in names]
        if not frame.table.is_unique or frame.open is None or not frame.open[1].place.is_shaped:
            return []
        return [v.encode("utf-8", "surrogatepass") for v in frame.seen if isinstance(v, str)]

    @property
    def may_end(self) -> bool:
        """Whether the text may end here."""
        if self.mode == NUMERAL and self.frame.parent is None:
            return self.copy()._end_number()
        return self.is_whole

    @property
    def is_whole(self) -> bool:
        """Whether the value is complete, so that only spaces may follow."""
        return self.mode == AFTER and self.frame.parent is None

    def feed(self, data: bytes) -> bool:
        """Check more bytes. Returns False if no valid text begins with the bytes so far; ``why`` is
        then the schema's keyword that forbids it."""
        at = 0
        while at < len(data):
            at = _READERS[self.mode](self, data, at)
            if at < 0:
                return False
        return True

    def feed_value(self, data: bytes, at: int) -> int:
        """Check bytes from index ``at`` to the end of the value. Returns the index after the last
        byte used, or -1 if the text is invalid."""
        while at < len(data) and not self.is_whole:
            at = _READERS[self.mode](self, data, at)
            if at < 0:
                return -1
        return at

    @property
    def is_untouched(self) -> bool:
        """Whether the text has only spaces so far."""
        return self.mode == VALUE and self.frame.parent is None

    # -- readers of one element each; they return the next index, or -1 on failure

    def _value(self, data: bytes, at: int) -> int:
        byte = data[at]
        if byte in SPACES:
            return _after_spaces(data, at)
        if byte == 0x5D and self.is_first:  # ]
            return self._close(at, "array")
        if self.is_first and not self._start_item():
            return -1
        if byte == 0x7B or byte == 0x5B:
            return self._open("object" if byte == 0x7B else "array", at)
        kind, mode = _BEGINNINGS.get(byte, ("", 0))
        if not kind:
            return self._fail(SYNTAX)
        self.mode, self.buffer = mode, b""
        if not self._learn(kind, _WORDS.get(byte)):
            return -1
        return at + 1 if mode == STRING else at

    def _name(self, data: bytes, at: int) -> int:
        """Check bytes of a property's name, or spaces before it. Returns the next index."""
        if self.buffer:
            return self._text(data, at)
        byte = data[at]
        if byte in SPACES:
            return _after_spaces(data, at)
        if byte == 0x7D and self.is_first:  # }
            return self._close(at, "object")
        if byte != 0x22:
            return self._fail(SYNTAX)
        self.options = self.checker.ahead.names(self.frame)
        if self.options == ():
            return self._fail(self.checker.ahead.why)
        self.buffer, self.escape, self.is_first = b'"', 0, False
        return at + 1

    def _colon(self, data: bytes, at: int) -> int:
        byte = data[at]
        if byte in SPACES:
            return _after_spaces(data, at)
        if byte != 0x3A:
            return self._fail(SYNTAX)
        self.mode = VALUE
        return at + 1

    def _after(self, data: bytes, at: int) -> int:
        byte = data[at]
        if byte in SPACES:
            return _after_spaces(data, at)
        frame = self.frame
        if frame.parent is None:
            return self._fail(SYNTAX)
        if byte == 0x5D or byte == 0x7D:
            return self._close(at, "array" if byte == 0x5D else "object")
        if byte != 0x2C:
            return self._fail(SYNTAX)
        if not self.checker.ahead.may_go_on(frame):
            return self._fail(self.checker.ahead.why)
        self.is_first = False
        if frame.table.kind == "object":
            self.mode, self.buffer = NAME, b""
            return at + 1
        self.mode = VALUE
        return at + 1 if self._start_item() else -1

    def _text(self, data: bytes, at: int) -> int:
        """Read bytes inside a string."""
        if self.escape:
            return self._escaped(data, at)
        found = _SPECIAL.search(data, at)
        end = found.start() if found is not None else len(data)
        self.buffer += data[at:end]
        if found is None or found[0] == b"\\":
            if found is not None:
                self.buffer += b"\\"
                self.escape = 1
                end += 1
            return end if self._fits() else -1
        if found[0] != b'"':
            return self._fail(SYNTAX)
        is_right = self._end_name() if self.mode == NAME else self._end_text()
        return end + 1 if is_right else -1

    def _escaped(self, data: bytes, at: int) -> int:
        byte = data[at]
        if self.escape == 1 and self.buffer.endswith(b"\\") and byte in _ESCAPES:
            self.escape = 4 if byte == 0x75 else 0
        elif byte in _DIGITS and not self.buffer.endswith(b"\\"):
            self.escape -= 1
        else:
            return self._fail(SYNTAX)
        self.buffer += data[at : at + 1]
        return at + 1 if self.escape or self._fits() else -1

    def _numeral(self, data: bytes, at: int) -> int:
        found = _NUMBER_END.search(data, at)
        end = found.start() if found is not None else len(data)
        self.buffer += data[at:end]
        if NUMBER_PREFIX.fullmatch(self.buffer) is None or HUGE.search(self.buffer):
            return self._fail(SYNTAX)
        if found is None:
            return end if self._fits() else -1
        return end if self._end_number() else -1

    def _literal(self, data: bytes, at: int) -> int:
        self.buffer += data[at : at + 1]
        if self.buffer in LITERALS:
            return at + 1 if self._fill(LITERALS[self.buffer]) else -1
        is_right = any(word.startswith(self.buffer) for word in LITERALS)
        return at + 1 if is_right else self._fail(SYNTAX)

    # -- events

    def _fail(self, why: str) -> int:
        self.why = why
        return -1

    def _judged(self) -> bool:
        """Whether the text is still valid after the values so far."""
        verdict = verdict_of(self.frame)
        if isinstance(verdict, str):
            self.why = verdict
            return False
        return True

    def _start_item(self) -> bool:
        self.is_first = False
        self.frame = with_news(self.frame.at_item())
        return self._judged()

    def _learn(self, kind: str, word: Exact) -> bool:
        """Record that a value of JSON type ``kind`` begins. word: its value, if it is a literal
        such as true. Returns False if the schema allows no such value here."""
        # All digits begin the same kind, and a mask tries each of them.
        learned = self.frame.learned
        if (kind, word) not in learned:
            learned[kind, word] = self._learned(kind, word)
        self.frame, self.options, self.why = learned[kind, word]
        return not self.why

    def _learned(self, kind: str, word: Exact) -> tuple[ValueFrame, tuple[bytes, ...] | None, str]:
        """Begin a value of type ``kind``. Returns the new state of the enclosing object or array,
        the only allowed texts (``None``: any), and why it is forbidden ("" if allowed)."""
        frame, ahead = self.frame, self.checker.ahead
        assert frame.open is not None, "a value is expected"
        vector = frame.open[1].place.table(kind).vector
        if vector != frame.open[2]:
            frame = with_news(frame.opened(vector))
            verdict = verdict_of(frame)
            if isinstance(verdict, str):
                return frame, None, verdict
        if self.mode == LITERAL:
            return frame, None, "" if ahead.is_possible(frame, word) else ahead.why or SYNTAX
        options = ahead.values(frame, kind)
        return frame, options, (ahead.why or SYNTAX) if options == () else ""

    def _open(self, kind: str, at: int) -> int:
        table = self.frame.open_place.table(kind)
        self.frame = with_news(ValueFrame(table, self.frame))
        self.is_first = True
        self.mode, self.buffer = (NAME, b"") if kind == "object" else (VALUE, b"")
        if not self._judged():
            return -1
        if not self.checker.ahead.is_alive(self.frame):
            return self._fail(self.checker.ahead.why)
        return at + 1

    def _close(self, at: int, kind: str) -> int:
        frame = self.frame
        if frame.table.kind != kind or frame.parent is None:
            return self._fail(SYNTAX)
        closed, parent = frame.closed(), frame.parent
        value = closed.exact if parent.keeps_values else None
        return at + 1 if self._filled(parent, closed.vector, value) else -1

    def _end_name(self) -> bool:
        name = _decoded(self.buffer + b'"')
        self.buffer = b""
        if name is None or name in self.frame.names:
            self._fail(SYNTAX if name is None else DUPLICATE)
            return False
        self.frame = with_news(self.frame.named(name))
        self.mode = COLON
        return self._judged()

    def _end_text(self) -> bool:
        value = _decoded(b'"' + self.buffer + b'"')
        if value is None:
            self._fail(SYNTAX)
            return False
        return self._fill(value)

    def _end_number(self) -> bool:
        if NUMBER.fullmatch(self.buffer) is None:
            self._fail(SYNTAX)
            return False
        return self._fill(number_of(self.buffer.decode()))

    def _fill(self, value: Exact) -> bool:
        """End a string, number or literal. Returns False if this value is not allowed."""
        place = self.frame.open_place
        return self._filled(self.frame, place.on_scalar(value), value)

    def _filled(self, frame: ValueFrame, vector: Vector, value: Exact) -> bool:
        self.mode, self.options = AFTER, None
        if frame.keeps_values or value is UNKNOWN:
            self.frame, self.why = self._after_value(frame, vector, value)
        else:  # values with equal verdicts lead to equal states
            if vector not in frame.learned:
                frame.learned[vector] = self._after_value(frame, vector, value)
            self.frame, self.why = frame.learned[vector]
        return not self.why

    def _after_value(
        self, frame: ValueFrame, vector: Vector, value: Exact
    ) -> tuple[ValueFrame, str]:
        """Return the state of the enclosing object or array after a value, and why the text is then
        invalid ("" if it is valid). vector: the rules' verdicts on the value."""
        filled = with_news(frame.filled(vector, value))
        verdict = verdict_of(filled)
        if isinstance(verdict, str):
            return filled, verdict
        ahead = self.checker.ahead
        return filled, "" if ahead.is_alive(filled) else ahead.why or SYNTAX

    def _fits(self) -> bool:
        """Whether the unfinished string or number can still become an allowed value."""
        written = self.buffer
        if self.options is None:
            if self.mode != NUMERAL or self.checker.ahead.may_become(self.frame, written):
                return True
            self.why = self.checker.ahead.why
            return False
        if self.mode == NUMERAL and _FRACTION.search(written):
            return True  # it may be an allowed number in other digits
        if self.mode != NUMERAL and b"\\" in written:
            written = _unescaped(written)
        if any(option.startswith(written) for option in self.options):
            return True
        self.why = self.checker.ahead.why
        return False


def _after_spaces(data: bytes, at: int) -> int:
    found = _SPACES.match(data, at)
    assert found is not None, "the pattern matches the empty text"
    return found.end()


def _decoded(text: bytes) -> str | None:
    try:
        found: str = msgspec.json.decode(text, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return found


def _unescaped(text: bytes) -> bytes:
    """Decode a JSON string that may be unfinished; an incomplete escape at its end is dropped."""
    quote = text[:1] if text.startswith(b'"') else b""
    rest = text[len(quote) :]
    for cut in range(7):
        end = len(rest) - cut
        if (found := _decoded(b'"' + rest[:end] + b'"')) is not None:
            return quote + found.encode("utf-8", "surrogatepass")
    return quote


IN_STRINGS = Stops(b'"\\' + bytes(range(0x20)) + SPECIAL)
_BEGINNINGS: dict[int, tuple[str, int]] = {
    0x22: ("string", STRING),
    0x74: ("boolean", LITERAL),
    0x66: ("boolean", LITERAL),
    0x6E: ("null", LITERAL),
    **dict.fromkeys(b"-0123456789", ("number", NUMERAL)),
}
_WORDS = {word[0]: value for word, value in LITERALS.items()}
_READERS: tuple[Callable[[CheckerState, bytes, int], int], ...] = (
    *(CheckerState._value, CheckerState._name, CheckerState._colon, CheckerState._after),
    *(CheckerState._text, CheckerState._numeral, CheckerState._literal),
)

"""Parse tool calls that are JSON objects with the tool's name and its arguments."""

from __future__ import annotations

import re

from engine.server.speech.calls import CallReader
from engine.server.speech.events import CallBegin
from engine.server.speech.source import Steps, Waits

NESTED = ("function", "tool", "tool_call")  # members with the name, or with an object that has it
LISTS = ("tool_calls", "calls")  # members with a list of such objects
ARGUMENTS = ("arguments", "parameters", "args", "input")
OTHERS = ("type", "id")
FENCE = "```"
LANGUAGE = re.compile(r"[\w-]*")
LANGUAGES = ("", "json", "tool_call", "tool_calls", "tool_code", "tool")
SPACE_OR_SEPARATOR = re.compile(r"[\s;,]*")


class ObjectCalls(CallReader):
    """Parses ``{"name": ..., "arguments": {...}}``, or a list of them, perhaps in a code fence."""

    fences: tuple[str, ...] = (FENCE,)
    trailing: tuple[str, ...] = ("}", "]", FENCE)

    def attempt(self) -> Steps[bool]:
        """Try to parse a call at a marker, code fence or bracket. Returns False if it is none."""
        is_marked = yield from self.accept_openers(self.openers)
        return (yield from self.value(is_marked=is_marked))

    def value(self, *, is_marked: bool) -> Steps[bool]:
        """Try to parse an object as a tool call. Returns whether it is one. is_marked: it follows a
        marker that opens a call; otherwise an object with unusual members is no call."""
        source = self.source
        char = yield from source.skip_space()
        if char == "`" and not (yield from self.fence()):
            return False
        char = yield from source.skip_space()
        if char == "[":
            source.at += 1
            char = yield from source.skip_space()
        if char != "{":
            return False
        return (yield from ObjectCall(self, is_marked=is_marked).read())

    def following(self) -> Steps[bool]:
        """Try to parse another call, without an opening marker. Returns False if there is none."""
        yield from self.source.match(SPACE_OR_SEPARATOR)
        char = yield from self.source.peek()
        if not char or char not in "{[`":
            return False
        return (yield from self.value(is_marked=False))

    def fence(self) -> Waits[bool]:
        """Skip the start of a code fence. Returns False if its language is not used for calls."""
        if not (yield from self.source.accept(FENCE)):
            return False
        language = yield from self.source.match(LANGUAGE)
        return language is not None and language[0] in LANGUAGES


class ObjectCall:
    """Parses one JSON object, which is a call if it has a tool's name and arguments."""

    def __init__(self, calls: CallReader, *, is_marked: bool) -> None:
        self._calls = calls
        self._source = calls.source
        self._is_marked = is_marked
        self._name: str | None = None
        self._held: str | None = None  # arguments that precede the name
        self._has_begun = False
        self._has_others = False  # whether it has members that are unusual in a call
        self._is_between = False  # whether it was cut off between two members

    def read(self) -> Steps[bool]:
        is_whole = yield from self._members()
        if self._has_begun:
            return True
        if self._name is None or not (is_whole or self._is_between):
            return False
        if self._held is None and self._has_others:  # these may be the arguments: keep the text
            return False
        if not is_whole and not (yield from self._calls.is_over()):
            return False
        yield from self._calls.whole(self._name, self._held or "{}")
        return True

    def _members(self) -> Steps[bool]:
        """Parse the members of an object. Returns whether the object is complete."""
        source = self._source
        source.at += 1
        while True:
            char = yield from source.skip_space()
            if char == "}":
                source.at += 1
                return True
            if char == ",":
                source.at += 1
                continue
            if not char or char not in "\"'":
                self._is_between = True
                return False
            key = yield from self._calls.json().text(is_key=True)
            yield from source.skip_space()
            if key is None or not (yield from source.accept(":")):
                return False
            yield from source.skip_space()
            if not (yield from self._member(key)):
                return False

    def _member(self, key: str) -> Steps[bool]:
        """Parse the value of a member. Returns False if the object cannot be a call."""
        char = yield from self._source.peek()
        if key in LISTS and char == "[":
            self._source.at += 1
            char = yield from self._source.skip_space()
        if key in (*NESTED, *LISTS) and char == "{":
            return (yield from self._members())
        if key == "name" or key in NESTED:
            return (yield from self._named(char))
        if key in ARGUMENTS and not self._has_begun:
            return (yield from self._arguments())
        if key not in OTHERS and not self._is_marked and not self._has_begun:
            return False
        self._has_others = self._has_others or key not in OTHERS
        value = self._calls.json()
        for piece in value.read():
            if piece is None:
                yield None
        return value.end == "whole"

    def _named(self, char: str) -> Steps[bool]:
        if not char or char not in "\"'":
            return False
        name = yield from self._calls.json().text(is_key=False)
        if self._has_begun:
            return name is not None
        self._name = None if name is None else self._calls.name(name)
        if self._name is None:
            return False
        if self._held is not None:
            self._has_begun = True
            yield from self._calls.whole(self._name, self._held)
        return True

    def _arguments(self) -> Steps[bool]:
        if self._name is None:
            self._held = yield from self._calls.held()
            return self._held is not None
        for event in self._calls.arguments(self._name):
            self._has_begun = self._has_begun or isinstance(event, CallBegin)
            yield event
        return self._has_begun

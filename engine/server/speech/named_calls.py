# ruff: noqa: RUF001, RUF002  (DeepSeek's markers have a vertical line of their own)
"""Parse tool calls of Mistral and DeepSeek: the tool's name, then its arguments as JSON."""

from __future__ import annotations

import re

from engine.server.speech.object_calls import ObjectCalls
from engine.server.speech.source import Steps

NAME = re.compile(r"[\w.-]+")
ID = re.compile(r"[\w-]*")
CALL_ID, ARGS = "[CALL_ID]", "[ARGS]"
CALLS_BEGIN, CALL_BEGIN = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
SEPARATOR = "<｜tool▁sep｜>"


class MistralCalls(ObjectCalls):
    """Parses ``[TOOL_CALLS]weather[ARGS]{"city": "Rome"}``, or a list of objects (older models)."""

    def attempt(self) -> Steps[bool]:
        if not (yield from self.accept_openers(self.openers)):
            return (yield from self.value(is_marked=False))
        names = (self.markers.read(CALL_ID), self.markers.read(ARGS))
        char = yield from self.source.skip_space()
        if char in ("{", "`") or (char == "[" and not (yield from self.source.standing(0, names))):
            return (yield from self.value(is_marked=True))
        return (yield from self._named())

    def following(self) -> Steps[bool]:
        mark = self.source.at
        if (yield from super().following()):
            return True
        self.source.at = mark
        yield from self.source.skip_space()
        return (yield from self._named(needs_sign=True))

    def _named(self, *, needs_sign: bool = False) -> Steps[bool]:
        source = self.source
        name = yield from self.read_name()
        if name is None:
            return False
        if (yield from source.accept(self.markers.read(CALL_ID))):
            yield from source.match(ID)
            yield from source.skip_space()
        has_sign = bool((yield from source.accept(self.markers.read(ARGS))))
        if needs_sign and not has_sign:
            return False
        char = yield from source.skip_space()
        if char == "`" and has_sign and not (yield from self.fence()):
            return False
        yield from source.skip_space()
        if (yield from self.arguments(name)):
            return True
        if has_sign and (yield from self.is_over()):
            yield from self.whole(name)
            return True
        return False


class DeepSeekCalls(ObjectCalls):
    """Parses ``<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>``;
    older models write ``function``, the separator, the name, and the arguments in a code fence."""

    def attempt(self) -> Steps[bool]:
        source, read = self.source, self.markers.read
        yield from source.accept(read(CALLS_BEGIN))
        yield from source.skip_space()
        yield from source.accept(read(CALL_BEGIN))
        yield from source.skip_space()
        first = yield from source.match(NAME)
        if first is None:
            return False
        yield from source.skip_space()
        second = None
        if (yield from source.accept(read(SEPARATOR))):
            yield from source.skip_space()
            second = yield from source.match(NAME)
        named = second or first
        name = self.name(named[0])
        if name is None:
            return False
        yield from source.accept(read(SEPARATOR))
        return (yield from self._fenced(name))

    def following(self) -> Steps[bool]:
        return False
        yield

    def _fenced(self, name: str) -> Steps[bool]:
        char = yield from self.source.skip_space()
        has_fence = char == "`" and (yield from self.fence())
        yield from self.source.skip_space()
        if (yield from self.arguments(name)):
            return True
        if (yield from self.is_over()) or (
            has_fence and (yield from self.source.standing(0, ("```",)))
        ):
            yield from self.whole(name)
            return True
        return False

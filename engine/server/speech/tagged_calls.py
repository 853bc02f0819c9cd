"""Parse tool calls of Qwen-Coder and GLM, where each argument is between tags."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

from engine.server.speech.events import CallArguments, CallEnd
from engine.server.speech.object_calls import ObjectCalls
from engine.server.speech.source import Steps, Waits
from engine.server.speech.tagged_values import EndTag, TaggedValue, ValueTags, json_of, quoted

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
ATTRIBUTE = re.compile("[^<>\n\ud800-\udfff]*")
NOT_A_KEY = re.compile("[^<\n\ud800-\udfff]*")


class TaggedCalls(ObjectCalls):
    """Base class of the parsers of tagged calls. The tool's schema decides whether a value is text
    or JSON. An end tag ends a value only if another tag, or the end of the answer, follows it."""

    trailing = ()

    def __init__(self, *how: Any, **more: Any) -> None:
        super().__init__(*how, **more)
        self._tags = self._made_tags()

    def following(self) -> Steps[bool]:
        return False
        yield

    @abstractmethod
    def _made_tags(self) -> ValueTags:
        """The tags that may end a value."""

    @abstractmethod
    def _key(self) -> Waits[str | None]:
        """Parse an argument up to its value, and return its name; ``None`` if none follows."""

    @abstractmethod
    def _next_keys(self, names: Iterable[str]) -> Iterable[str]:
        """Texts that follow the opening tag of an argument, for each of these argument names."""

    def tagged(self, name: str) -> Steps[None]:
        """Parse the arguments of a call of the tool ``name``, and yield the events of the call."""
        types, before = self.tools[name], "{"
        yield self.begin(name)
        while (key := (yield from self._key())) is not None:
            yield CallArguments(f"{before}{quoted(key)}: ")
            before = ", "
            value = TaggedValue(self.source, self._tags, self.markers.plain, self._next_keys(types))
            for piece in json_of(value, types.get(key, [])):
                if piece is None:
                    yield None
                elif piece:
                    yield CallArguments(piece)
            if value.is_cut:
                return
        if self.source.is_cut and self.source.at == len(self.source.text):
            yield CallArguments("{" if before == "{" else "")
            return
        yield CallArguments("{}" if before == "{" else "}")
        yield CallEnd()

    def _any_arguments(self, name: str, first: tuple[str, ...], *, is_marked: bool) -> Steps[bool]:
        """Try to parse a call's arguments; returns False if there are none. first: tags with which
        they may begin; is_marked: the call began with a marker, so they are optional."""
        char = yield from self.source.skip_space()
        if (yield from self.source.standing(0, (*first, *self.closers))):
            yield from self.tagged(name)
            return True
        if char == "{":
            return (yield from self.arguments(name))
        if is_marked and (yield from self.is_over()):
            yield from self.whole(name)
            return True
        return False


class QwenCoderCalls(TaggedCalls):
    """Parses Qwen-Coder's calls, whose outer tags may be missing:
    ``<tool_call><function=weather><parameter=city>Rome</parameter></function></tool_call>``."""

    def attempt(self) -> Steps[bool]:
        source, read = self.source, self.markers.read
        is_marked = yield from self.accept_openers((read(CALL),))
        char = yield from source.skip_space()
        if is_marked and char and char in "{[`":
            return (yield from self.value(is_marked=True))
        if not (yield from source.accept(read(FUNCTION))):
            return False
        name = yield from self.read_name()
        if name is None:
            return False
        if not (yield from source.accept(">")) and not (
            yield from source.standing(0, (read(PARAMETER),))
        ):
            return False
        return (yield from self._any_arguments(name, (read(PARAMETER),), is_marked=is_marked))

    def _made_tags(self) -> ValueTags:
        read = self.markers.read
        call, call_end, function = read(CALL), read(CALL_END), read(FUNCTION)
        end, parameter = read(FUNCTION_END), read(PARAMETER)
        others = {
            end: EndTag((call_end, call, function)),
            call_end: EndTag((call, function)),
            call: EndTag((function,), on_own_line=True),
            parameter: EndTag(on_own_line=True),
        }
        return ValueTags(
            read(PARAMETER_END), (parameter, end, call_end, call, function), others, has_lines=True
        )

    def _key(self) -> Waits[str | None]:
        source = self.source
        yield from source.skip_space()
        if not (yield from source.accept(self.markers.read(PARAMETER))):
            return None
        key = yield from source.match(ATTRIBUTE)
        yield from source.accept(">")
        return "" if key is None else key[0].strip().strip("\"'")

    def _next_keys(self, names: Iterable[str]) -> Iterable[str]:
        return (f"{name}>" for name in names)


class GlmCalls(TaggedCalls):
    """Reads ``<tool_call>weather<arg_key>city</arg_key><arg_value>Ulm</arg_value></tool_call>``."""

    def attempt(self) -> Steps[bool]:
        source = self.source
        yield from self.accept_openers(self.openers)
        char = yield from source.skip_space()
        if char and char in "{[`":
            return (yield from self.value(is_marked=True))
        name = yield from self.read_name()
        if name is None:
            return False
        first = (self.markers.read(KEY),)
        return (yield from self._any_arguments(name, first, is_marked=True))

    def _made_tags(self) -> ValueTags:
        read = self.markers.read
        call, call_end, key = read(CALL), read(CALL_END), read(KEY)
        others = {call_end: EndTag((call,)), key: EndTag()}
        return ValueTags(read(VALUE_END), (key, call_end, call), others, has_lines=False)

    def _key(self) -> Waits[str | None]:
        source, read = self.source, self.markers.read
        yield from source.skip_space()
        if not (yield from source.accept(read(KEY))):
            return None
        key = yield from source.match(NOT_A_KEY)
        yield from source.accept(read(KEY_END))
        yield from source.skip_space()
        yield from source.accept(read(VALUE))
        return "" if key is None else key[0].strip()

    def _next_keys(self, names: Iterable[str]) -> Iterable[str]:
        return (f"{name}{self.markers.read(KEY_END)}" for name in names)

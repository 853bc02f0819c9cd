"""Parser of gpt-oss's answers: messages whose headers name a channel and perhaps a recipient.

<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary
to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>
"""

from __future__ import annotations

import re
from typing import NamedTuple

from engine.server.speech.events import PartEnd, Text, Thinking
from engine.server.speech.object_calls import FENCE, ObjectCalls
from engine.server.speech.source import Literals, Steps, Waits

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
RECIPIENT = re.compile(r"\bto\s*=\s*([\w.-]+)")
FUNCTION = re.compile(r"\b(functions\.[\w.-]+)")
WRITER = "assistant"
ROLES = ("assistant", "user", "all", "system", "developer")
ANALYSIS = "analysis"
CHANNELS = (ANALYSIS, "commentary", "final")
WORD = re.compile(r"\s*([a-z]*)")
MAX_HEADER = 1000  # characters


class HarmonyHeader(NamedTuple):
    """The text of a message's header; ``is_whole``: whether the header is complete."""

    text: str
    is_whole: bool


class HarmonyCalls(ObjectCalls):
    """Parses the arguments of a tool call in a message whose header names the tool."""

    trailing = ()

    def attempt(self) -> Steps[bool]:
        return False
        yield

    def body(self, name: str) -> Steps[bool]:
        char = yield from self.source.skip_space()
        has_fence = char == "`" and (yield from self.fence())
        yield from self.source.skip_space()
        if (yield from self.arguments(name)):
            if has_fence:
                yield from self.source.skip_space()
                yield from self.source.accept(FENCE)
            return True
        if (yield from self.is_over()):
            yield from self.whole(name)
            return True
        return False


class HarmonyParser:
    """Parses one answer."""

    def __init__(self, calls: HarmonyCalls) -> None:
        self.is_thinking = False
        self._calls = calls
        self._source = calls.source
        read = calls.markers.read
        self._start, self._channel, self._message = read(START), read(CHANNEL), read(MESSAGE)
        self._ends = tuple(map(read, ENDS))
        self._begins = (self._start, self._channel, self._message)
        self._all = Literals((*self._begins, *self._ends))

    def run(self) -> Steps[None]:
        is_header = yield from self._is_header()
        while True:
            while is_header:
                yield from self._read_message()
                is_header = yield from self._is_header()
            found = yield from self._text(is_thinking=False)
            if not found:
                return
            is_header = found in self._begins
            if not is_header:
                self._source.at += len(found)
                is_header = yield from self._is_header()

    def _is_header(self) -> Waits[bool]:
        """Whether the text continues with a header whose first marker is missing."""
        source = self._source
        source.hold()
        yield from source.skip_space()
        found = ""
        if (yield from source.accept(WRITER)):
            yield from source.skip_space()
            found = yield from source.standing(0, (self._channel, self._message))
        if (yield from source.accept("to")):
            yield from source.skip_space()
            found = yield from source.accept("=")
        source.give_back()
        return bool(found)

    def _text(self, *, is_thinking: bool) -> Steps[str]:
        """Yield text up to a marker. Returns the marker, or "" at the end of the answer."""
        source = self._source
        while True:
            match = self._all.search(source)
            end = self._all.safe_end(source) if match is None else match.start()
            if end > source.at:
                text = source.take(end)
                yield Thinking(text) if is_thinking else Text(text)
            if match is not None:
                return match[0]
            if source.is_ended:
                return ""
            yield None

    def _read_message(self) -> Steps[None]:
        source = self._source
        source.hold()
        header = yield from self._header()
        size = len(header.text)
        recipient = self._recipient(header.text)
        name = None if recipient is None else self._calls.name(recipient[1])
        if header.is_whole and name is not None and (yield from self._calls.body(name)):
            source.mark = None
            yield from self._body(is_thinking=False)
        elif not self._is_message(header.text, recipient):
            source.give_back()
            yield Text(source.take(source.at + size))
            found = yield from self._text(is_thinking=False)
            yield Text(source.take(source.at + len(found) * (found in self._ends)))
        elif header.is_whole:
            source.mark = None
            yield from self._body(is_thinking=self._channel_of(header.text) == ANALYSIS)
        else:
            source.mark = None
            if not self._is_known(header.text):
                yield Text(self._words(header.text))
        yield PartEnd()

    def _recipient(self, header: str) -> re.Match[str] | None:
        """Find the recipient that a header names, with or without ``to=``."""
        found = RECIPIENT.search(header)
        return found or FUNCTION.search(header.partition(self._channel)[2])

    def _is_message(self, header: str, recipient: re.Match[str] | None) -> bool:
        """Whether the header belongs to a message that is not addressed to a tool."""
        if not header.lstrip().removeprefix(WRITER).lstrip().startswith(self._begins):
            return False
        return recipient is None or recipient[1] in ROLES

    def _header(self) -> Waits[HarmonyHeader]:
        """Parse the message header that begins at the current position."""
        source = self._source
        begin = source.at
        yield from source.accept(self._start)
        while True:
            match = self._all.search(source)
            if match is None:
                if source.is_ended or len(source.text) - begin > MAX_HEADER:
                    source.at = len(source.text)
                    return HarmonyHeader(source.text[begin:], is_whole=False)
                yield None
            elif match[0] in (self._channel, self._message):
                source.at = match.end()
                if match[0] == self._message:
                    return HarmonyHeader(source.text[begin : source.at], is_whole=True)
            else:
                source.at = match.start()
                return HarmonyHeader(source.text[begin : source.at], is_whole=False)

    def _body(self, *, is_thinking: bool) -> Steps[None]:
        """Parse the text of a message, which follows its header."""
        self.is_thinking = is_thinking
        found = yield from self._text(is_thinking=is_thinking)
        if found in self._ends:
            self._source.at += len(found)
        self.is_thinking = False

    def _channel_of(self, header: str) -> str:
        channel = WORD.match(header.rpartition(self._channel)[2])
        return "" if channel is None else channel[1]

    def _is_known(self, header: str) -> bool:
        """Whether an incomplete header could be completed to a well-formed one."""
        words = header.removeprefix(self._start).strip().removeprefix(WRITER).strip()
        channel = words.removeprefix(self._channel).strip()
        return not words or any(each.startswith(channel) for each in CHANNELS)

    def _words(self, header: str) -> str:
        for marker in self._begins:
            header = header.replace(marker, "")
        return header

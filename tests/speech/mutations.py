"""Answers that nobody foresaw: those of the corpus cut, shuffled, with parts of others in them.

Whatever a model writes, reading it raises nothing; it is the same in pieces of any size; arguments
are JSON unless they break off; and of an answer without calls no letter is lost.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.server.speech.answer import ParsedAnswer
from engine.server.speech.events import CallArguments, CallBegin, CallEnd, Event, Text, Thinking
from engine.server.speech.tools import tools_of
from engine.server.speech.turns import ChatFormat
from engine.text.tokenizer import Tokenizer

from .cases import CASES
from .families import TOOLS, markers_of, signs_of, tokenizer_with
from .playing import pieces, play, read_of

KINDS = ("tokens", "letters")
PARTS = (
    "edit", "noargs", "files.read-all", '{"name": "edit", "arguments": {', '{"path": "a', "path",
    "<function=edit>", "<parameter=path>", " to=functions.edit", "assistant", "```json\n", "```",
    "\n", " ", '"', "'", "\\", "{", "}", "[", "]", ":", ",", "null", "1", "é", "<", "to=",
)  # fmt: skip
MAX_LENGTH = 2000
HEADERS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
"""Markers of messages; what is between two messages is no text."""


@dataclass
class Mutations:
    """Draws answers of all families and reads them."""

    dice: random.Random
    num_read: int = 0
    num_calls: int = 0
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tools = tools_of(TOOLS, "auto", None)
        self._models: dict[tuple[str, str], tuple[Tokenizer, ChatFormat]] = {}
        for family in CASES:
            for kind in KINDS:
                tokenizer = tokenizer_with(*markers_of(family) * (kind == "tokens"))
                self._models[family, kind] = tokenizer, ChatFormat(tokenizer, signs_of(family))

    def draw(self) -> None:
        """One more answer; what is wrong with its reading is kept."""
        family = self.dice.choice(sorted(CASES))
        text = self._text(family)[:MAX_LENGTH]
        reason = self.dice.choice(["stop", "length"])
        for kind in KINDS:
            what = f"{family}, {kind}, {reason}: {text!r}"
            try:
                self.wrong += [f"{why}: {what}" for why in self._faults(family, kind, text, reason)]
            except Exception as error:
                self.wrong.append(f"{error!r}: {what}")
        self.num_read += 1

    def _text(self, family: str) -> str:
        dice, cases = self.dice, CASES[family]
        text = dice.choice(cases).text
        how = dice.randrange(5)
        if how == 0:
            return text[: dice.randrange(len(text) + 1)]
        if how == 1:
            at = dice.randrange(len(text))
            return text[at:] + text[:at]
        if how == 2:
            return text + dice.choice(["", "\n", " "]) + dice.choice(cases).text
        parts = (*PARTS, *markers_of(family))
        if how == 3:
            return "".join(dice.choices(parts, k=dice.randint(1, 25)))
        letters = list(text)
        for _ in range(dice.randint(1, 6)):
            at = dice.randrange(len(letters) + 1)
            letters[at : at + dice.randint(0, 12)] = dice.choice(parts)
        return "".join(letters)

    def _faults(self, family: str, kind: str, text: str, reason: str) -> Iterator[str]:
        tokenizer, speech = self._models[family, kind]
        sizes = [[10**6], [1], [self.dice.randint(1, 9) for _ in range(50)]]
        found = [self._read(tokenizer, speech, text, (each, reason)) for each in sizes]
        first, events = found[0]
        if any(read_of(answer) != read_of(first) for answer, _ in found[1:]):
            yield "pieces are read otherwise"
        for answer, each in found:
            if _joined(each) != read_of(answer)[:2]:
                yield "events are not the answer"
        self.num_calls += len(first.calls)
        yield from _wrong_arguments(first, events)
        if not first.calls and not any(header in text for header in HEADERS):
            markers = markers_of(family)
            if _letters(text, markers) - _letters(first.thinking + first.content, markers):
                yield "letters are lost"

    def _read(
        self, tokenizer: Tokenizer, speech: ChatFormat, text: str, how: tuple[list[int], str]
    ) -> tuple[ParsedAnswer, list[Event]]:
        assert self._tools is not None
        completions = pieces(tokenizer, text, itertools.cycle(how[0]), how[1])
        return play(speech, completions, self._tools.read_as)


def _joined(events: list[Event]) -> tuple[str, str]:
    content = "".join(event.text for event in events if isinstance(event, Text))
    thinking = "".join(event.text for event in events if isinstance(event, Thinking))
    return content, thinking


def _wrong_arguments(answer: ParsedAnswer, events: list[Event]) -> Iterator[str]:
    """Only the last call may break off."""
    names = {tool["function"]["name"] for tool in TOOLS}
    if len([event for event in events if isinstance(event, CallBegin)]) != len(answer.calls):
        yield "calls are not events"
    joined = "".join(event.text for event in events if isinstance(event, CallArguments))
    if joined != "".join(call.arguments for call in answer.calls):
        yield "arguments are not events"
    has_end = bool(events) and CallEnd() in events[_last_begin(events) :]
    for call in answer.calls:
        if call.name not in names:
            yield f"a call of {call.name}"
        try:
            is_object = isinstance(json.loads(call.arguments), dict)
        except ValueError:
            is_object = call is answer.calls[-1] and not has_end
        if not is_object:
            yield f"arguments {call.arguments}"


def _last_begin(events: list[Event]) -> int:
    return max((n for n, each in enumerate(events) if isinstance(each, CallBegin)), default=0)


def _letters(text: str, markers: tuple[str, ...]) -> Counter[str]:
    for marker in ("<think>", "</think>", "[THINK]", "[/THINK]", *markers):
        text = text.replace(marker, " ")
    return Counter(char for char in text if char.isalnum())

"""An answer, in pieces of some tokens, through a reader or through one of the APIs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

from engine.messages.requests import CompletionOutput, RequestOutput
from engine.messages.structured import NO_RULES
from engine.server.answers import HttpAnswer
from engine.server.speech.answer import ParsedAnswer
from engine.server.speech.events import Event
from engine.server.speech.turns import ChatFormat
from engine.text.tokenizer import Tokenizer

PROMPT = {"prompt": "", "prompt_token_ids": [5]}


class Read(NamedTuple):
    """What an answer is read as; calls: names and the text of arguments."""

    content: str
    thinking: str
    calls: list[tuple[str, str]]


def pieces(
    tokenizer: Tokenizer, text: str, sizes: Iterator[int], reason: str
) -> Iterator[CompletionOutput]:
    """What an engine would bring for it, so many tokens at a time."""
    ids = tokenizer.encode(text)
    step = tokenizer.backend.stream([], False)
    at, is_last = 0, False
    while not is_last:
        size = next(sizes)
        part, at = ids[at : at + size], at + size
        is_last = at >= len(ids)
        new = "".join(step([each]) or "" for each in part)
        yield CompletionOutput(0, new, part, None, finish_reason=reason if is_last else None)


def play(
    speech: ChatFormat, completions: Iterator[CompletionOutput], tools: Any
) -> tuple[ParsedAnswer, list[Event]]:
    answer = speech.begin(PROMPT, tools=tools, skip_special=True)
    events = [event for each in completions for event in answer.read(each)]
    return answer, events


def read_of(answer: ParsedAnswer) -> Read:
    calls = [(call.name, call.arguments) for call in answer.calls]
    return Read(answer.content, answer.thinking, calls)


class FakeEngine:
    """An engine that brings an answer."""

    def __init__(self, tokenizer: Tokenizer, completions: Iterator[CompletionOutput]) -> None:
        self.tokenizer = tokenizer
        self.recommended: dict[str, Any] = {}
        self.object_rules = NO_RULES
        self.max_model_len = 4096
        self._completions = completions

    def each(self) -> Iterator[RequestOutput]:
        for completion in self._completions:
            is_last = completion.finish_reason is not None
            yield RequestOutput("r", None, [5], [completion], is_last)

    async def outputs(self) -> AsyncIterator[RequestOutput]:
        for output in self.each():
            yield output

    async def open(self, *_: Any, **__: Any) -> FakeEngine:
        return self


class FakeModel:
    """A model whose conversations are all one prompt."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine

    async def render(self, *_: Any, **__: Any) -> Any:
        return PROMPT


async def whole(answer: HttpAnswer) -> Any:
    return json.loads(await answer.whole())


async def streamed(answer: HttpAnswer, engine: FakeEngine) -> list[Any]:
    """The events of an answer."""
    await answer.open()
    body = b"".join([*map(answer.events_of, engine.each()), answer.end()])
    return events_in(body)


def events_in(body: bytes) -> list[Any]:
    """The events of a stream."""
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n")]
    return [json.loads(line) for line in lines if line.startswith("{")]

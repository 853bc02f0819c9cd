"""Answers to conversations: ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Container
from contextlib import aclosing
from typing import Any

import msgspec

from engine.frontend.streams import Reader
from engine.messages.requests import CompletionOutput, RequestOutput
from engine.server.answers import TEXT, Frame, OpenAIAnswer, reason_of
from engine.server.asked import ChatRequest
from engine.server.dialogue import Dialogue, Said, Voice
from engine.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from engine.server.speech.answer import AnswerReader
from engine.server.speech.custom import InputReader, input_of
from engine.server.speech.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Event,
    Text,
    Thinking,
    ToolCall,
)


class Choice:
    """One sequence of an answer that is told whole."""

    def __init__(self) -> None:
        self.logprobs: list[dict[str, Any]] | None = None
        self.token_ids: list[int] = []
        self.last: Said

    def add(self, said: Said, logprobs: dict[str, Any] | None) -> None:
        self.last = said
        self.token_ids += said.completion.token_ids
        if logprobs is not None:
            self.logprobs = (self.logprobs or []) + logprobs["content"]


class Chat(OpenAIAnswer):
    """One request for an answer, or for ``n``."""

    def __init__(self, voice: Voice, asked: ChatRequest, name: str) -> None:
        """name: of the model. Raises ``RequestError`` or ``ApiError`` for what cannot be asked."""
        kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        super().__init__(asked, kind, "chatcmpl", name)
        if asked.web_search_options is not None:
            self.left_out = ("web_search",)
        self._has_logprobs = bool(asked.logprobs)
        self._num_logprobs = asked.top_logprobs or 0
        self._has_thinking = asked.include_reasoning
        self._token_names = TokenNames(voice.tokenizer)
        self._dialogue = Dialogue(voice, asked)
        self._has_begun = False
        self._inputs: dict[int, dict[int, InputReader]] = {}  # of custom tools, by sequence
        self._num_calls: dict[int, int] = {}  # that were told, by sequence
        self._text_frame: Frame | None = None

    async def whole(self) -> bytes:
        choices: dict[int, Choice] = {}
        async with aclosing((await self.open()).outputs()) as outputs:
            async for output in outputs:
                for said in self._dialogue.read(output):
                    self._count(said)
                    choice = choices.setdefault(said.completion.index, Choice())
                    choice.add(said, self._logprobs(said))
        told = [self._whole_choice(choices[index]) for index in sorted(choices)]
        return self._told(told, has_usage=True)

    async def open(self) -> Reader:
        if not self._has_logprobs:
            choice = b'{"index":0,"delta":{"content":' + TEXT + b'},"logprobs":null'
            self._text_frame = self._frame(choice)
        return await self._dialogue.open(self.name)

    def events_of(self, output: RequestOutput) -> bytes:
        return b"".join([self._events_of(said) for said in self._dialogue.read(output)])

    def _events_of(self, said: Said) -> bytes:
        self._count(said)
        index, events, frame = said.completion.index, said.events, self._text_frame
        is_plain = frame is not None and index in self._num_calls and not said.output.finished
        if is_plain and len(events) == 1 and isinstance(events[0], Text):
            assert frame is not None
            return frame.before + msgspec.json.encode(events[0].text) + frame.behind
        delta = self._delta(said, self._num_calls.get(index, 0))
        if index not in self._num_calls:
            delta = {"role": "assistant", "content": "", **delta}
        self._num_calls[index] = len(said.turn.calls)
        token_ids = said.completion.token_ids
        choice = self._ended(said, {"delta": delta}, self._logprobs(said), token_ids)
        if delta or choice["finish_reason"] or choice["logprobs"] or "token_ids" in choice:
            return self._chunk([choice])
        return b""

    def _count(self, said: Said) -> None:
        self._counted.add(0, said.output, [said.completion])
        self._counted.thinking = self._dialogue.num_thinking_tokens
        if self._has_begun:
            return
        self._has_begun = True
        if self.asked.return_token_ids:
            self.beside["prompt_token_ids"] = said.output.prompt_token_ids
        if self.asked.prompt_logprobs is not None:
            self.beside["prompt_logprobs"] = prompt_logprobs(said.output.prompt_logprobs)

    def _logprobs(self, said: Said) -> dict[str, Any] | None:
        return chat_logprobs(said.completion, self._num_logprobs, self._token_names)

    def _delta(self, said: Said, num_calls: int) -> dict[str, Any]:
        """num_calls: those that began before."""
        content = "".join(e.text for e in said.events if isinstance(e, Text))
        thinking = "".join(e.text for e in said.events if isinstance(e, Thinking))
        delta: dict[str, Any] = {"content": content} if content else {}
        if thinking and self._has_thinking:
            delta |= told_thinking(thinking)
        readers = self._inputs.setdefault(said.completion.index, {})
        calls = call_deltas(said.events, num_calls, self._dialogue.custom_tools, readers)
        if calls:
            delta["tool_calls"] = calls
        return delta

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        turn = choice.last.turn
        message: dict[str, Any] = {
            "role": "assistant",
            "content": turn.content if turn.content or not turn.calls else None,
            "refusal": None,
        }
        if turn.thinking and self._has_thinking:
            message |= told_thinking(turn.thinking)
        if turn.calls:
            message["tool_calls"] = [
                whole_call(call, self._dialogue.custom_tools) for call in turn.calls
            ]
        logprobs = None
        if choice.logprobs is not None:
            logprobs = {"content": choice.logprobs, "refusal": None}
        return self._ended(choice.last, {"message": message}, logprobs, choice.token_ids)

    def _ended(
        self,
        said: Said,
        told: dict[str, Any],
        logprobs: dict[str, Any] | None,
        token_ids: list[int],
    ) -> dict[str, Any]:
        """With what is told of each choice."""
        completion = said.completion
        choice = {
            "index": completion.index,
            **told,
            "logprobs": logprobs,
            "finish_reason": chat_reason(completion, said.turn),
            "stop_reason": completion.stop_reason,
        }
        if self.asked.return_token_ids:
            choice["token_ids"] = token_ids
        return choice


def chat_reason(completion: CompletionOutput, turn: AnswerReader) -> str | None:
    """Why the answer has ended. Raises ``ApiError`` for an end that is no answer."""
    reason = reason_of(completion)
    return "tool_calls" if reason == "stop" and turn.calls else reason


def told_thinking(thinking: str) -> dict[str, str]:
    """Under the two names that clients know."""
    return {"reasoning": thinking, "reasoning_content": thinking}


def whole_call(call: ToolCall, custom: Container[str]) -> dict[str, Any]:
    """A tool call of a whole answer; custom: tools whose input is a text."""
    if call.name in custom:
        about = {"name": call.name, "input": input_of(call.arguments)}
        return {"id": call.id, "type": "custom", "custom": about}
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def call_deltas(
    events: list[Event], num_calls: int, custom: Container[str], readers: dict[int, InputReader]
) -> list[dict[str, Any]]:
    """What is new of tool calls, an entry for each.

    num_calls: those that began before; custom: tools whose input is a text; readers: of the inputs,
    by number of the call.
    """
    deltas: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, CallBegin):
            kind, field = ("custom", "input") if event.name in custom else FUNCTION
            about = {"name": event.name, field: ""}
            new = {"index": num_calls, "id": event.id, "type": kind, kind: about}
            deltas[num_calls] = new
            if event.name in custom:
                readers[num_calls] = InputReader()
            num_calls += 1
        elif isinstance(event, CallArguments | CallEnd):
            at = num_calls - 1
            text, (kind, field) = _more_of_call(event, readers.get(at))
            if text:
                delta = deltas.setdefault(at, {"index": at, kind: {field: ""}})
                delta[kind][field] += text
    return list(deltas.values())


FUNCTION = ("function", "arguments")


def _more_of_call(
    event: CallArguments | CallEnd, reader: InputReader | None
) -> tuple[str, tuple[str, str]]:
    """The text that a piece of a call's arguments brings, and where it goes."""
    if reader is None:
        return (event.text if isinstance(event, CallArguments) else ""), FUNCTION
    text = reader.feed(event.text) if isinstance(event, CallArguments) else reader.end()
    return text, ("custom", "input")

"""Chat completions: ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Container
from contextlib import aclosing
from typing import Any

import msgspec

from engine.frontend.streams import OutputReader
from engine.messages.requests import CompletionOutput, RequestOutput
from engine.server.answers import TEXT, Frame, OpenAIAnswer, reason_of
from engine.server.bodies import ChatRequest
from engine.server.dialogue import AnswerPiece, ChatGeneration, LoadedChatModel
from engine.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from engine.server.speech.answer import ParsedAnswer
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


class ChatChoice:
    """Collects one choice of an answer that is not streamed."""

    def __init__(self) -> None:
        self.logprobs: list[dict[str, Any]] | None = None
        self.token_ids: list[int] = []
        self.last: AnswerPiece

    def add(self, piece: AnswerPiece, logprobs: dict[str, Any] | None) -> None:
        self.last = piece
        self.token_ids += piece.completion.token_ids
        if logprobs is not None:
            self.logprobs = (self.logprobs or []) + logprobs["content"]


class Chat(OpenAIAnswer):
    """One chat completion with ``n`` choices."""

    def __init__(self, loaded: LoadedChatModel, body: ChatRequest, name: str) -> None:
        """name: the model's name. Raises ``RequestError`` or ``ApiError`` for a field whose value
        is not supported."""
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(body, kind, "chatcmpl", name)
        if body.web_search_options is not None:
            self.left_out = ("web_search",)
        self._has_logprobs = bool(body.logprobs)
        self._num_logprobs = body.top_logprobs or 0
        self._has_thinking = body.include_reasoning
        self._token_names = TokenNames(loaded.tokenizer)
        self._generation = ChatGeneration(loaded, body)
        self._has_begun = False
        self._inputs: dict[int, dict[int, InputReader]] = {}  # custom tools, by sequence and call
        self._num_calls: dict[int, int] = {}  # tool calls that were sent, by sequence
        self._text_frame: Frame | None = None

    async def whole(self) -> bytes:
        choices: dict[int, ChatChoice] = {}
        async with aclosing((await self.open()).outputs()) as outputs:
            async for output in outputs:
                for piece in self._generation.read(output):
                    self._count(piece)
                    choice = choices.setdefault(piece.completion.index, ChatChoice())
                    choice.add(piece, self._logprobs(piece))
        encoded = [self._whole_choice(choices[index]) for index in sorted(choices)]
        return self._encoded(encoded, has_usage=True)

    async def open(self) -> OutputReader:
        if not self._has_logprobs:
            choice = b'{"index":0,"delta":{"content":' + TEXT + b'},"logprobs":null'
            self._text_frame = self._frame(choice)
        return await self._generation.open(self.name)

    def events_of(self, output: RequestOutput) -> bytes:
        return b"".join([self._events_of(piece) for piece in self._generation.read(output)])

    def _events_of(self, piece: AnswerPiece) -> bytes:
        self._count(piece)
        index, events, frame = piece.completion.index, piece.events, self._text_frame
        is_plain = frame is not None and index in self._num_calls and not piece.output.finished
        if is_plain and len(events) == 1 and isinstance(events[0], Text):
            assert frame is not None
            return frame.before + msgspec.json.encode(events[0].text) + frame.after
        delta = self._delta(piece, self._num_calls.get(index, 0))
        if index not in self._num_calls:
            delta = {"role": "assistant", "content": "", **delta}
        self._num_calls[index] = len(piece.turn.calls)
        token_ids = piece.completion.token_ids
        choice = self._ended(piece, {"delta": delta}, self._logprobs(piece), token_ids)
        if delta or choice["finish_reason"] or choice["logprobs"] or "token_ids" in choice:
            return self._chunk([choice])
        return b""

    def _count(self, piece: AnswerPiece) -> None:
        self._counted.add(0, piece.output, [piece.completion])
        self._counted.thinking = self._generation.num_thinking_tokens
        self._note_transfer(piece.output)
        if self._has_begun:
            return
        self._has_begun = True
        if self.body.return_token_ids:
            self.extra["prompt_token_ids"] = piece.output.prompt_token_ids
        if self.body.prompt_logprobs is not None:
            self.extra["prompt_logprobs"] = prompt_logprobs(piece.output.prompt_logprobs)

    def _logprobs(self, piece: AnswerPiece) -> dict[str, Any] | None:
        return chat_logprobs(piece.completion, self._num_logprobs, self._token_names)

    def _delta(self, piece: AnswerPiece, num_calls: int) -> dict[str, Any]:
        """The streamed delta of a piece. num_calls: calls begun by this choice's earlier pieces."""
        content = "".join(e.text for e in piece.events if isinstance(e, Text))
        thinking = "".join(e.text for e in piece.events if isinstance(e, Thinking))
        delta: dict[str, Any] = {"content": content} if content else {}
        if thinking and self._has_thinking:
            delta |= thinking_fields(thinking)
        readers = self._inputs.setdefault(piece.completion.index, {})
        calls = call_deltas(piece.events, num_calls, self._generation.custom_tools, readers)
        if calls:
            delta["tool_calls"] = calls
        return delta

    def _whole_choice(self, choice: ChatChoice) -> dict[str, Any]:
        turn = choice.last.turn
        message: dict[str, Any] = {
            "role": "assistant",
            "content": turn.content if turn.content or not turn.calls else None,
            "refusal": None,
        }
        if turn.thinking and self._has_thinking:
            message |= thinking_fields(turn.thinking)
        if turn.calls:
            message["tool_calls"] = [
                whole_call(call, self._generation.custom_tools) for call in turn.calls
            ]
        logprobs = None
        if choice.logprobs is not None:
            logprobs = {"content": choice.logprobs, "refusal": None}
        return self._ended(choice.last, {"message": message}, logprobs, choice.token_ids)

    def _ended(
        self,
        piece: AnswerPiece,
        content: dict[str, Any],
        logprobs: dict[str, Any] | None,
        token_ids: list[int],
    ) -> dict[str, Any]:
        """Return ``content`` (a message or delta) with what every choice has, e.g. its index."""
        completion = piece.completion
        choice = {
            "index": completion.index,
            **content,
            "logprobs": logprobs,
            "finish_reason": chat_reason(completion, piece.turn),
            "stop_reason": completion.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = token_ids
        return choice


def chat_reason(completion: CompletionOutput, turn: ParsedAnswer) -> str | None:
    """The finish reason of a choice; ``None`` while running. Raises ``ApiError`` for an error."""
    reason = reason_of(completion)
    return "tool_calls" if reason == "stop" and turn.calls else reason


def thinking_fields(thinking: str) -> dict[str, str]:
    """The thinking under two names, since clients read one or the other."""
    return {"reasoning": thinking, "reasoning_content": thinking}


def whole_call(call: ToolCall, custom: Container[str]) -> dict[str, Any]:
    """A tool call of a complete answer. custom: names of tools whose input is plain text."""
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
    """Return the streamed deltas of tool calls, one for each call that ``events`` change.

    num_calls: number of calls that began earlier; custom: names of tools with plain text as input;
    readers: decoders of such inputs by index of the call, to which those of new calls are added."""
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
    """Return the text that an event adds to a tool call, and the (type, field) of the delta that
    must contain it."""
    if reader is None:
        return (event.text if isinstance(event, CallArguments) else ""), FUNCTION
    text = reader.feed(event.text) if isinstance(event, CallArguments) else reader.end()
    return text, ("custom", "input")

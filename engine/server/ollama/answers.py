"""Answers of ``POST /api/chat`` and ``POST /api/generate``: one JSON object, or one a line."""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, ClassVar

import msgspec

from engine.frontend.streams import OutputReader
from engine.messages.requests import RequestMetrics, RequestOutput
from engine.server.answers import OURS, HttpAnswer, reason_of
from engine.server.blame import with_client_names
from engine.server.dialogue import AnswerPiece, ChatGeneration, LoadedChatModel
from engine.server.errors import ApiError, as_api_error, field_error
from engine.server.logprobs import TokenNames, chat_logprobs
from engine.server.ollama.bodies import (
    ChatBody,
    GenerateBody,
    GeneratingBody,
    chat_of,
    chat_of_prompt,
)
from engine.server.ollama.generation import (
    ContinuedGeneration,
    Generation,
    RawGeneration,
    fitted,
)
from engine.server.ollama.options import context_of
from engine.server.speech.events import CallEnd, Text, Thinking, ToolCall
from engine.server.speech.json_text import object_in

Json = dict[str, Any]
NANOSECONDS = 1_000_000_000
CHAT, GENERATE = "chat", "gen"


class OllamaAnswer(HttpAnswer):
    """The answer to one request for text, complete or streamed."""

    stream_type: ClassVar[bytes] = b"application/x-ndjson"

    def __init__(
        self,
        loaded: LoadedChatModel,
        body: GeneratingBody,
        name: str,
        generation: Generation,
        prefix: str,
    ) -> None:
        """name: the model's name, as the client has it; prefix: begins the id of the engine's
        request. Raises ``ApiError`` if the model cannot think and has to."""
        if body.think and loaded.chat_format.parser_factory(has_tools=False) is None:
            raise field_error(
                "think", f"is {body.think!r}, but {name} does not think: set it to false"
            )
        self._body = body
        self._generation = generation
        self._model = name
        self._name = f"{prefix}-{uuid.uuid4().hex}"
        self._prefix = prefix
        self._token_names = TokenNames(loaded.tokenizer)
        self._most = most_of(loaded, body)
        self._began = time.monotonic()
        self._num_calls = 0  # that have ended, and so were or will be sent
        self._num_tokens = 0

    def set_request_id(self, request_id: str) -> None:
        self._name = f"{self._prefix}-{request_id}{OURS}{uuid.uuid4().hex[:12]}"

    async def whole(self) -> bytes:
        logprobs: list[Json] = []
        async with aclosing((await self.open()).outputs()) as outputs:
            async for output in outputs:
                for piece in self._generation.read(output):
                    last = piece
                    logprobs += self._read(piece)
        turn = last.turn
        calls = [_call(at, turn.calls[at]) for at in range(self._num_calls)]
        content = self._content(turn.content, turn.thinking, calls)
        more = {"logprobs": logprobs} if logprobs else {}
        return msgspec.json.encode({**head_of(self._model), **content, **more, **self._end(last)})

    async def open(self) -> OutputReader:
        if not self._body.truncate:
            ids = await self._generation.token_ids()
            if len(ids) > self._most:
                most = f"at most {self._most} leave room for an answer"
                raise too_long(f"the prompt has {len(ids)} tokens, {most}")
        return await self._generation.open(self._name)

    def events_of(self, output: RequestOutput) -> bytes:
        return b"".join([self._lines(piece) for piece in self._generation.read(output)])

    def end(self) -> bytes:
        return b""

    def failure(self, error: BaseException) -> bytes:
        return _line(with_client_names(self._body, as_api_error(error)).ollama())

    @abstractmethod
    def _content(self, text: str, thinking: str, calls: list[Json]) -> Json:
        """The fields of a part of the answer, or of the whole."""

    def _after(self, piece: AnswerPiece) -> Json:
        """Fields of the last line only."""
        return {}

    def _read(self, piece: AnswerPiece) -> list[Json]:
        """Count the tokens and calls of a piece, and return its log-probabilities."""
        self._num_tokens += len(piece.completion.token_ids)
        self._num_calls += sum(isinstance(event, CallEnd) for event in piece.events)
        if piece.completion.finish_reason is not None:  # the last call may be cut off
            self._num_calls = len(piece.turn.calls)
        num = self._body.top_logprobs or 0
        found = chat_logprobs(piece.completion, num, self._token_names)
        return [] if found is None else found["content"]

    def _lines(self, piece: AnswerPiece) -> bytes:
        before = self._num_calls
        logprobs = self._read(piece)
        calls = [_call(at, piece.turn.calls[at]) for at in range(before, self._num_calls)]
        text = "".join(event.text for event in piece.events if isinstance(event, Text))
        thinking = "".join(event.text for event in piece.events if isinstance(event, Thinking))
        lines = b""
        if text or thinking or calls or logprobs:
            more = {"logprobs": logprobs} if logprobs else {}
            content = self._content(text, thinking, calls)
            lines = _line({**head_of(self._model), **content, "done": False, **more})
        if piece.completion.finish_reason is None:
            return lines
        end = self._end(piece)  # raises if the generation ended with an error
        return lines + _line({**head_of(self._model), **self._content("", "", []), **end})

    def _end(self, piece: AnswerPiece) -> Json:
        reason = reason_of(piece.completion)
        times = _durations(piece.output.metrics)
        return {
            "done": True,
            "done_reason": reason,
            **self._after(piece),
            "total_duration": _nanoseconds(time.monotonic() - self._began),
            "load_duration": 0,
            "prompt_eval_count": len(piece.output.prompt_token_ids),
            "prompt_eval_duration": times[0],
            "eval_count": self._num_tokens,
            "eval_duration": times[1],
        }


class ChatAnswer(OllamaAnswer):
    """The answer to a conversation."""

    def __init__(self, loaded: LoadedChatModel, body: ChatBody, name: str) -> None:
        """name: the model's name, as the client has it. Raises ``RequestError`` or ``ApiError`` for
        an unsupported value of a field."""
        self._chat = chat_of(body, most_of(loaded, body))
        self._whole = ChatGeneration(loaded, self._chat)
        self._loaded = loaded
        super().__init__(loaded, body, name, self._whole, CHAT)

    async def open(self) -> OutputReader:
        if self._body.truncate:
            self._generation = await fitted(self._loaded, self._chat, self._whole, self._most)
        return await super().open()

    def _content(self, text: str, thinking: str, calls: list[Json]) -> Json:
        message: Json = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class GenerateAnswer(OllamaAnswer):
    """The answer to one prompt."""

    def __init__(self, loaded: LoadedChatModel, body: GenerateBody, name: str) -> None:
        """name: the model's name, as the client has it. Raises ``RequestError`` or ``ApiError`` for
        an unsupported value of a field."""
        chat = chat_of_prompt(body, most_of(loaded, body))
        generation: Generation
        if body.raw:
            generation = RawGeneration(loaded, chat, body.prompt)
        else:
            generation = ContinuedGeneration(loaded, chat, body.context or [])
        super().__init__(loaded, body, name, generation, GENERATE)
        self._is_raw = body.raw
        self._written: list[int] = []

    def _read(self, piece: AnswerPiece) -> list[Json]:
        self._written += piece.completion.token_ids
        return super()._read(piece)

    def _content(self, text: str, thinking: str, calls: list[Json]) -> Json:
        return {"response": text, **({"thinking": thinking} if thinking else {})}

    def _after(self, piece: AnswerPiece) -> Json:
        if self._is_raw:
            return {}
        return {"context": [*piece.output.prompt_token_ids, *self._written]}


def most_of(loaded: LoadedChatModel, body: GeneratingBody) -> int:
    """The most tokens of the prompt of a request. Raises ``ApiError``."""
    return context_of(body.values, loaded.model.engine.max_model_len) - 1


def too_long(why: str) -> ApiError:
    """The error for a text that may not be cut, in Ollama's words."""
    return ApiError(
        400,
        f"the input length exceeds the context length: {why}; shorten it, leave out truncate, or "
        "raise options.num_ctx or --max-model-len of the server",
        code="context_length_exceeded",
    )


def head_of(model: str) -> Json:
    """The fields with which every object begins."""
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    return {"model": model, "created_at": now.replace("+00:00", "Z")}


def _call(index: int, call: ToolCall) -> Json:
    about = {"index": index, "name": call.name, "arguments": object_in(call.arguments)}
    return {"id": call.id, "function": about}


def _durations(metrics: RequestMetrics | None) -> tuple[int, int]:
    """Nanoseconds of computing the prompt, and of the answer after its first token; at least 1,
    since clients divide by them."""
    if metrics is None or metrics.first_token_time is None:
        return 1, 1
    first = metrics.first_token_time
    begin, end = metrics.scheduled_time or metrics.arrival_time, metrics.last_token_time or first
    return _nanoseconds(first - begin), _nanoseconds(end - first)


def _nanoseconds(seconds: float) -> int:
    return max(1, round(seconds * NANOSECONDS))


def _line(value: Json) -> bytes:
    return msgspec.json.encode(value) + b"\n"

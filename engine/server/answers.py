"""What clients get: whole answers, and chunks of them."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from engine.frontend.streams import Reader
from engine.messages.requests import CompletionOutput, RequestOutput, code_of
from engine.server.blame import in_words_of
from engine.server.bodies import RequestBody
from engine.server.errors import as_api_error, error_of_end
from engine.server.streams import DONE, event_of

TEXT = b"<text>"
OURS = "~"  # in the engine's name of a request, before what makes it differ from all others


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Tokens that were read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TokenCounter:
    """Tokens of one answer, of all its prompts and sequences."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}  # tokens, and those that were cached
        self.num_written = 0
        self.thinking = 0  # of those that were written

    def add(
        self, place: int, output: RequestOutput, completions: Sequence[CompletionOutput]
    ) -> None:
        """place: that of the prompt; completions: the output's that were not counted yet."""
        self._prompts[place] = (len(output.prompt_token_ids), output.num_cached_tokens)
        self.num_written += sum(len(each.token_ids) for each in completions)

    @property
    def usage(self) -> Usage:
        read = sum(num for num, _ in self._prompts.values())
        cached = sum(num for _, num in self._prompts.values())
        total = read + self.num_written
        details = CompletionDetails(self.thinking)
        return Usage(read, self.num_written, total, PromptDetails(cached), details)


class Frame(NamedTuple):
    """A chunk, as bytes, around the text of a delta."""

    before: bytes
    after: bytes


class Answer(ABC):
    """One request to the server, whole or as events."""

    left_out: tuple[str, ...] = ()
    """Kinds of tools that a server would have to run, which the model does not see."""

    def tell_as(self, request_id: str) -> None:  # noqa: B027  (most have names of their own)
        """The name that the client knows the request by: its own, which others may have too."""

    @abstractmethod
    async def whole(self) -> bytes:
        """The answer, when all of it is there."""

    @abstractmethod
    async def open(self) -> Reader:
        """Ask the engine; of an answer that is one request to it."""

    @abstractmethod
    def events_of(self, output: RequestOutput) -> bytes:
        """What is new. Raises ``ApiError`` for an end that is no answer."""

    @abstractmethod
    def end(self) -> bytes:
        """What is sent after all events."""

    @abstractmethod
    def failure(self, error: BaseException) -> bytes:
        """The end of an answer that failed after it had begun."""


class OpenAIAnswer(Answer):
    """Answers in the form of OpenAI's completions and chat completions."""

    def __init__(self, body: RequestBody, kind: str, prefix: str, model: str) -> None:
        self.body = body
        self.name = f"{prefix}-{uuid.uuid4().hex}"
        """Tokens and requests of the engine, counted."""
        self.extra: dict[str, Any] = {}
        """What the next answer or chunk has in addition to its choices."""
        self._prefix = prefix
        self._counted = TokenCounter()
        self._head: dict[str, Any] = {
            "id": self.name,
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def tell_as(self, request_id: str) -> None:
        self._head["id"] = f"{self._prefix}-{request_id}"
        self.name = f"{self._head['id']}{OURS}{uuid.uuid4().hex[:12]}"

    def end(self) -> bytes:
        options = self.body.stream_options
        is_wanted = options is not None and options.include_usage
        usage = event_of(self._encoded([], has_usage=True)) if is_wanted else b""
        return usage + DONE

    def failure(self, error: BaseException) -> bytes:
        return event_of(in_words_of(self.body, as_api_error(error)).body()) + DONE

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        options = self.body.stream_options
        is_counting = options is not None and options.continuous_usage_stats
        return event_of(self._encoded(choices, has_usage=is_counting))

    def _encoded(self, choices: list[dict[str, Any]], *, has_usage: bool) -> bytes:
        extra, self.extra = self.extra, {}
        if has_usage:
            extra["usage"] = self._counted.usage
        return msgspec.json.encode({**self._head, "choices": choices, **extra})

    def _frame(self, choice: bytes) -> Frame | None:
        """The frame of a choice in which ``TEXT`` stands for the text; ``None`` if a chunk has more
        to tell that differs."""
        body, options = self.body, self.body.stream_options
        is_counting = options is not None and options.continuous_usage_stats
        if body.n != 1 or body.return_token_ids or is_counting:
            return None
        head = msgspec.json.encode({**self._head, "choices": []})
        before, after = choice.split(TEXT)
        ends = b',"finish_reason":null,"stop_reason":null}]}'
        return Frame(b"data: " + head[:-2] + before, after + ends + b"\n\n")


def reason_of(completion: CompletionOutput) -> str | None:
    """Why the text has ended. Raises ``ApiError`` for an end that is no answer."""
    reason = completion.finish_reason
    code = None if reason is None else code_of(reason, completion.code)
    if code is None:
        return reason
    raise error_of_end(code, completion.error)

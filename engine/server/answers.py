"""What clients are told: whole answers, and chunks of them."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from engine.messages.requests import CompletionOutput, RequestOutput
from engine.messages.structured import WRONG_GRAMMAR
from engine.server.asked import Asked
from engine.server.errors import ApiError, as_api_error
from engine.server.streams import DONE, event_of

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


class Counted:
    """Tokens of one answer, of all its prompts and sequences."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}  # tokens, and those that were cached
        self._written = 0
        self.thinking = 0  # of those that were written

    def add(
        self, place: int, output: RequestOutput, completions: Sequence[CompletionOutput]
    ) -> None:
        """place: of the prompt; completions: those of the output that were not counted yet."""
        self._prompts[place] = (len(output.prompt_token_ids), output.num_cached_tokens)
        self._written += sum(len(each.token_ids) for each in completions)

    @property
    def usage(self) -> Usage:
        read = sum(num for num, _ in self._prompts.values())
        cached = sum(num for _, num in self._prompts.values())
        total = read + self._written
        details = CompletionDetails(self.thinking)
        return Usage(read, self._written, total, PromptDetails(cached), details)


class Answer(ABC):
    """One request to the server, whole or as events."""

    def tell_as(self, request_id: str) -> None:  # noqa: B027  (most have names of their own)
        """The name that the client knows the request by: its own, which others may have too."""

    @abstractmethod
    async def whole(self) -> bytes:
        """The answer, when all of it is there."""

    @abstractmethod
    def events(self) -> AsyncGenerator[bytes, None]:
        """Its parts as they come. An error before the first is raised; a later one is an event."""


class OpenAIAnswer(Answer):
    """As completions and chat completions are told."""

    def __init__(self, asked: Asked, kind: str, prefix: str, model: str) -> None:
        self.asked = asked
        self.name = f"{prefix}-{uuid.uuid4().hex}"
        """Of what is asked of the engine."""
        self.beside: dict[str, Any] = {}
        """What the next answer or chunk has beside its choices."""
        self._prefix = prefix
        self._counted = Counted()
        self._head: dict[str, Any] = {
            "id": self.name,
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def tell_as(self, request_id: str) -> None:
        self._head["id"] = f"{self._prefix}-{request_id}"
        self.name = f"{self._head['id']}{OURS}{uuid.uuid4().hex[:12]}"

    @abstractmethod
    def chunks(self) -> AsyncGenerator[bytes, None]:
        """As events, without the end."""

    async def events(self) -> AsyncGenerator[bytes, None]:
        options, is_begun = self.asked.stream_options, False
        try:
            async with aclosing(self.chunks()) as chunks:
                async for chunk in chunks:
                    is_begun = True
                    yield chunk
            if options is not None and options.include_usage:
                yield event_of(self._told([], has_usage=True))
        except Exception as error:
            if not is_begun:
                raise
            yield event_of(as_api_error(error).body())
        yield DONE

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        options = self.asked.stream_options
        is_counting = options is not None and options.continuous_usage_stats
        return event_of(self._told(choices, has_usage=is_counting))

    def _told(self, choices: list[dict[str, Any]], *, has_usage: bool) -> bytes:
        beside, self.beside = self.beside, {}
        if has_usage:
            beside["usage"] = self._counted.usage
        return msgspec.json.encode({**self._head, "choices": choices, **beside})


def reason_of(completion: CompletionOutput) -> str | None:
    """Why the text has ended. Raises ``ApiError`` for an end that is no answer."""
    reason = completion.finish_reason
    if reason in (None, "stop", "length"):
        return reason
    if reason == "deadline":
        raise ApiError(408, completion.error or "the time for this request is over")
    if reason == "abort":
        raise ApiError(503, "the request was aborted: the server is ending", code="aborted")
    error = completion.error or "the request failed"
    if error.startswith(WRONG_GRAMMAR):
        raise ApiError(400, error, code="invalid_grammar")
    raise ApiError(500, error, code="request_failed")

"""What clients are told: whole answers, and chunks of them."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from engine.messages.requests import CompletionOutput, RequestOutput
from engine.messages.structured import WRONG_GRAMMAR
from engine.server.asked import Asked
from engine.server.errors import ApiError, as_api_error
from engine.server.streams import DONE, event_of


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens that were read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Counted:
    """Tokens of one answer, of all its prompts and sequences."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}  # tokens, and those that were cached
        self._written = 0

    def add(self, place: int, output: RequestOutput) -> None:
        """place: of the prompt."""
        self._prompts[place] = (len(output.prompt_token_ids), output.num_cached_tokens)
        self._written += sum(len(each.token_ids) for each in output.outputs)

    @property
    def usage(self) -> Usage:
        read = sum(num for num, _ in self._prompts.values())
        cached = sum(num for _, num in self._prompts.values())
        return Usage(read, self._written, read + self._written, PromptDetails(cached))


class Answer(ABC):
    """One request to the server, whole or as events."""

    def __init__(self, asked: Asked, kind: str, prefix: str, model: str) -> None:
        self.asked = asked
        self.name = f"{prefix}-{uuid.uuid4().hex}"
        """Of what is asked of the engine."""
        self._prefix = prefix
        self._counted = Counted()
        self._head: dict[str, Any] = {
            "id": self.name,
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def tell_as(self, request_id: str) -> None:
        """The name that the client knows it by: its own, which others may have too."""
        self._head["id"] = f"{self._prefix}-{request_id}"

    @abstractmethod
    def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """What the engine says, and of which prompt."""

    @abstractmethod
    def choice(self, place: int, completion: CompletionOutput) -> dict[str, Any]:
        """One sequence, or what is new of it. Raises ``ApiError`` for an end that is no answer."""

    def beside(self) -> dict[str, Any]:
        """What the next answer or chunk has beside its choices."""
        return {}

    async def whole(self) -> bytes:
        """The answer, when all of it is there."""
        choices: list[dict[str, Any]] = []
        async with aclosing(self.outputs()) as outputs:
            async for place, output in outputs:
                choices += self._choices(place, output)
        choices.sort(key=lambda choice: choice["index"])
        answer = {**self._head, **self.beside(), "choices": choices, "usage": self._counted.usage}
        return msgspec.json.encode(answer)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Chunks as they come. An error before the first is raised; a later one is an event."""
        options, is_begun = self.asked.stream_options, False
        is_counting = options is not None and options.continuous_usage_stats
        try:
            async with aclosing(self.outputs()) as outputs:
                async for place, output in outputs:
                    chunk = self._chunk(self._choices(place, output), has_usage=is_counting)
                    is_begun = True
                    yield chunk
            if options is not None and options.include_usage:
                yield self._chunk([], has_usage=True)
        except Exception as error:
            if not is_begun:
                raise
            yield event_of(as_api_error(error).body())
        yield DONE

    def _choices(self, place: int, output: RequestOutput) -> list[dict[str, Any]]:
        self._counted.add(place, output)
        return [self._about(place, each) for each in output.outputs]

    def _about(self, place: int, completion: CompletionOutput) -> dict[str, Any]:
        choice = {
            "index": completion.index,
            "finish_reason": reason_of(completion),
            "stop_reason": completion.stop_reason,
            **self.choice(place, completion),
        }
        if self.asked.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def _chunk(self, choices: list[dict[str, Any]], *, has_usage: bool) -> bytes:
        chunk = {**self._head, **self.beside(), "choices": choices}
        if has_usage:
            chunk["usage"] = self._counted.usage
        return event_of(msgspec.json.encode(chunk))


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

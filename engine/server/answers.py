"""What clients are told: whole answers, and chunks of them."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec

from engine.async_engine import Reader
from engine.messages.requests import LOST_CORE, CompletionOutput, Logprob, RequestOutput
from engine.messages.structured import WRONG_GRAMMAR
from engine.server.asked import Asked
from engine.server.errors import ApiError, as_api_error
from engine.server.streams import DONE, event_of

TEXT = b"<text>"
LOST = "\ufffd"  # in the text of a token that is a part of a character


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
        self.num_written = 0

    def add(self, place: int, output: RequestOutput) -> None:
        """place: of the prompt."""
        self._prompts[place] = (len(output.prompt_token_ids), output.num_cached_tokens)
        self.num_written += sum(len(each.token_ids) for each in output.outputs)

    @property
    def usage(self) -> Usage:
        read = sum(num for num, _ in self._prompts.values())
        cached = sum(num for _, num in self._prompts.values())
        return Usage(read, self.num_written, read + self.num_written, PromptDetails(cached))


class Frame(NamedTuple):
    """A chunk, as bytes, around the text of a delta."""

    before: bytes
    behind: bytes


class Answer(ABC):
    """One request to the server, whole or as events."""

    frame: Frame | None = None
    """Of chunks that have no news but a text; ``None`` if there is none."""

    def __init__(self, asked: Asked, kind: str, prefix: str, model: str) -> None:
        self.asked = asked
        self.name = f"{prefix}-{uuid.uuid4().hex}"
        self._counted = Counted()
        self._head: dict[str, Any] = {
            "id": self.name,
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    async def open(self) -> Reader:
        """The one request that this is; only with a ``frame``."""
        raise NotImplementedError

    @abstractmethod
    def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """What the engine says, and of which prompt."""

    @abstractmethod
    def choice(self, place: int, completion: CompletionOutput) -> dict[str, Any]:
        """One sequence, or what is new of it. Raises ``ApiError`` for an end that is no answer."""

    async def whole(self) -> bytes:
        """The answer, when all of it is there."""
        choices: list[dict[str, Any]] = []
        async with aclosing(self.outputs()) as outputs:
            async for place, output in outputs:
                choices += self._choices(place, output)
        choices.sort(key=lambda choice: choice["index"])
        return msgspec.json.encode({**self._head, "choices": choices, "usage": self._counted.usage})

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

    def chunk(self, output: RequestOutput) -> bytes:
        """The event of an output. Raises ``ApiError`` for an end that is no answer."""
        return self._chunk(self._choices(0, output), has_usage=False)

    def last_chunk(self) -> bytes:
        """Behind all others: the usage, if it was asked for."""
        options = self.asked.stream_options
        is_asked = options is not None and options.include_usage
        return self._chunk([], has_usage=True) if is_asked else b""

    def add_tokens(self, num: int) -> None:
        """So many were told in another way."""
        self._counted.num_written += num

    def _frame(self, choice: bytes) -> Frame | None:
        """That of a choice in which ``TEXT`` stands for the text; ``None`` if a chunk has more to
        tell that differs."""
        asked, options = self.asked, self.asked.stream_options
        is_counting = options is not None and options.continuous_usage_stats
        if asked.n != 1 or asked.return_token_ids or is_counting:
            return None
        head = msgspec.json.encode({**self._head, "choices": []})
        before, behind = choice.split(TEXT)
        ends = b',"finish_reason":null,"stop_reason":null}]}'
        return Frame(b"data: " + head[:-2] + before, behind + ends + b"\n\n")

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
        chunk = {**self._head, "choices": choices}
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
    if error.startswith(LOST_CORE):
        raise ApiError(503, LOST_CORE, code="core_died", retry_after=1.0)
    raise ApiError(500, error, code="request_failed")


def bytes_of(text: str) -> list[int] | None:
    """Of a token's text; ``None`` if it is a part of a character."""
    return None if LOST in text else list(text.encode())


def chat_logprobs(completion: CompletionOutput, num: int) -> dict[str, Any] | None:
    """As chat completions have them, with the ``num`` most likely tokens."""
    if completion.logprobs is None:
        return None
    content = []
    for token, at in zip(completion.token_ids, completion.logprobs, strict=True):
        content.append(_entry(at[token]) | {"top_logprobs": [_entry(e) for e in _best(at, num)]})
    return {"content": content, "refusal": None}


def text_logprobs(completion: CompletionOutput, num: int, offset: int) -> dict[str, Any] | None:
    """As completions have them; offset: of the text among what was sent."""
    if completion.logprobs is None:
        return None
    tokens, chosen, top, offsets = [], [], [], []
    for token, at in zip(completion.token_ids, completion.logprobs, strict=True):
        text = at[token].decoded_token or ""
        tokens.append(text)
        chosen.append(_finite(at[token].logprob))
        top.append({e.decoded_token or "": _finite(e.logprob) for e in _best(at, num)})
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": tokens,
        "token_logprobs": chosen,
        "top_logprobs": top,
        "text_offset": offsets,
    }


def _entry(each: Logprob) -> dict[str, Any]:
    text = each.decoded_token or ""
    return {"token": text, "logprob": _finite(each.logprob), "bytes": bytes_of(text)}


def _best(at: dict[int, Logprob], num: int) -> list[Logprob]:
    return sorted(at.values(), key=lambda each: each.rank or 0)[:num]


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI says -9999 of what cannot be."""
    return max(logprob, -9999.0)

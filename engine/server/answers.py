"""Base classes of the answers to clients: complete, or streamed as chunks."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec

from engine.frontend.streams import OutputReader
from engine.messages.requests import CompletionOutput, RequestOutput, code_of
from engine.server.blame import with_client_names
from engine.server.bodies import RequestBody
from engine.server.errors import as_api_error, error_of_end
from engine.server.streams import DONE, EVENTS, event_of

TEXT = b"<text>"
OURS = "~"  # in the engine's request ids: separates the client's id from a random suffix


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Numbers of prompt and output tokens, in OpenAI's form."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TokenCounter:
    """Counts the tokens of one answer over all its prompts and sequences."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}  # number of tokens, and of cached tokens
        self.num_written = 0
        self.thinking = 0  # output tokens that were thinking

    def add(
        self, place: int, output: RequestOutput, completions: Sequence[CompletionOutput]
    ) -> None:
        """Count the tokens of a new output. place: index of its prompt; completions: the parts of
        its sequences that were not counted before."""
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
    """A streamed chunk, encoded once as JSON: the bytes before and after its text."""

    before: bytes
    after: bytes


class HttpAnswer(ABC):
    """The answer to one HTTP request, sent complete or as events while it is generated."""

    left_out: tuple[str, ...] = ()
    """Types of requested tools that the server would have to run; the prompt does not list them."""
    stream_type: ClassVar[bytes] = EVENTS
    """The media type of a streamed answer."""

    def set_request_id(self, request_id: str) -> None:  # noqa: B027  (most make their own ids)
        """Use the id of the HTTP request in the answer. The id need not be unique."""

    @abstractmethod
    async def whole(self) -> bytes:
        """Wait for the end of the generation and return the complete response body."""

    @abstractmethod
    async def open(self) -> OutputReader:
        """Add the request to the engine and return the reader of its outputs. Not for an answer
        that needs several engine requests."""

    @abstractmethod
    def events_of(self, output: RequestOutput) -> bytes:
        """The events for a new output. Raises ``ApiError`` if the generation failed."""

    @abstractmethod
    def end(self) -> bytes:
        """The bytes that are sent after all events."""

    @abstractmethod
    def failure(self, error: BaseException) -> bytes:
        """The last events of a stream that failed after it had begun."""


class OpenAIAnswer(HttpAnswer):
    """An answer in the form of OpenAI's completions and chat completions."""

    def __init__(self, body: RequestBody, kind: str, prefix: str, model: str) -> None:
        """kind: value of the answer's field ``object``; prefix: beginning of the answer's id."""
        self.body = body
        self.name = f"{prefix}-{uuid.uuid4().hex}"
        """Id of the engine's request; if there are several, the beginning of their ids."""
        self.extra: dict[str, Any] = {}
        """Fields of the next answer or chunk besides its choices."""
        self._prefix = prefix
        self._counted = TokenCounter()
        self._head: dict[str, Any] = {
            "id": self.name,
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def set_request_id(self, request_id: str) -> None:
        self._head["id"] = f"{self._prefix}-{request_id}"
        self.name = f"{self._head['id']}{OURS}{uuid.uuid4().hex[:12]}"

    def end(self) -> bytes:
        options = self.body.stream_options
        is_wanted = options is not None and options.include_usage
        usage = event_of(self._encoded([], has_usage=True)) if is_wanted else b""
        return usage + DONE

    def failure(self, error: BaseException) -> bytes:
        return event_of(with_client_names(self.body, as_api_error(error)).body()) + DONE

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        options = self.body.stream_options
        is_counting = options is not None and options.continuous_usage_stats
        return event_of(self._encoded(choices, has_usage=is_counting))

    def _encoded(self, choices: list[dict[str, Any]], *, has_usage: bool) -> bytes:
        extra, self.extra = self.extra, {}
        if has_usage:
            extra["usage"] = self._counted.usage
        return msgspec.json.encode({**self._head, "choices": choices, **extra})

    def _note_transfer(self, output: RequestOutput) -> None:
        """Return the parameters for the engine that continues a request with its KV, if any."""
        if output.kv_transfer_params is not None:
            self.extra["kv_transfer_params"] = output.kv_transfer_params

    def _frame(self, choice: bytes) -> Frame | None:
        """Split the JSON of a streamed choice at its placeholder ``TEXT``, to reuse the bytes for
        all chunks. ``None`` if chunks differ in more than their text."""
        body, options = self.body, self.body.stream_options
        is_counting = options is not None and options.continuous_usage_stats
        if body.n != 1 or body.return_token_ids or is_counting:
            return None
        head = msgspec.json.encode({**self._head, "choices": []})
        before, after = choice.split(TEXT)
        ends = b',"finish_reason":null,"stop_reason":null}]}'
        return Frame(b"data: " + head[:-2] + before, after + ends + b"\n\n")


def reason_of(completion: CompletionOutput) -> str | None:
    """The finish reason; ``None`` while running. Raises ``ApiError`` if it is an error."""
    reason = completion.finish_reason
    code = None if reason is None else code_of(reason, completion.code)
    if code is None:
        return reason
    raise error_of_end(code, completion.error)

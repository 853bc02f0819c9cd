"""Core to client (columns, deltas only) and front end to user (objects)."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error", "deadline"]


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities at one position: the chosen token first, then the most likely ones, best
    first.

    ``rank`` is the chosen token's rank among the whole vocabulary, 1 for the most likely.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class Started(msgspec.Struct, array_like=True, gc=False):
    """Sent with the first output of a request, and with the first after each preemption.

    It has all that has happened until then, so that a front end which ends the request at a stop
    string has its metrics without asking.
    """

    index: int  # row in CoreOutputs.request_ids
    num_cached_tokens: int  # when it first started, as is the time
    scheduled_time: float
    num_preemptions: int = 0
    waits: dict[str, float] = {}  # seconds in the queue by cause
    events: list[tuple[str, float]] = []  # what happened to it, and when


class Finished(msgspec.Struct, array_like=True, gc=False):
    """A request's only terminal event, of an aborted one too."""

    index: int  # row in CoreOutputs.request_ids
    reason: FinishReason
    stop_reason: int | str | None = None  # the stop token or string; None for end of text
    message: str = ""  # what went wrong, for reasons "error" and "deadline"
    num_preemptions: int = 0
    waits: dict[str, float] = {}  # seconds in the queue by cause; they sum up to its queue time
    events: list[tuple[str, float]] = []  # what happened to it, and when
    kv_transfer_params: dict[str, Any] | None = None  # from the KV connector


class CoreOutputs(msgspec.Struct, array_like=True, gc=False):
    """What one step brought for one client, as columns.

    ``token_ids`` is flat: ``counts[i]`` of them belong to ``request_ids[i]`` (``None``: one each).
    ``logprobs`` and ``prompt_logprobs`` map a row to one entry per new token, or to the entries of
    all prompt positions from ``prompt_logprobs_start`` on.
    """

    request_ids: list[str]
    token_ids: list[int]
    counts: list[int] | None
    time: float  # clock of the core, seconds
    started: list[Started] = []
    finished: list[Finished] = []
    logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}


class Logprob(msgspec.Struct, gc=False):
    """One token's log-probability, its rank (1: most likely) and, with a tokenizer, its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class RequestMetrics(msgspec.Struct, gc=False):
    """Times of a request in seconds on the engine's clock; ``None`` until they have happened.

    ``waits`` says why it waited: seconds in the queue by cause. They sum up to its queue time, over
    all its sequences. ``events`` are in order of time. Both tell what had happened when the core
    sent the output; of a request that is aborted, what had happened by its output before that.
    """

    arrival_time: float
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    waits: dict[str, float] = {}
    events: list[tuple[str, float]] = []  # queued, scheduled, preempted


class CompletionOutput(msgspec.Struct, gc=False):
    """One generated sequence of a request (or its new part, for ``output_kind="delta"``)."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None  # what went wrong, for finish reasons "error" and "deadline"

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestOutput(msgspec.Struct, gc=False):
    """What the user gets for a request, once per step or once at the end (``output_kind``)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None  # of this moment: a later output has its own
    kv_transfer_params: dict[str, Any] | None = None
    """From the KV connector, for the engine that continues. Only of a request that the core has
    ended: the last output after a stop string or an abort does not wait for the core."""

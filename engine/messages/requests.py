"""Requests as sent to a core, their outputs, and checks of requests.

A core sends ``CoreOutputs``, from which the front end makes ``RequestOutput`` objects for users.
The core checks requests again, because not every client is our front end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import msgspec
from msgspec.structs import replace

from engine.errors import RequestError, RequestTypeError
from engine.messages.adapters import AdapterSource
from engine.messages.params import SamplingParams, check_params_for_vocab, is_finite
from engine.messages.pooling import PooledColumns, PoolingParams

if TYPE_CHECKING:
    from engine.messages.vectors import Vectors  # imports numpy, which clients need not load

INT32_MAX = 2**31 - 1
PLAIN = (type(None), bool, int, float, str, bytes)
MAX_PLAIN_DEPTH = 64
MAX_ID_CHARS = 4096  # every output has the id of its request
INT64 = range(-(2**63), 2**63)


class MediaItem(msgspec.Struct, array_like=True, frozen=True):
    """An image, sound, ... in a prompt: ``length`` placeholder tokens from ``offset`` on.

    ``hash`` identifies its content: equal hashes mean equal encoder output. ``spans``: the runs
    (offset within the item, length) of tokens that take encoder outputs, if others are between
    them, e.g. the names of an image's rows; empty: all tokens do. ``grid``: numbers of its tokens
    along the axes time, height and width, if the positions of the model have axes.
    """

    offset: int
    length: int
    hash: str
    spans: tuple[tuple[int, int], ...] = ()
    grid: tuple[int, ...] = ()


class AddRequest(msgspec.Struct, array_like=True, frozen=True, tag="add"):
    """A request for one sequence; the client splits a request with ``n > 1`` into n of these.

    ``seed`` and the position of a token determine its sampling noise. ``eos_token_ids`` end the
    sequence, like ``params.stop_token_ids``; empty if end-of-text tokens are ignored.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    arrival_time: float
    max_tokens: int  # resolved: never None
    eos_token_ids: list[int] = []
    priority: int = 0
    user: str = ""
    deadline: float | None = None
    cache_salt: str | None = None
    client_index: int = 0
    bad_words_ids: list[list[int]] = []  # SamplingParams.bad_words as token ids
    hints: dict[str, Any] | None = None  # for policies; not read by the engine
    adapter: str | None = None  # name of the LoRA adapter; inside a core, the digest of its content
    media: list[MediaItem] = []  # in order of offset
    grammar: str | None = None  # that the output must follow; text of ``structured.grammar_of``
    kv_transfer_params: dict[str, Any] | None = None  # for the KV connector
    queue_deadline: float | None = None  # if not started by then, it ends with reason "deadline"
    end_deadline: float | None = None  # if not finished by then too (``deadline`` is for policies)
    tbt: float | None = None  # wanted seconds between output tokens, for policies
    adapter_source: AdapterSource | None = None  # where to find the adapter, if it is not loaded
    pooling: PoolingParams | None = None  # its result is a vector; ``max_tokens`` must be 1


class Arrival(msgspec.Struct, array_like=True, frozen=True):
    """The content of a media item has come to a core, for requests that use it.

    ``fault``: why it cannot be used, which ends those of the requests that need it; empty: it can.
    """

    key: str  # the item's hash
    request_ids: list[str]
    fault: str = ""
    code: ErrorCode = "invalid_media"  # of these ends


FinishReason = Literal["stop", "length", "abort", "error", "deadline"]
ErrorCode = Literal[
    "adapter_failed",  # its LoRA adapter cannot be read or used
    "aborted",  # by its client, or by a core or server that ends
    "core_died",  # the core that ran it has died; it may be sent to another core
    "deadline_exceeded",  # not started, or not finished, by its deadline
    "invalid_grammar",  # its grammar cannot be compiled or used
    "invalid_media",  # one of its pictures cannot be decoded or used
    "kv_transfer_failed",  # KV computed by another engine could not be loaded
    "no_token_is_allowed",  # its own parameters mask every token
    "request_failed",  # any other error; see the message
]
"""Why a sequence ended early, for programs. The messages are for people and may change."""
ERROR_CODES = frozenset(get_args(ErrorCode))
CODE_OF_REASON: dict[FinishReason, ErrorCode] = {
    "abort": "aborted",
    "error": "request_failed",
    "deadline": "deadline_exceeded",
}


def code_of(reason: FinishReason, code: str | None = None) -> ErrorCode | None:
    """The error code of an ended request: ``code`` if it is a known one, else the default for the
    reason; ``None`` if the reason is not an error."""
    if reason in CODE_OF_REASON and code in ERROR_CODES:
        return cast(ErrorCode, code)
    return CODE_OF_REASON.get(reason)


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities at one position: first the chosen token, then the most likely tokens in
    descending order.

    ``rank`` is the chosen token's rank in the whole vocabulary, 1 for the most likely.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class Started(msgspec.Struct, array_like=True, gc=False):
    """The history of a request, sent with its first output and after each preemption.

    A front end needs it if it ends the request itself, at a stop string.
    """

    index: int  # row in CoreOutputs.request_ids
    num_cached_tokens: int  # at its first start, as the time
    scheduled_time: float
    num_preemptions: int = 0
    waits: dict[str, float] = {}  # seconds in the queue by cause
    events: list[tuple[str, float]] = []  # what happened to it, and when
    prefix_end: str = ""  # why no more tokens were cached; empty: all full blocks were
    prefix_evicted: float | None = None  # seconds since the next block was evicted


class Finished(msgspec.Struct, array_like=True, gc=False):
    """The end of a request, sent once, also for an aborted request."""

    index: int  # row in CoreOutputs.request_ids
    reason: FinishReason
    stop_reason: int | str | None = None  # the stop token or string; None for the end-of-text token
    message: str = ""  # error message, for reasons "error" and "deadline"
    num_preemptions: int = 0
    waits: dict[str, float] = {}  # seconds in the queue by cause; their sum is the queue time
    events: list[tuple[str, float]] = []  # what happened to it, and when
    kv_transfer_params: dict[str, Any] | None = None  # from the KV connector
    counters: dict[str, int] = {}  # counters of features, named as in the statistics
    code: ErrorCode | None = None  # error code; None for the reason's default code


class CoreOutputs(msgspec.Struct, array_like=True, gc=False):
    """The outputs of one step for one client. Row i is request ``request_ids[i]``.

    ``token_ids``: the new tokens of all rows, concatenated; row i has ``counts[i]`` of them
    (``None``: one each). ``logprobs``: an entry for each new token, by row. ``prompt_logprobs``: an
    entry for each prompt position from ``prompt_logprobs_start`` on, by row.
    """

    request_ids: list[str]
    token_ids: list[int]
    counts: list[int] | None
    time: float  # seconds on the core's clock
    started: list[Started] = []
    finished: list[Finished] = []
    logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    pooled: PooledColumns | None = None  # results of pooled requests, which end with them


class Logprob(msgspec.Struct, gc=False):
    """The log-probability of a token, its rank (1: most likely) and, with a tokenizer, its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class RequestMetrics(msgspec.Struct, gc=False):
    """Times of a request in seconds on the engine's clock; ``None`` until they are known.

    ``waits``: seconds in the queue by cause, summed over the request's sequences. ``events``: in
    order of time. Events after the last output of an aborted request are missing.
    """

    arrival_time: float
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    waits: dict[str, float] = {}
    events: list[tuple[str, float]] = []  # queued, scheduled, preempted
    prefix_end: str = ""
    """Why no more of the prompt was found in the prefix cache when the request first started:
    ``never seen`` (or forgotten long ago), ``evicted``, ``another cache salt``, ``another
    adapter``, ``other media``, ``window gone``, ``no snapshot there``, ``prefix caching off`` or
    ``every token wanted``. Empty if all full blocks were found, and until it starts."""
    prefix_evicted: float | None = None
    """Seconds before that start at which the missing blocks were evicted, if they were."""
    counters: dict[str, int] = {}
    """Counters of features, e.g. ``drafts.num_draft_tokens``, summed over the sequences that have
    ended. Sequences that ended at a stop string are not counted."""


class CompletionOutput(msgspec.Struct, gc=False):
    """One generated sequence of a request (only its new part for ``output_kind="delta"``)."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None  # error message, for finish reasons "error" and "deadline"
    code: ErrorCode | None = None  # error code, for finish reasons "error", "deadline" and "abort"

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestOutput(msgspec.Struct, gc=False):
    """An output of a request for the user: by ``output_kind``, one per step or one at the end."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None  # as of this output; later outputs have their own
    kv_transfer_params: dict[str, Any] | None = None
    """Data from the KV connector for the engine that continues the request. Missing if the request
    ended at a stop string or was aborted: its last output does not wait for the core."""
    pooled: Vectors | None = None
    """The result of a pooled request that has not failed: [width], or [tokens, width]."""


class FinishedRequest(msgspec.Struct, gc=False):
    """A summary of a request that has ended, without its text, for observers."""

    request_id: str
    params: SamplingParams
    finish_reason: FinishReason  # of the sequence that ended last
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int  # sum over its sequences
    metrics: RequestMetrics
    adapter: str | None = None  # name of its LoRA adapter
    pooling: PoolingParams | None = None  # of a pooled request; ``params`` then say nothing


def pick_rows(batch: CoreOutputs, rows: Sequence[int]) -> CoreOutputs:
    """A copy of ``batch`` with only these rows, in this order."""
    place_of = {row: place for place, row in enumerate(rows)}
    counts, tokens = batch.counts, batch.token_ids
    if counts is None:
        picked_tokens = [tokens[row] for row in rows]
    else:
        begins = list(accumulate(counts, initial=0))
        picked_tokens = [token for row in rows for token in tokens[begins[row] : begins[row + 1]]]
    return replace(
        batch,
        request_ids=[batch.request_ids[row] for row in rows],
        token_ids=picked_tokens,
        counts=None if counts is None else [counts[row] for row in rows],
        started=[
            replace(each, index=place_of[each.index])
            for each in batch.started
            if each.index in place_of
        ],
        finished=[
            replace(end, index=place_of[end.index])
            for end in batch.finished
            if end.index in place_of
        ],
        logprobs={place_of[row]: each for row, each in batch.logprobs.items() if row in place_of},
        prompt_logprobs={
            place_of[row]: each for row, each in batch.prompt_logprobs.items() if row in place_of
        },
        pooled=None if batch.pooled is None else batch.pooled.pick(place_of),
    )


def with_ends(batch: CoreOutputs, ends: Iterable[tuple[str, Finished]]) -> CoreOutputs:
    """A copy of the batch plus a row, without tokens, for each (request id, end) in ``ends``."""
    first, added = len(batch.request_ids), list(ends)
    counts = [1] * first if batch.counts is None else batch.counts
    return replace(
        batch,
        request_ids=[*batch.request_ids, *(name for name, _ in added)],
        counts=[*counts, *(0 for _ in added)],
        finished=[
            *batch.finished,
            *(replace(end, index=first + place) for place, (_, end) in enumerate(added)),
        ],
    )


FEATURES = {
    "adapter": "adapters",
    "grammar": "masks",
    "media": "media",
    "kv_transfer_params": "kv_transfer",
}


def check_request(request: AddRequest, vocab_size: int, capabilities: Collection[str] = ()) -> None:
    """Raise ``RequestError`` for a request that a core could not process.

    ``capabilities``: the features that the core supports, as in ``engine.messages.step.PARTS``.
    """
    if len(request.request_id) > MAX_ID_CHARS:
        raise RequestError(
            f"request_id {request.request_id!r:.80} has {len(request.request_id)} characters, the "
            f"limit is {MAX_ID_CHARS}",
            param="request_id",
        )
    if not request.prompt_token_ids:
        message = f"request {request.request_id!r:.80} has an empty prompt"
        raise RequestError(message, param="prompt_token_ids")
    _check_ids("prompt_token_ids", request.prompt_token_ids, vocab_size)
    _check_ids("eos_token_ids", request.eos_token_ids, vocab_size)
    for word in request.bad_words_ids:
        _check_ids("bad_words_ids", word, vocab_size)
    if not 1 <= request.max_tokens <= INT32_MAX:
        message = f"max_tokens is {request.max_tokens}, must be in 1..{INT32_MAX}"
        raise RequestError(message, param="max_tokens")
    for name in ("priority", "seed"):
        if getattr(request, name) not in INT64:
            message = f"{name} is {getattr(request, name)}, must fit into 64 bits"
            raise RequestError(message, param=name)
    for name, part in FEATURES.items():
        if getattr(request, name) and part not in capabilities:
            raise RequestError(
                f"{name} is {getattr(request, name)!r:.80} and needs the capability {part!r}, but "
                f"this core has {', '.join(sorted(capabilities)) or 'none'}: leave {name} out",
                param=name,
            )
    check_kind(request, capabilities)
    if request.params.structured_outputs is not None:
        raise RequestError(
            "params.structured_outputs is set, but a core does not read it: set grammar to "
            "engine.messages.structured.grammar_of(structured_outputs)",
            param="structured_outputs",
        )
    check_params_for_vocab(request.params, vocab_size)


def check_kind(request: AddRequest, capabilities: Collection[str]) -> None:
    """Raise ``RequestError`` for a pooled request to a core that generates text, or the other way
    round."""
    if request.pooling is None:
        if "only_pooling" in capabilities:
            raise RequestError(
                "this model returns vectors or scores and generates no text: use embed, classify, "
                'score or encode, or start it with runner="generate" if it can',
                param="params",
            )
        return
    if "pooling" not in capabilities:
        raise RequestError(
            'this model generates text and returns no vectors: start it with runner="pooling"',
            param="pooling",
        )
    if request.max_tokens != 1:
        raise RequestError(
            f"max_tokens is {request.max_tokens}, must be 1 for a pooled request",
            param="max_tokens",
        )


def in_use(request_id: str) -> RequestError:
    """The error for a new request that has the id of an unfinished one."""
    return RequestError(
        f"request id {request_id!r:.80} is in use; wait until it has finished or choose another",
        param="request_id",
        code="request_id_in_use",
    )


def as_request_ids(request_id: object) -> list[str]:
    """Make a list of one request id or several. Raises ``RequestTypeError`` for anything else."""
    several = isinstance(request_id, Iterable) and not isinstance(request_id, str)
    ids: list[str] = list(request_id) if several else [request_id]  # type: ignore[list-item,call-overload]
    for item in ids:
        if not isinstance(item, str):
            message = f"request_id has {item!r:.80}, must be a str or several"
            raise RequestTypeError(message, param="request_id")
    return ids


def check_times(add: AddRequest) -> None:
    """Raise ``RequestError`` for a time that is not finite, or a ``tbt`` (seconds between tokens)
    that is not above 0."""
    for name in ("arrival_time", "deadline", "queue_deadline", "end_deadline"):
        time = getattr(add, name)
        if time is not None and not is_finite(time):
            raise RequestError(
                f"{name} of request {add.request_id!r} is {time!r:.80}, must be a finite number",
                param=name,
            )
    if add.tbt is not None and not (is_finite(add.tbt) and add.tbt > 0):
        raise RequestError(
            f"tbt of request {add.request_id!r} is {add.tbt!r:.80}, must be a finite number of "
            "seconds above 0",
            param="tbt",
        )


def _check_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise RequestError(
            f"{name} has token id {wrong}, must be in [0, {vocab_size - 1}]: the model's "
            f"vocabulary has {vocab_size} tokens",
            param=name,
        )


def check_plain(name: str, value: Any, depth: int = 0) -> None:
    """Raise ``RequestTypeError`` unless the value, an argument of the utility ``name``, is plain
    data: numbers, strings, bytes, lists, dicts and the like."""
    if isinstance(value, dict | list | tuple):
        if depth == MAX_PLAIN_DEPTH:
            raise RequestTypeError(
                f"an argument of utility {name!r:.80} is nested over {MAX_PLAIN_DEPTH} levels deep"
            )
        for item in value:
            check_plain(name, item, depth + 1)
        for item in value.values() if isinstance(value, dict) else ():
            check_plain(name, item, depth + 1)
    elif type(value) not in PLAIN:
        raise RequestTypeError(
            f"an argument of utility {name!r:.80} is {value!r:.80} ({type(value).__name__}), must "
            "be None, a boolean, number, string, bytes, list or dict"
        )
    elif type(value) is int and not -(2**63) <= value < 2**64:
        raise RequestTypeError(f"an integer for utility {name!r:.80} does not fit into 64 bits")
    elif type(value) is str and not _is_unicode(value):
        raise RequestTypeError(
            f"an argument of utility {name!r:.80} is {value!r:.80}, which is not valid Unicode"
        )


def _is_unicode(text: str) -> bool:
    """False for a string with lone surrogates, which cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

"""Request: the identity, constants and history of one request.

Numbers that change are stored in the scheduler's table, in the request's row. Only ``move`` changes
the status."""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from engine.kv.tables import WHOLE, PrefixEnd
from engine.messages.params import SamplingParams
from engine.messages.requests import (
    AddRequest,
    Finished,
    FinishReason,
    MediaItem,
    Started,
    code_of,
)
from engine.sched.table import SERIAL, Table


class Status(Enum):
    """Status of a request. A preempted request is WAITING, with ``num_preempted > 0``."""

    WAITING = "waiting"
    PARKED = "parked"  # out of the queue until ``wake`` is called
    RUNNING = "running"  # has a slot of the worker and KV blocks
    FINISHED = "finished"


LEGAL_MOVES = {
    Status.WAITING: {Status.RUNNING, Status.PARKED, Status.FINISHED},
    Status.PARKED: {Status.WAITING, Status.FINISHED},
    Status.RUNNING: {Status.WAITING, Status.FINISHED},
    Status.FINISHED: set(),
}


@dataclass(slots=True)
class RequestHistory:
    """Events and waiting times of a request. Times are seconds on the engine's clock."""

    num_preempted: int = 0
    num_cached: int = 0  # tokens found in the cache when first admitted
    prefix_end: PrefixEnd = WHOLE  # why no more were found
    scheduled_time: float | None = None
    events: list[tuple[str, float]] = field(default_factory=list)
    waits: dict[str, float] = field(default_factory=dict)  # seconds by cause
    queue_seconds: float = 0.0
    wait_from: float = 0.0
    own_cause: str | None = None  # the cause of its present wait, if it is not that of the queue
    totals_at_entry: dict[str, float] = field(default_factory=dict)
    kv_transfer_params: dict[str, Any] | None = None  # for the engine that continues with its KV
    counters: dict[str, int] = field(default_factory=dict)  # written by resources

    def count(self, name: str, num: int) -> None:
        """Add ``num`` to the request's counter ``name``."""
        self.counters[name] = self.counters.get(name, 0) + num


def as_array(tokens: list[int]) -> array[int]:
    """Convert a list to an array through packed bytes, twice as fast as ``array("i", list)``."""
    packed = array("i")
    packed.frombytes(struct.pack(f"{len(tokens)}i", *tokens))
    return packed


class Request:
    """A sequence to generate: ``tokens`` has the prompt and the output of finished steps.

    Only the scheduler changes a request. It exists until no step in flight contains it."""

    __slots__ = (
        "add",
        "arrival",
        "cache_salt",
        "history",
        "num_prompt",
        "own_rank",
        "reads_cache",
        "request_id",
        "row",
        "status",
        "stop_ids",
        "table",
        "tokens",
    )

    def __init__(self, add: AddRequest, arrival: int, table: Table, *, max_model_len: int) -> None:
        self.add = add
        self.request_id = add.request_id
        self.arrival = arrival  # arrival number; breaks ties of rank
        self.table = table
        self.tokens = as_array(add.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.cache_salt = add.cache_salt
        self.reads_cache = add.params.prompt_logprobs is None and not (
            add.pooling is not None and add.pooling.reads_all
        )
        self.status = Status.WAITING
        self.own_rank: tuple[Any, ...] | None = ()
        self.history = RequestHistory()
        self.row = table.take(self.num_prompt)
        table.facts.enter(self.row, arrival, add)
        longest = max_model_len if add.pooling is None else self.num_prompt + 1
        table.limit.at[self.row] = min(self.num_prompt + add.max_tokens, longest)
        table.client.at[self.row] = add.client_index
        self.stop_ids = stops = list(dict.fromkeys(add.eos_token_ids + add.params.stop_token_ids))
        table.stop_id.at[self.row] = -2 if stops else -1
        if len(stops) == 1 and 0 <= stops[0] < 1 << 31 and not add.params.min_tokens:
            table.stop_id.at[self.row] = stops[0]

    @property
    def rank(self) -> tuple[Any, ...]:
        """The rank that the policy returned last."""
        rank, row = self.own_rank, self.row
        if rank is not None:
            return rank
        return tuple([column.at[row] for column in self.table.facts.ranks])

    @rank.setter
    def rank(self, rank: tuple[Any, ...]) -> None:
        self.own_rank = rank

    # -- identity

    @property
    def params(self) -> SamplingParams:
        return self.add.params

    @property
    def priority(self) -> int:
        """A smaller number is more urgent."""
        return self.add.priority

    @property
    def user(self) -> str:
        """Name of the user; "" if not given."""
        return self.add.user

    @property
    def arrival_time(self) -> float:
        """When it arrived, in seconds on the clock of `view.now`."""
        return self.add.arrival_time

    @property
    def deadline(self) -> float | None:
        """When it should have ended, on the same clock, or ``None``."""
        return self.add.deadline

    @property
    def tbt(self) -> float | None:
        """Wanted seconds between output tokens, or ``None``."""
        return self.add.tbt

    @property
    def first_token_time(self) -> float | None:
        """When it got its first output token, or ``None``."""
        time = self.table.facts.first_token.at[self.row]
        return time if time == time else None

    @property
    def last_token_time(self) -> float | None:
        """When it got its latest output token, or ``None``."""
        time = self.table.facts.last_token.at[self.row]
        return time if time == time else None

    @property
    def hints(self) -> dict[str, Any]:
        """Values from the caller for the policy, by name."""
        return self.add.hints or {}

    @property
    def adapter(self) -> str | None:
        """Digest of its LoRA adapter (while that is first read, another text), or ``None``."""
        return self.add.adapter

    @property
    def media(self) -> list[MediaItem]:
        """Images and other media in the prompt, sorted by offset."""
        return self.add.media

    @property
    def num_preempted(self) -> int:
        """How often it was preempted."""
        return self.history.num_preempted

    @property
    def num_cached(self) -> int:
        """Tokens found in the prefix cache at its first start; 0 before it."""
        return self.history.num_cached

    # -- counts

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens, and of output tokens from finished steps."""
        return self.table.num_tokens.at[self.row]

    @property
    def num_output(self) -> int:
        """Output tokens from finished steps."""
        return self.table.num_tokens.at[self.row] - self.num_prompt

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is computed, or is being computed; 0 after a preemption."""
        return self.table.num_computed.at[self.row]

    @property
    def num_pending(self) -> int:
        """Number of tokens that steps in flight will sample."""
        return self.table.num_pending.at[self.row]

    @property
    def num_uncomputed(self) -> int:
        """Tokens that the next step could compute; 0 if the last one is being sampled."""
        table, row = self.table, self.row
        upto = table.num_tokens.at[row] + table.num_pending.at[row]
        return 0 if upto >= table.limit.at[row] else upto - table.num_computed.at[row]

    @property
    def max_total(self) -> int:
        """The most tokens it can reach: prompt plus `max_tokens`, or `max_model_len`."""
        return self.table.limit.at[self.row]

    @property
    def slot(self) -> int:
        """Index of the running request in the worker's tables; -1 if it does not run."""
        return self.table.slot.at[self.row]

    @property
    def considered(self) -> int:
        """Number of the last step in which this request was offered tokens or was preempted."""
        return self.table.considered.at[self.row]

    @property
    def is_waiting(self) -> bool:
        """False while it runs or is parked."""
        return self.status is Status.WAITING

    @property
    def is_serial(self) -> bool:
        """True if a resource requires that at most one step in flight contains the request."""
        return self.table.flags.at[self.row] & SERIAL != 0

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    def move(self, status: Status) -> None:
        """Change status; only the scheduler may."""
        assert status in LEGAL_MOVES[self.status], f"{self} cannot become {status.value}"
        self.status = status
        self.table.facts.is_waiting.at[self.row] = status is Status.WAITING

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.value})"


class End(NamedTuple):
    """Why a request ends before it is complete. ``code`` None: the default code of ``reason``."""

    req: Request
    reason: FinishReason
    message: str
    code: str | None = None


def start_of(req: Request, index: int, now: float) -> Started:
    """Make the message that a request has started. ``index``: its index in the outputs."""
    history = req.history
    return Started(
        index,
        history.num_cached,
        history.scheduled_time or now,
        history.num_preempted,
        dict(history.waits),
        list(history.events),
        *history.prefix_end,
    )


def end_of(
    req: Request,
    index: int,
    reason: FinishReason,
    stop_reason: int | None = None,
    end: End | None = None,
) -> Finished:
    """Make the message that a request has ended. ``index``: its index in the outputs; ``end``: why
    it ended early."""
    history = req.history
    return Finished(
        index,
        reason,
        stop_reason,
        "" if end is None else end.message,
        num_preemptions=history.num_preempted,
        waits=history.waits,
        events=history.events,
        kv_transfer_params=history.kv_transfer_params,
        counters=history.counters,
        code=code_of(reason, None if end is None else end.code),
    )

"""PrefillApart: long prompts are computed by cores of their own, so that they delay no output.

    add ──> a decode core: the request, which waits until stores have its prompt's KV blocks
        └─> a prefill core: the same prompt with one output token, which is dropped
    the prefill core stores the blocks in memory that all cores share
        ──> the decode core loads them, computes the rest (at most a block) and all output tokens
    the prefill fails, its core dies, or blocks do not come ──> the decode core computes the prompt

A decode core has each request from the start: it checks, refuses, aborts and ends it as usual.
Prompts of which a decode core lacks few tokens go straight there. While all decode cores are dead,
prefill cores do everything."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from engine.config.core import CoreConfig
from engine.config.engine import EngineConfig
from engine.errors import ConfigError, RequestError
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest, CoreOutputs, pick_rows
from engine.messages.stats import SchedulerStats
from engine.rpc.balance import Balancer

AWAIT_SECONDS = 3600.0  # longer than a prompt takes; what ends the wait is below
GRACE_SECONDS = 1.0  # after the prompt was computed, its blocks come within this time
PREFIX = "prefill apart."  # of counters
SUFFIX = "\x1fprefill"  # of the ids of prefills


class Roles(NamedTuple):
    """The first ``num_prefill`` cores compute only prompts: those of which a decode core lacks at
    least ``threshold`` tokens."""

    num_prefill: int
    threshold: int


def roles_of(core: CoreConfig) -> Roles | None:
    """The roles of the cores; ``None`` if all cores do the same."""
    return Roles(core.prefill_cores, core.prefill_threshold) if core.prefill_cores else None


def check_shared(config: EngineConfig, arena: object | None) -> None:
    """Raise ``ConfigError`` if prefill and decode cores have no memory in common."""
    if config.core.prefill_cores and arena is None:
        raise ConfigError(
            f"{config.core.sizes}, but this system has no memory that these processes can share: "
            "leave both options out, or set data_parallel_size instead"
        )


class ApartCore(Protocol):
    """What the routing needs of the client of a core; see ``EngineCoreClient``."""

    @property
    def decided(self) -> Any: ...

    def begin_add(self, requests: Sequence[AddRequest]) -> tuple[list[Any], dict[int, Exception]]:
        """Send requests. Returns the messages, which have a ``number``, and errors by index."""

    def end_add(self, parts: Sequence[Any]) -> dict[int, Exception]:
        """The errors of refused requests of these messages, by index."""

    def abort(self, request_ids: Sequence[str]) -> None: ...

    def begin_call(self, name: str, *args: Any) -> int:
        """Begin a call; returns its number."""

    def end_call(self, name: str, number: int) -> Any: ...

    def is_answered(self, number: int) -> bool:
        """True if the core has answered a message or call."""


@dataclass(slots=True)
class Prefill:
    """A prompt that a prefill core computes. ``names``: the requests that wait for it."""

    core: int
    request: AddRequest
    content: int | None  # identifies the prompt's blocks
    names: set[str] = field(default_factory=set)
    begun: float | None = None  # when it was sent
    parts: list[Any] = field(default_factory=list)  # messages that the core has not answered yet


class PrefillApart:
    """Sends prompts to prefill cores, and ends the waits of requests whose blocks do not come.

    ``named(core)`` is a context that handles the death of a core within it. Messages are sent only
    by ``tend``, and no answer is awaited: a prefill core answers between two long steps."""

    def __init__(
        self,
        roles: Roles,
        cores: Sequence[ApartCore],
        balancer: Balancer,
        named: Callable[[int], AbstractContextManager[None]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if "only_pooling" in cores[0].decided.capabilities:
            raise ConfigError(
                f"prefill_cores is {roles.num_prefill}, but this model generates no tokens: use "
                "data_parallel_size"
            )
        self._roles = roles
        self._cores = cores
        self._balancer = balancer
        self._named = named
        self._clock = clock
        self._prefills: dict[str, Prefill] = {}  # those that have not ended, by id
        self._by_content: dict[int, str] = {}  # ids of prefills that requests may join
        self._waits: dict[str, str] = {}  # id of the prefill that each request waits for
        self._due: dict[str, float] = {}  # when requests stop waiting whose prefill has ended
        self._to_send: list[str] = []  # ids of new prefills
        self._to_abort: list[str] = []
        self._calls: list[tuple[int, ApartCore, int]] = []  # without an answer
        self._counts: Counter[str] = Counter()

    @property
    def num_cores(self) -> int:
        """How many cores, the first ones, compute only prompts."""
        return self._roles.num_prefill

    # -- requests

    def choose(self, request: AddRequest) -> tuple[int, AddRequest]:
        """Choose the core of a request. Returns it, and the request as it is sent there. Raises
        ``RequestError`` for an id that a prefill could have."""
        if request.request_id.endswith(SUFFIX):
            raise RequestError(
                f"request_id {request.request_id!r:.80} ends with {SUFFIX!r}, which marks requests "
                "of prefill_cores; choose another",
                param="request_id",
            )
        balancer, num_prefill = self._balancer, self._roles.num_prefill
        decode = [core for core in balancer.here if core >= num_prefill]
        core = balancer.choose(request, decode or None)
        placed = balancer.placed(request.request_id)
        assert placed is not None
        content = placed.ids[-1] if placed.ids else None
        name = None if content is None else self._by_content.get(content)
        if not decode or not _can_be_apart(request):
            return core, request
        if name is None and placed.num_lacking >= self._roles.threshold:
            name = self._new_prefill(request, content)
        if name is None:
            return core, request
        self._prefills[name].names.add(request.request_id)
        self._waits[request.request_id] = name
        balancer.set_apart(request.request_id)
        return core, replace(request, kv_transfer_params={"await_blocks": AWAIT_SECONDS})

    def prefills_of(self, request_ids: Sequence[str]) -> list[str]:
        """The ids of the prefills of these requests."""
        names = (self._waits.get(request_id) for request_id in request_ids)
        return list(dict.fromkeys(name for name in names if name is not None))

    def end(self, request_id: str) -> None:
        """Note that a request needs its prefill no more: it has started or ended."""
        self._due.pop(request_id, None)
        name = self._waits.pop(request_id, None)
        if name is None:
            return
        prefill = self._prefills[name]
        prefill.names.discard(request_id)
        if not prefill.names:
            self._close(name, prefill)
            self._to_abort.append(name)

    def lost(self, core: int, request_ids: Sequence[str]) -> list[str]:
        """Note that a core has died, with these requests. Returns those that are no prefills."""
        for request_id in request_ids:
            self.end(request_id)
        for name in [name for name, each in self._prefills.items() if each.core == core]:
            self._end_prefill(name, "failed")
        self._calls = [each for each in self._calls if each[0] != core]
        return [name for name in request_ids if not name.endswith(SUFFIX)]

    # -- outputs

    def take(self, batches: list[CoreOutputs]) -> list[CoreOutputs]:
        """Note what these outputs say about prefills. Returns the outputs without theirs."""
        kept = [self._taken(batch) for batch in batches]
        self.tend()
        return [batch for batch in kept if batch is not None]

    def _taken(self, batch: CoreOutputs) -> CoreOutputs | None:
        names = batch.request_ids
        rows = [row for row, name in enumerate(names) if not name.endswith(SUFFIX)]
        for started in batch.started:
            self.end(names[started.index])
        for end in batch.finished:
            self.end(names[end.index])
            if names[end.index] in self._prefills:
                self._end_prefill(names[end.index], "done" if end.reason == "length" else "failed")
        if len(rows) == len(names):
            return batch
        return pick_rows(batch, rows) if rows else None

    def num_unfinished(self) -> int:
        """How many prefills the clients of the cores count among their unfinished requests."""
        self._read_answers()
        return sum(each.begun is not None and not each.parts for each in self._prefills.values())

    # -- messages

    @property
    def next_due(self) -> float:
        """When ``tend`` has something to do at the latest, on the clock; infinity for never."""
        return min(self._due.values(), default=inf)

    def tend(self) -> None:
        """Send what has to be sent, and let requests go on that have waited long enough."""
        self._read_answers()
        while self._to_send or self._to_abort:  # more may come if a core has died
            self._send()
            self._abort()
        now = self._clock()
        late = [name for name, until in self._due.items() if now >= until]
        by_core: dict[int, list[str]] = {}
        for name in late:
            del self._due[name]
            if (core := self._balancer.core_of(name)) is not None:
                by_core.setdefault(core, []).append(name)
        for core, names in by_core.items():
            self._counts["given_up"] += len(names)
            with self._named(core):
                client = self._cores[core]
                self._calls.append((core, client, client.begin_call("stop_awaiting", names)))

    def add_to(self, stats: SchedulerStats | None) -> SchedulerStats | None:
        """Add the counters of prefills to the statistics."""
        if stats is None:
            return None
        own = {f"{PREFIX}{name}": number for name, number in self._counts.items()}
        return replace(stats, counters={**stats.counters, **own})

    # -- helpers

    def _new_prefill(self, request: AddRequest, content: int | None) -> str | None:
        """Choose a core for the prompt of a request. Returns the prefill's id; ``None`` if no
        prefill core is there."""
        balancer, name = self._balancer, request.request_id + SUFFIX
        here = [core for core in balancer.here if core < self._roles.num_prefill]
        if not here or name in self._prefills:
            return None
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        prefill = replace(
            request,
            request_id=name,
            params=params,
            max_tokens=1,
            eos_token_ids=[],
            bad_words_ids=[],
            grammar=None,
        )
        core = balancer.choose(prefill, here)
        self._prefills[name] = Prefill(core, prefill, content)
        if content is not None:
            self._by_content[content] = name
        self._to_send.append(name)
        return name

    def _send(self) -> None:
        names, self._to_send = self._to_send, []
        for name in names:
            prefill = self._prefills.get(name)
            if prefill is None or not prefill.names:  # its request was refused, or its core died
                continue
            prefill.begun = self._clock()
            with self._named(prefill.core):
                prefill.parts, errors = self._cores[prefill.core].begin_add([prefill.request])
                if errors:
                    self._end_prefill(name, "failed")
            self._counts["sent"] += 1

    def _abort(self) -> None:
        names, self._to_abort = self._to_abort, []
        for name in names:
            prefill = self._prefills.get(name)
            if prefill is None:
                continue
            self._balancer.end(name)
            if prefill.begun is None:
                del self._prefills[name]
                continue
            with self._named(prefill.core):
                self._cores[prefill.core].abort([name])

    def _read_answers(self) -> None:
        """Read the answers that have come: a prefill that was refused has ended."""
        for name, prefill in list(self._prefills.items()):
            core = self._cores[prefill.core]
            if prefill.parts and all(core.is_answered(part.number) for part in prefill.parts):
                parts, prefill.parts = prefill.parts, []
                if core.end_add(parts):
                    self._end_prefill(name, "failed")
        calls, self._calls = self._calls, []
        for index, core, number in calls:
            if self._cores[index] is not core:
                continue
            if core.is_answered(number):
                core.end_call("stop_awaiting", number)
            else:
                self._calls.append((index, core, number))

    def _end_prefill(self, name: str, how: str) -> None:
        """Note the end of a prefill. If it has failed, its requests wait no more."""
        prefill = self._prefills.pop(name)
        self._close(name, prefill)
        self._balancer.end(name)
        now = self._clock()
        self._counts[how if prefill.names else "aborted"] += 1
        if prefill.begun is not None:
            self._counts["milliseconds"] += round(1000 * (now - prefill.begun))
        for request_id in prefill.names:
            del self._waits[request_id]
            self._due[request_id] = now + (GRACE_SECONDS if how == "done" else 0.0)

    def _close(self, name: str, prefill: Prefill) -> None:
        """Let no further request join a prefill."""
        content = prefill.content
        if content is not None and self._by_content.get(content) == name:
            del self._by_content[content]


def _can_be_apart(request: AddRequest) -> bool:
    """True if the request can use KV blocks that another core has computed, and does not say itself
    which it wants."""
    no_logprobs = request.params.prompt_logprobs is None
    return request.pooling is None and no_logprobs and not request.kv_transfer_params

"""Policy: decides which requests to prefer. The scheduler calls it and checks what it returns."""

from __future__ import annotations

from abc import ABC, update_abstractmethods
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.config.sched import SchedulerConfig
from engine.kv.manager import KVManager
from engine.sched.request import Request
from engine.sched.table import Array

if TYPE_CHECKING:
    from engine.sched.adapters import AdapterPlaces
    from engine.sched.columns import Columns, OwnNumbers
    from engine.sched.predict.cost import CostModel, StepShape
    from engine.sched.predict.ledger import Ledger
    from engine.sched.predict.lengths import LengthHistory
    from engine.sched.step_state import Step

API_VERSION = 1
"""Version of ``Policy``, ``Resource`` and the public methods of ``Scheduler``. Incremented when
plug-ins written for the previous version would break."""


class Admission(Enum):
    """Result of ``Policy.admit``: whether a waiting request may start."""

    YES = "yes"
    SKIP = "skip"  # not this request; later ones may start
    CLOSE = "close"  # no further request starts in this step


class Limits(NamedTuple):
    """Limits of one step. They can only lower the configured limits; ``None`` changes nothing.

    ``max_tokens``: tokens computed in this step, for prompts and decodes together. ``max_seqs``:
    running requests after this step; requests that run already are not stopped. ``admission``:
    False if no waiting request may start in this step.
    """

    max_tokens: int | None = None
    max_seqs: int | None = None
    admission: bool = True


class Refuse(NamedTuple):
    """Result of ``on_add``: reject the request with a ``RequestError`` that has this reason."""

    reason: str


class Defer(NamedTuple):
    """Result of ``on_add``: park the request until this time, in seconds like ``view.now``."""

    until: float


Verdict = Refuse | Defer | None

Ranks = Sequence[tuple[Any, ...]] | tuple[Array, ...] | Array
"""Ranks of several requests: one tuple per request; or a tuple of arrays, where array k holds the
k-th number of each request's rank; or a single array, if a rank is one number."""


class SchedView(Protocol):
    """What a policy may read of the scheduler. It must not change these objects."""

    now: float
    """Time in seconds on the only clock a policy may use. It is constant during a step."""
    rng: Random
    """The only source of random numbers a policy may use."""
    step: Step
    """The step that is being planned: ``index`` (its number), ``tokens_left`` of its budget,
    ``num_free_seats``, ``admission_open``, ``has_grants`` (True once a request got tokens)."""
    config: SchedulerConfig
    """The scheduler's options, e.g. ``max_num_batched_tokens`` and ``max_num_seqs``."""
    ledger: Ledger
    """The service each user has received, in tokens: ``service(user)``, ``account(user)``. Only
    recorded for a policy with ``uses_ledger = True``."""
    lengths: LengthHistory
    """Output lengths of recently finished requests: ``mean``, ``quantile``, ``sample``."""
    adapters: AdapterPlaces
    """Which LoRA adapters are in slots of the device, in use, in the host's memory: ``in_slots``,
    ``in_use``, ``num_running(adapter)``, ``place(adapter)``."""

    @property
    def cost(self) -> CostModel:
        """The cost model, which predicts how many seconds a step or the load of an adapter
        takes."""
        ...

    @property
    def last(self) -> StepShape:
        """The sizes and the duration of the last finished step."""
        ...

    @property
    def running(self) -> Sequence[Request]:
        """Running requests, in rank order."""
        ...

    @property
    def waiting(self) -> Sequence[Request]:
        """Waiting requests, in rank order."""
        ...

    def decodes_first(self) -> list[Request]:
        """Running requests: decodes (one token to compute), then prompts, both in rank order."""
        ...

    def by_rank(self) -> list[Request]:
        """Running requests in rank order, with one token of the budget reserved for each decode."""
        ...

    def default_order(self) -> list[Request]:
        """Running requests in the default order: decodes first or, if free blocks may not suffice
        while prompts run, by rank."""
        ...

    @property
    def unoffered(self) -> list[Request]:
        """Waiting requests, in rank order, that can still be scheduled in this step."""
        ...

    @property
    def parked(self) -> Collection[Request]:
        """Requests that are out of the queue until a resource or a timer wakes them."""
        ...

    @property
    def unfinished(self) -> Collection[Request]:
        """All unfinished requests, in order of arrival."""
        ...

    @property
    def kv(self) -> KVManager:
        """The KV blocks: ``num_free``, ``num_usable``, ``block_size``, ``blocks_for(num_tokens)``,
        ``missing(req, upto)``, ``cached_prefix(req)`` (in tokens), ``peak(reqs, remaining)``."""
        ...

    def columns(self, reqs: Sequence[Request]) -> Columns:
        """The properties of these requests as arrays, in the same order. Fastest for
        ``view.waiting``, ``view.running`` and the requests passed to ``ranks``."""
        ...

    @property
    def unoffered_columns(self) -> Columns:
        """The properties of the ``unoffered`` requests as arrays."""
        ...

    def own(self, name: str, default: float = 0.0) -> OwnNumbers:
        """A number that the policy stores for each request, initially ``default``:
        ``view.own("level")[req] = 2``. ``columns(reqs).own("level")`` returns them as an array."""
        ...

    def count(self, name: str, value: int = 1) -> None:
        """Add ``value`` to a counter of the policy, shown in ``SchedulerStats.counters`` as
        ``policy.NAME``. Raises ``ValueError`` for more than 256 names, or if ``value`` is not an
        integer of at least 0."""
        ...

    @property
    def promised_blocks(self) -> int:
        """Blocks that running requests still need to complete their prompts."""
        ...

    @property
    def headroom_blocks(self) -> int:
        """Number of blocks to leave free when a waiting request starts: the configured watermark
        or, without one, the blocks that running prompts need plus one per four running requests."""
        ...

    @property
    def keeps_headroom(self) -> bool:
        """True if leaving ``headroom_blocks`` free is expected to save time. Slow to compute."""
        ...

    def prefill_seconds(
        self, num_tokens: NDArray[np.int64], context: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Predicted seconds to prefill each prompt in a step, after ``context`` cached tokens."""
        ...

    def start_of(self, req: Request) -> int:
        """Position of the first token that the request would compute if it were scheduled now."""
        ...

    def predict(self, req: Request) -> int:
        """Predicted number of output tokens that the request will have in total."""
        ...


class Policy(ABC):  # noqa: B024 - ``rank`` is abstract, see below
    """Base class of policies. A policy reads the view and changes only its own fields. All hooks
    have defaults, except that either ``rank`` or ``ranks`` must be defined.

    To give the same plans in a replay, decisions must use no clock but ``view.now`` and no random
    numbers but ``view.rng``. Equal ranks are ordered by arrival.
    """

    api_version = API_VERSION  # the API version it was written for; a plug-in may pin a number
    dynamic = False  # True if ranks change while a request waits or runs
    waiting_may_preempt = False  # True if waiting requests may evict running ones they outrank
    uses_ledger = False  # True if it reads ``view.ledger``, which is not recorded otherwise
    by_design: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Weaknesses that are part of the design, with the reason; policy checks do not report them:
    "starvation" (requests may wait as long as better ones arrive), "throughput" (little is computed
    per step), "recomputing" (preempted requests compute much again)."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """If a class defines only one of ``rank`` and ``ranks``, derive the other from it."""
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if "ranks" in own and "rank" not in own:
            cls.rank = rank_of_one  # type: ignore[method-assign]
        elif "rank" in own and "ranks" not in own:
            cls.ranks = Policy.ranks  # type: ignore[method-assign]

    def rank(self, req: Request, view: SchedView) -> tuple[Any, ...]:
        """The request's rank. Smaller ranks are scheduled and admitted first, and evicted last."""
        raise NotImplementedError

    def ranks(self, reqs: Sequence[Request], view: SchedView) -> Ranks:
        """The rank of each of these requests. Called in each step of a ``dynamic`` policy.

        By default ``rank`` is called for each request. Returning arrays is much faster: ``(late,
        due)``, computed from ``view.columns(reqs)``, gives request i the rank ``(late[i],
        due[i])``. NaN is not allowed. A policy that defines both methods must return the same ranks
        in both.
        """
        return [self.rank(req, view) for req in reqs]

    def limits(self, view: SchedView) -> Limits:
        """Limits of this step. Called before all other hooks of the step."""
        return Limits()

    def evict(self, view: SchedView) -> Iterable[Request]:
        """Running requests to preempt by choice. Called once before each step is planned."""
        return ()

    def order(self, view: SchedView) -> Iterator[Request]:
        """The order in which requests are offered tokens. A running request that is left out
        pauses.

        A request that was offered tokens cannot be preempted in the same step. Therefore the
        default order is by rank if blocks are scarce or a waiting request may preempt; else decodes
        come first.
        """
        running = view.running
        urgent = self.next_waiting(view) if self.waiting_may_preempt and running else None
        if urgent is None or not self.outranks(urgent, running[-1]):
            yield from view.default_order()
        else:
            for req in view.by_rank():
                while urgent is not None and self.outranks(urgent, req):
                    yield urgent
                    urgent = self.next_waiting(view)
                yield req
        while (waiting := self.next_waiting(view)) is not None:
            yield waiting

    def next_waiting(self, view: SchedView) -> Request | None:
        """The waiting request to try next in this step, or ``None`` to stop. Called repeatedly."""
        return view.step.next_waiting()

    def admit(self, req: Request, view: SchedView) -> Admission:
        """Whether the waiting request may start. By default it may if its tokens fit and the
        headroom stays free."""
        if self.waiting_may_preempt and any(self.outranks(req, other) for other in view.running):
            return Admission.YES  # the scheduler checks whether preemption frees enough blocks
        left = view.kv.num_free - view.kv.missing(req, req.num_tokens)
        fits = left >= 0 and (left >= view.headroom_blocks or not view.keeps_headroom)
        return Admission.YES if fits else Admission.CLOSE

    def chunk(self, req: Request, num_tokens: int, view: SchedView) -> int:
        """How many of the next ``num_tokens`` tokens of the request to compute in this step."""
        return num_tokens

    def outranks(self, req: Request, other: Request) -> bool:
        """True if ``req`` may preempt ``other``. ``req`` is waiting (with ``waiting_may_preempt``),
        or runs and lacks blocks (from the default ``takes_blocks``)."""
        return self.precedes(req, other)

    def takes_blocks(self, req: Request, other: Request) -> bool:
        """True if ``req``, which runs and lacks blocks for its next tokens, may preempt ``other``.

        If ``req`` may preempt no request, it pauses and keeps its blocks. If ``outranks`` is seldom
        True, override this hook with ``return self.precedes(req, other)``.
        """
        return self.outranks(req, other)

    def precedes(self, req: Request, other: Request) -> bool:
        """True if ``req`` has a smaller rank, or an equal one and arrived earlier. Not a hook."""
        return (*req.rank, req.arrival) < (*other.rank, other.arrival)

    def victim(
        self, candidates: Sequence[Request], req: Request, view: SchedView
    ) -> Request | None:
        """Choose which of the candidates is preempted so that ``req`` gets its blocks."""
        return candidates[-1]

    def on_add(self, req: Request, view: SchedView) -> Verdict:
        """Called when a request arrives, before its first ``rank``. ``None`` accepts it."""
        return None

    def on_grant(self, req: Request, num_tokens: int, view: SchedView) -> None:
        """Called when ``num_tokens`` tokens of the request are scheduled in this step."""

    def on_preempt(self, req: Request, view: SchedView) -> None:
        """Called before a request is preempted, for any reason. It will compute its
        ``num_computed`` tokens again, except those that it then finds in the prefix cache."""

    def on_tokens(self, reqs: Sequence[Request], view: SchedView) -> None:
        """Called once per finished step with the requests that got output tokens. Their
        ``num_output``, ``last_token_time`` and ``first_token_time`` are up to date; requests that
        end with these tokens have not ended yet."""

    def on_step(self, shape: StepShape, view: SchedView) -> None:
        """Called when a step has finished, with its shape and duration."""

    def on_finish(self, req: Request, view: SchedView) -> None:
        """Called when a request has ended, for any reason."""


# Hidden from type checkers, which would require ``rank`` of a policy that defines ``ranks``.
Policy.rank.__isabstractmethod__ = True  # type: ignore[attr-defined]
update_abstractmethods(Policy)


def as_columns(answer: object) -> tuple[Array, ...] | None:
    """The arrays of ranks that a policy returned; ``None`` if it returned tuples."""
    if isinstance(answer, np.ndarray):
        return (answer,)
    if isinstance(answer, tuple) and answer and all(isinstance(a, np.ndarray) for a in answer):
        return answer
    return None


def rank_of_one(self: Policy, req: Request, view: SchedView) -> tuple[Any, ...]:
    """Implements ``rank`` by calling the policy's ``ranks`` for one request."""
    answer: Any = self.ranks((req,), view)
    if (columns := as_columns(answer)) is not None:
        return tuple(place.item() for place in columns)
    rank: tuple[Any, ...] = answer[0]
    return rank

"""Policy: what to prefer. The mechanism asks, checks the answer and acts."""

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
    from engine.sched.columns import Columns, OwnNumbers
    from engine.sched.predict.cost import CostModel, StepShape
    from engine.sched.predict.ledger import Ledger
    from engine.sched.predict.lengths import LengthHistory
    from engine.sched.step_state import Step

API_VERSION = 1
"""Version of ``Policy``, ``Resource`` and the public parts of ``Scheduler``. Raised when a plug-in
written for the one before would break."""


class Admission(Enum):
    """Answer to: may this waiting request start?"""

    YES = "yes"
    SKIP = "skip"  # not this one; later ones may
    CLOSE = "close"  # no further request in this step


class Limits(NamedTuple):
    """Bounds of one step. They may only lower the configured ones; ``None`` leaves them.

    ``max_tokens``: tokens computed in this step, of prompts and decodes together.
    ``max_seqs``: requests that may have a seat after it; those that run keep theirs.
    ``admission``: may waiting requests start in this step?
    """

    max_tokens: int | None = None
    max_seqs: int | None = None
    admission: bool = True


class Refuse(NamedTuple):
    """Answer of ``on_add``: the caller gets a ``RequestError`` with this reason."""

    reason: str


class Defer(NamedTuple):
    """Answer of ``on_add``: out of the queue until this time (seconds on ``view.now``'s clock)."""

    until: float


Verdict = Refuse | Defer | None

Ranks = Sequence[tuple[Any, ...]] | tuple[Array, ...] | Array
"""Of several requests: a tuple for each; or an array for each place of the ranks, with a number for
each request; or the only such array."""


class SchedView(Protocol):
    """What a policy may read. At run time these are the live objects: they must not be changed."""

    now: float
    """Seconds: the only clock. It stands still during a step."""
    rng: Random
    """The only dice."""
    step: Step
    """The step that is being planned: ``index`` (its number), ``tokens_left`` of its budget,
    ``num_free_seats``, ``admission_open``, ``has_grants`` (did any request get tokens yet?)."""
    config: SchedulerConfig
    """The options of the scheduler, as ``max_num_batched_tokens`` and ``max_num_seqs``."""
    ledger: Ledger
    """What each user was served, in tokens: ``service(user)``, ``account(user)``. Kept only for a
    policy with ``uses_ledger``."""
    lengths: LengthHistory
    """Output lengths of the requests that ended last: ``mean``, ``quantile``, ``sample``."""

    @property
    def cost(self) -> CostModel:
        """Fitted to the steps measured so far."""
        ...

    @property
    def last(self) -> StepShape:
        """The step settled last."""
        ...

    @property
    def running(self) -> Sequence[Request]:
        """In rank order."""
        ...

    @property
    def waiting(self) -> Sequence[Request]:
        """In rank order."""
        ...

    def decodes_first(self) -> list[Request]:
        """Running requests: those that lack one token, then the others; by rank in both."""
        ...

    def by_rank(self) -> list[Request]:
        """Running requests by rank. Prompts leave each decode one token of the step budget."""
        ...

    def default_order(self) -> list[Request]:
        """Running requests in the default order: decodes first; but all by rank while the free
        blocks may not cover what each of them needs."""
        ...

    @property
    def unoffered(self) -> list[Request]:
        """Waiting requests that may still be offered in this step, in rank order."""
        ...

    @property
    def parked(self) -> Collection[Request]:
        """Requests out of the queue until what they wait for has arrived."""
        ...

    @property
    def unfinished(self) -> Collection[Request]:
        """All of them, in order of arrival."""
        ...

    @property
    def kv(self) -> KVManager:
        """Blocks: ``num_free``, ``num_usable``, ``block_size``, ``blocks_for(num_tokens)``,
        ``missing(req, upto)``, ``cached_prefix(req)`` (in tokens), ``peak(reqs, remaining)``."""
        ...

    def columns(self, reqs: Sequence[Request]) -> Columns:
        """Numbers of these requests as arrays, in their order. Cheapest for ``view.waiting``,
        ``view.running`` and what ``ranks`` is given, whose rows are known."""
        ...

    @property
    def unoffered_columns(self) -> Columns:
        """``columns(unoffered)``, without a list of them."""
        ...

    def own(self, name: str, default: float = 0.0) -> OwnNumbers:
        """A number of the policy's own for each request, ``default`` until one is set:
        ``view.own("level")[req] = 2``. ``columns(reqs).own("level")`` is the array of them."""
        ...

    def count(self, name: str, value: int = 1) -> None:
        """Add to a counter of the policy's own, which stands in ``SchedulerStats.counters`` as
        ``policy.NAME``. Raises ``ValueError`` for more than 256 names, or what is no whole number
        from 0 on."""
        ...

    @property
    def promised_blocks(self) -> int:
        """Blocks that running prompts still need before they decode."""
        ...

    @property
    def headroom_blocks(self) -> int:
        """Blocks to leave free when a waiting request starts, if ``keeps_headroom``: those promised
        to running prompts, and one for each fourth running request. Or the watermark."""
        ...

    @property
    def keeps_headroom(self) -> bool:
        """Is headroom worth its cost? Judged by the cost model; call it only if needed."""
        ...

    def prefill_seconds(
        self, num_tokens: NDArray[np.int64], context: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """``cost.prefill_seconds`` of many prompts, each in a step of its own."""
        ...

    def start_of(self, req: Request) -> int:
        """Position of the first token that the request would compute next."""
        ...

    def predict(self, req: Request) -> int:
        """Output tokens the request will have in all, by the configured predictor."""
        ...


class Policy(ABC):  # noqa: B024 - ``rank`` is abstract, see below
    """Reads views, changes nothing but its own fields. Every hook but ``rank`` has a default; a
    policy with ``ranks`` needs no ``rank``.

    Decisions may depend on ``view.now`` and ``view.rng`` but on no other clock or dice, so that the
    same inputs give the same plans anywhere. Ties of rank are broken by number of arrival.
    """

    api_version = API_VERSION  # of the API it was written for; a plug-in may pin it as a number
    dynamic = False  # ranks change while a request waits or runs
    waiting_may_preempt = False  # a waiting request may evict running ones that it outranks
    uses_ledger = False  # it reads ``view.ledger``, which is kept only if this is True
    by_design: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """What proofs are not to count as its fault, and why it is meant so: "starvation" (requests may
    wait for as long as better ones come), "throughput" (it serves little, or computes little in a
    step), "recomputing" (it computes much again)."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Of ``rank`` and ``ranks`` the one that the class, or the nearest of its bases, writes
        stands for both."""
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if "ranks" in own and "rank" not in own:
            cls.rank = rank_of_one  # type: ignore[method-assign]
        elif "rank" in own and "ranks" not in own:
            cls.ranks = Policy.ranks  # type: ignore[method-assign]

    def rank(self, req: Request, view: SchedView) -> tuple[Any, ...]:
        """A smaller rank gets tokens first, is admitted first and is evicted last."""
        raise NotImplementedError

    def ranks(self, reqs: Sequence[Request], view: SchedView) -> Ranks:
        """The ranks of all these requests, in their order: called for a ``dynamic`` policy with
        those that run and, while one may start, for those that wait.

        The default calls ``rank`` for each. An answer in arrays, made of ``view.columns(reqs)``,
        costs next to nothing for each request: ``(late, due)`` with two arrays of ``len(reqs)``
        numbers stands for the ranks ``(late[i], due[i])``. They hold no NaN. A policy that writes
        both gives the same ranks in both.
        """
        return [self.rank(req, view) for req in reqs]

    def limits(self, view: SchedView) -> Limits:
        """Bounds of this step; the first hook called in it."""
        return Limits()

    def evict(self, view: SchedView) -> Iterable[Request]:
        """Running requests to preempt by choice, called once before the step."""
        return ()

    def order(self, view: SchedView) -> Iterator[Request]:
        """In which order requests are offered tokens. A running request left out is paused.

        A request that was offered tokens in a step cannot be preempted in it. So requests go by
        rank when blocks are contested: when a waiting request may preempt, or the free blocks do
        not cover what the running requests need. Otherwise decodes go first.
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
        """The best waiting request not offered yet in this step; called again after each answer."""
        return view.step.next_waiting()

    def admit(self, req: Request, view: SchedView) -> Admission:
        """Admit if the whole known sequence fits and the headroom, if kept, stays free."""
        if self.waiting_may_preempt and any(self.outranks(req, other) for other in view.running):
            return Admission.YES  # the mechanism finds out whether victims make room
        left = view.kv.num_free - view.kv.missing(req, req.num_tokens)
        fits = left >= 0 and (left >= view.headroom_blocks or not view.keeps_headroom)
        return Admission.YES if fits else Admission.CLOSE

    def chunk(self, req: Request, num_tokens: int, view: SchedView) -> int:
        """How many of these tokens to compute now: at most ``num_tokens``."""
        return num_tokens

    def outranks(self, req: Request, other: Request) -> bool:
        """May ``req`` take seat and blocks from ``other``? Called for a waiting request of a policy
        with ``waiting_may_preempt``, which evicts by choice; and by the default of
        ``takes_blocks``."""
        return self.precedes(req, other)

    def takes_blocks(self, req: Request, other: Request) -> bool:
        """May ``req``, which runs and lacks blocks for its next tokens, take those of ``other``?

        Here somebody has to make room: where nobody may be made to, ``req`` stands still with the
        blocks it holds. A policy that is reluctant to evict by choice, and says so in ``outranks``,
        answers by rank here: ``return self.precedes(req, other)``.
        """
        return self.outranks(req, other)

    def precedes(self, req: Request, other: Request) -> bool:
        """Is ``req`` before ``other`` by rank, or by arrival where ranks are equal? No hook."""
        return (*req.rank, req.arrival) < (*other.rank, other.arrival)

    def victim(
        self, candidates: Sequence[Request], req: Request, view: SchedView
    ) -> Request | None:
        """The request to preempt for ``req``, which outranks all candidates; none was offered."""
        return candidates[-1]

    def on_add(self, req: Request, view: SchedView) -> Verdict:
        """A request arrives; ``rank`` is called afterwards. ``None`` accepts it."""
        return None

    def on_grant(self, req: Request, num_tokens: int, view: SchedView) -> None:
        """Tokens of the request will be computed in this step."""

    def on_preempt(self, req: Request, view: SchedView) -> None:
        """The request is about to lose its seat and blocks, for whatever reason: it will compute
        its ``num_computed`` tokens again, but for those it then finds in the cache."""

    def on_tokens(self, reqs: Sequence[Request], view: SchedView) -> None:
        """These requests got output tokens, which are settled: ``num_output``, ``last_token_time``
        and, of those that got their first, ``first_token_time`` have moved on. Called once a step,
        before the requests that end with them do."""

    def on_step(self, shape: StepShape, view: SchedView) -> None:
        """A step was settled: its shape and how long it took."""

    def on_finish(self, req: Request, view: SchedView) -> None:
        """The request has ended, for whatever reason."""


# A type checker would ask for ``rank`` where there are ``ranks``, so it does not see it.
Policy.rank.__isabstractmethod__ = True  # type: ignore[attr-defined]
update_abstractmethods(Policy)


def as_columns(answer: object) -> tuple[Array, ...] | None:
    """The places of ranks that were given as arrays, or ``None`` if they were not."""
    if isinstance(answer, np.ndarray):
        return (answer,)
    if isinstance(answer, tuple) and answer and all(isinstance(a, np.ndarray) for a in answer):
        return answer
    return None


def rank_of_one(self: Policy, req: Request, view: SchedView) -> tuple[Any, ...]:
    """``rank`` of a policy that writes ``ranks``."""
    answer: Any = self.ranks((req,), view)
    if (columns := as_columns(answer)) is not None:
        return tuple(place.item() for place in columns)
    rank: tuple[Any, ...] = answer[0]
    return rank

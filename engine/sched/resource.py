"""Resource: something that a request needs in addition to tokens and KV blocks."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol

from engine.config.sched import SchedulerConfig
from engine.kv.manager import KVManager
from engine.messages.kv_orders import Loaded
from engine.messages.requests import AddRequest, Arrival, ErrorCode
from engine.messages.step import Masks, StepPlan, StepResult
from engine.sched.interface import RequestCounts
from engine.sched.policy import API_VERSION
from engine.sched.request import Request
from engine.sched.step_state import Step
from engine.sched.view import View


class OnRefuse(Enum):
    """What the scheduler does when a resource refuses a waiting request."""

    SKIP = "skip"  # later requests may start before it
    CLOSE = "close"  # no further request starts in this step
    PARK = "park"  # it leaves the queue until ``wake``; a running one keeps its seat while it can
    FAIL = "fail"  # it ends with an error, whose message is ``cause``


class Fit(NamedTuple):
    """How many tokens of a request a resource allows in this step; ``cause``: why not more.

    ``on_refuse``: what happens to a waiting request that gets no token (``None``: the resource's
    default). ``room``: number of tokens for which blocks must be free before it is parked, if need
    be by preemption, as if it started. ``by``: the resource that refused, set by the scheduler.
    ``code``: error code of a request that fails."""

    num_tokens: int
    cause: str = ""
    on_refuse: OnRefuse | None = None
    room: int = 0
    by: Resource | None = None
    code: ErrorCode = "request_failed"


class AttachedScheduler(Protocol):
    """What a resource may read and call of the scheduler that it is attached to."""

    @property
    def config(self) -> SchedulerConfig: ...

    @property
    def kv(self) -> KVManager: ...

    @property
    def view(self) -> View: ...

    def wake(self, request_id: str) -> None:
        """Return a parked request to the queue."""

    def name_adapter(self, req: Request, adapter: str) -> None:
        """Set the adapter of a request that has not started: the digest of its content, which was
        not known when the request arrived."""

    def watch_again(self, req: Request) -> None:
        """Call ``watches`` and ``serializes`` again for this request, because their results have
        changed."""

    def report_fault(self, culprit: str, what: str, req: Request | None = None) -> None:
        """Log and count a fault of a plug-in that the resource calls. ``culprit``: the hook's name;
        ``what``: what it did; ``req``: the request for which it was called."""

    def get_request_counts(self) -> RequestCounts:
        """The numbers of running, waiting and parked requests."""
        ...


class Resource:
    """Base class of resources: LoRA slots, encoder budget, drafts, compiled grammars.

    ``fit`` must change nothing. To allow any order of resources, it must be monotone: ``fit(n) <=
    n``, and ``n <= m`` implies ``fit(n) <= fit(m)``.
    """

    api_version = API_VERSION
    name = "resource"  # in statistics, and as the cause of a wait if ``Fit`` gives none
    needs: tuple[str, ...] = ()
    """Plan parts that it writes, and other worker capabilities that it needs (names in
    ``engine.messages.step.CAPABILITIES``). The engine does not start if its worker lacks one."""
    on_refuse = OnRefuse.SKIP
    is_flexible = False
    """True if ``fit`` only says where chunks should end. It is ignored if no token would be left,
    e.g. because another resource does not allow to split them there."""
    serves = ""
    """The field of a request that needs this resource, e.g. ``"grammar"``. No hook is called until
    a request with this field arrives. Empty: all requests need it."""

    def attach(self, scheduler: AttachedScheduler) -> None:
        """Called once at the start. Store ``scheduler`` to ``wake`` parked requests or to read its
        ``config`` and ``view``.

        Raises ``ConfigError`` if the resource cannot work with this scheduler.
        """

    def objection(self, add: AddRequest) -> str | None:
        """Why the request can never run and must be rejected; ``None`` if it can run."""
        return None

    def added(self, req: Request) -> None:
        """Called when a request is queued, so that slow preparations can start early."""

    def arrived(self, arrival: Arrival) -> None:
        """Called between two steps when the content of a media item has come, or cannot come."""

    def transferred(self, report: Loaded) -> None:
        """Called between two steps when a load of KV blocks from outside the pool has ended."""

    def reset(self) -> None:
        """Drop what is cached for later requests. Called between two steps."""

    def watches(self, req: Request) -> bool:
        """True if the resource's hooks must be called in every step of this request. Other requests
        decode in bulk, without calls.

        Called when the request arrives, and after ``scheduler.watch_again``."""
        return True

    def serializes(self, req: Request) -> bool:
        """True if the request may be in only one step in flight, because each of its steps needs
        the token that the last one sampled. Called together with ``watches``."""
        return False

    def begin_step(self, step: Step) -> None:
        """Called before a step is planned."""

    def extra(self, req: Request, step: Step) -> int:
        """Number of draft tokens to verify in a decode of this request."""
        return 0

    def fit(self, req: Request, num_tokens: int, step: Step) -> Fit:
        """How many of ``num_tokens`` tokens the resource allows in this step, and why no more."""
        return Fit(num_tokens)

    def seated(self, req: Request, step: Step) -> None:
        """Called when a request starts or restarts to run, in worker slot ``req.slot``."""

    def take(self, req: Request, num_tokens: int, step: Step) -> None:
        """Called when ``num_tokens`` tokens of the request are scheduled."""

    def parked(self, req: Request) -> None:
        """Called when the request was parked because of this resource."""

    def release(self, req: Request) -> None:
        """Called when a request was preempted or has finished (``req.is_finished``)."""

    def describe(self, plan: StepPlan) -> None:
        """Add this resource's part to the plan. A plan with any such part is sent to the worker,
        even without rows."""

    def masks(self, plan: StepPlan) -> Masks | None:
        """Bit masks of the allowed next tokens for the rows in ``plan.masks``; ``None`` if another
        resource wrote ``plan.masks``.

        Called after the results of all earlier steps; requests may have ended by then. A row whose
        next token is already in ``plan.masks.drawn`` needs no mask if that token is allowed.
        """
        return None

    def counters(self) -> dict[str, int]:
        """Counters since the start, shown in ``SchedulerStats.counters`` as ``name.counter``."""
        return {}

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        """Read what a step's result has for this resource. Requests with an error in it end."""

    def shutdown(self) -> None:
        """Called when the engine ends: release files, connections and threads."""

"""Resource: something a request needs besides tokens and KV."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol

from engine.config.sched import SchedulerConfig
from engine.kv.manager import KVManager
from engine.messages.requests import AddRequest, ErrorCode
from engine.messages.step import Masks, StepPlan, StepResult
from engine.sched.interface import RequestCounts
from engine.sched.policy import API_VERSION
from engine.sched.request import Request
from engine.sched.step_state import Step
from engine.sched.view import View


class OnRefuse(Enum):
    """What a refusal means for the rest of the queue."""

    SKIP = "skip"  # later requests may go first
    CLOSE = "close"  # admission ends for this step
    PARK = "park"  # out of the queue until ``wake`` is called
    FAIL = "fail"  # the request ends with an error, of which ``cause`` is the message


class Fit(NamedTuple):
    """How many tokens are allowed now; if fewer than wanted, the reason (a short word).

    ``on_refuse`` is what it means for a waiting request that gets none (``None``: what the resource
    says of itself). ``hold``: a request that is parked keeps blocks for this many tokens meanwhile;
    if they cannot be had it stays in the queue and admission closes. ``by`` is filled in by the
    mechanism: the resource that refused. ``code`` is that of a request that fails.
    """

    num_tokens: int
    cause: str = ""
    on_refuse: OnRefuse | None = None
    hold: int = 0
    by: Resource | None = None
    code: ErrorCode = "request_failed"


class AttachedScheduler(Protocol):
    """What a resource may ask of the scheduler that it is attached to."""

    @property
    def config(self) -> SchedulerConfig: ...

    @property
    def kv(self) -> KVManager: ...

    @property
    def view(self) -> View: ...

    def wake(self, request_id: str) -> None:
        """A parked request goes back to the queue."""

    def watch_again(self, req: Request) -> None:
        """The answer of a resource to ``watches`` or ``serializes`` has changed."""

    def get_request_counts(self) -> RequestCounts:
        """How many requests run, wait and are parked."""
        ...


class Resource:
    """LoRA slots, encoder budget, drafts, a ready grammar: each feature brings one.

    ``fit`` changes nothing and is monotone (``fit(n) <= n``; ``n <= m`` implies
    ``fit(n) <= fit(m)``), so the answers of several resources do not depend on their order.
    """

    api_version = API_VERSION
    name = "resource"  # in statistics, and as the cause of a wait if ``Fit`` names none
    needs: tuple[str, ...] = ()
    """Parts of a plan that it writes, and what else it wants of a worker (names in
    ``engine.messages.step.CAPABILITIES``). An engine whose worker lacks one of them refuses the
    resource at its start."""
    on_refuse = OnRefuse.SKIP
    serves = ""
    """Field of a request that asks for it, as ``"grammar"``: until one with that field comes, none
    of its hooks is called and it costs nothing. Empty: it concerns all requests."""

    def attach(self, scheduler: AttachedScheduler) -> None:
        """Called once. Keep it to ``wake`` what was parked, to read its ``config`` and ``view``.

        Raises ``ConfigError`` if the two cannot work together.
        """

    def objection(self, add: AddRequest) -> str | None:
        """Why such a request can never be served, so that it is refused; ``None`` if it can."""
        return None

    def added(self, req: Request) -> None:
        """The request was queued: long preparations may begin."""

    def watches(self, req: Request) -> bool:
        """True if this resource must see the request in every step; others may be granted in bulk.

        Asked when it comes, and again when you call ``scheduler.watch_again``.
        """
        return True

    def serializes(self, req: Request) -> bool:
        """Must its last token be known before the next one is computed?

        Such a request is in one step at a time. Asked when ``watches`` is.
        """
        return False

    def begin_step(self, step: Step) -> None:
        """A step is about to be planned."""

    def extra(self, req: Request, step: Step) -> int:
        """Tokens to compute after the known ones: drafts to verify, for a request that decodes."""
        return 0

    def fit(self, req: Request, num_tokens: int, step: Step) -> Fit:
        """How many of these tokens it allows now, and why not more."""
        return Fit(num_tokens)

    def seated(self, req: Request, step: Step) -> None:
        """The request takes a seat (``req.slot``): it is new to the worker, or new again after a
        preemption. ``take`` follows."""

    def take(self, req: Request, num_tokens: int, step: Step) -> None:
        """All resources allowed the grant; called once per grant."""

    def parked(self, req: Request) -> None:
        """The request was parked for this resource and has the blocks it asked to ``hold``."""

    def release(self, req: Request) -> None:
        """The request was preempted or has finished (``req.is_finished``)."""

    def describe(self, plan: StepPlan) -> None:
        """Add this feature's part to the plan. A plan with a part is a step even without rows."""

    def masks(self, plan: StepPlan) -> Masks | None:
        """Allowed next tokens for the rows of ``plan.masks``, if this resource wrote that part.

        Asked when all steps before this one are settled; a row may have ended meanwhile. Rows that
        need none, as what they draw (``plan.masks.drawn``) is allowed, may be left out.
        """
        return None

    def counters(self) -> dict[str, int]:
        """What it has counted since the start, by name; ``SchedulerStats.counters`` has it as
        ``name.counter``."""
        return {}

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        """Read this feature's part of the result. An entry in ``result.errors`` ends that row."""

    def shutdown(self) -> None:
        """The engine ends: close what was opened."""

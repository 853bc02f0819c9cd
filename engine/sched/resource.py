"""Resource: something a request needs besides tokens and KV."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from engine.messages.step import StepPlan, StepResult
from engine.sched.request import Request

if TYPE_CHECKING:
    from engine.sched.builder import Step


class OnRefuse(Enum):
    """What a refusal means for the rest of the queue."""

    SKIP = "skip"  # later requests may go first
    CLOSE = "close"  # admission ends for this step
    PARK = "park"  # out of the queue until somebody wakes it


class Fit(NamedTuple):
    """How many tokens are allowed now; if fewer than asked, the reason (a short word).

    ``on_refuse`` is what it means for a waiting request that gets none (``None``: what the resource
    says of itself).
    """

    num_tokens: int
    cause: str = ""
    on_refuse: OnRefuse | None = None


class Resource:
    """LoRA slots, encoder budget, drafts, a ready grammar: each feature brings one.

    ``fit`` changes nothing and is monotone (``fit(n) <= n``; ``n <= m`` implies
    ``fit(n) <= fit(m)``), so the answers of several resources do not depend on their order.
    """

    name = "resource"
    on_refuse = OnRefuse.SKIP

    def watches(self, req: Request) -> bool:
        """Must this request be asked about in every step? Others may be granted in bulk."""
        return True

    def begin_step(self, step: Step) -> None:
        """A step is about to be planned."""

    def fit(self, req: Request, num_tokens: int, step: Step) -> Fit:
        """How many of these tokens it allows now, and why not more."""
        return Fit(num_tokens)

    def take(self, req: Request, num_tokens: int, step: Step) -> None:
        """Everybody agreed; called once per grant."""

    def release(self, req: Request) -> None:
        """The request was preempted or has finished."""

    def describe(self, plan: StepPlan) -> None:
        """Add this feature's part to the plan."""

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        """Read this feature's part of the result."""

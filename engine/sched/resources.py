"""All resources of a scheduler, asked and told together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.messages.requests import AddRequest
from engine.messages.step import StepPlan, StepResult
from engine.sched import answers
from engine.sched.faults import FaultLog
from engine.sched.request import Request, Status
from engine.sched.resource import Fit, OnRefuse, Resource

if TYPE_CHECKING:
    from engine.sched.builder import Step


class Resources:
    """Calls hooks of resources and checks their answers.

    One that raises or answers rubbish is named and refuses what it was asked for; after
    ``max_faults`` faults it is left out, and whom it had parked is to be woken.
    """

    def __init__(self, resources: Sequence[Resource], faults: FaultLog) -> None:
        self.members = list(resources)
        self._faults = faults
        self._num_faults = {id(resource): 0 for resource in resources}
        self._has_extra = any(
            type(resource).extra is not Resource.extra for resource in self.members
        )
        self._parked: dict[Request, Resource] = {}  # who was parked last as whom it asked
        self._orphans: list[Request] = []

    def objection(self, add: AddRequest) -> str | None:
        """Why some resource could never serve such a request."""
        for resource in self.members:
            answer: str | None
            answer = self._ask(resource, "objection", None, add, wrong=answers.wrong_objection)
            if answer:
                return answer
        return None

    def added(self, req: Request) -> None:
        self._tell("added", req)

    def watch(self, req: Request) -> bool:
        """Must the request be asked about in every step?"""
        wrong = answers.wrong_bool
        wishes = [self._ask(r, "watches", True, req, wrong=wrong) for r in self.members]
        return any(wishes)

    def begin_step(self, step: Step) -> None:
        self._tell("begin_step", step)

    def extra(self, req: Request, step: Step) -> int:
        """Tokens behind the known ones that some resource wants computed."""
        if not self._has_extra:
            return 0
        wrong = partial(answers.wrong_extra, most=req.max_total)
        wanted = [int(self._ask(r, "extra", 0, req, step, wrong=wrong)) for r in self.members]
        return max(wanted, default=0)

    def fit(self, req: Request, fit: Fit, step: Step) -> Fit:
        """What all of them allow of ``fit``, and the cause of the last refusal."""
        settled = fit.num_tokens <= 0
        while not settled:  # monotone answers: asking again until all agree ends
            settled = True
            for resource in self.members:
                answer = self._fit(resource, req, fit.num_tokens, step)
                if answer.num_tokens < fit.num_tokens:
                    on_refuse = answer.on_refuse or resource.on_refuse
                    cause = answer.cause or resource.name
                    fit = answer._replace(on_refuse=on_refuse, cause=cause, by=resource)
                    settled = False
            settled = settled or fit.num_tokens <= 0
        return fit

    def take(self, req: Request, num_tokens: int, step: Step) -> None:
        self._tell("take", req, num_tokens, step)

    def parked(self, req: Request, by: Resource | None) -> None:
        if by is not None:
            self._parked[req] = by
            if self._ask(by, "parked", False, req) is False:  # it does not know whom to wake
                self._orphans.append(req)

    def release(self, req: Request) -> None:
        if req.is_finished:  # one that loses its blocks may be parked still
            self._parked.pop(req, None)
        self._tell("release", req)

    def describe(self, plan: StepPlan) -> None:
        self._tell("describe", plan)

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        self._tell("settle", plan, result)

    def take_orphans(self) -> list[Request]:
        """Whom resources had parked that were left out since."""
        orphans, self._orphans = self._orphans, []
        return [req for req in orphans if req.status is Status.PARKED]

    def _fit(self, resource: Resource, req: Request, num_tokens: int, step: Step) -> Fit:
        fault = Fit(0, f"fault of {resource.name}", OnRefuse.SKIP)
        wrong = partial(answers.wrong_fit, most=num_tokens)
        answer: Fit = self._ask(resource, "fit", fault, req, num_tokens, step, wrong=wrong)
        return answer

    def _tell(self, hook: str, *args: Any) -> None:
        for resource in self.members:
            self._ask(resource, hook, None, *args)

    def _ask(
        self,
        resource: Resource,
        hook: str,
        instead: Any,
        *args: Any,
        wrong: Callable[[Any], str | None] = answers.no_answer,
    ) -> Any:
        """The resource's answer; ``instead`` if it raises or its answer is wrong."""
        begun = self._faults.timer()
        culprit = f"{type(resource).__name__}.{hook}"
        try:
            answer = getattr(resource, hook)(*args)
            fault = wrong(answer)
        except Exception as error:  # a stranger's code
            fault = answers.raised(error)
        self._faults.seconds[culprit] += self._faults.timer() - begun
        if fault is None:
            return answer
        about = args[0] if isinstance(args[0], Request) else None
        self._fault(resource, culprit, about, fault)
        return instead

    def _fault(self, resource: Resource, culprit: str, about: Request | None, what: str) -> None:
        self._faults.note(culprit, about, what)
        self._num_faults[id(resource)] += 1
        if self._num_faults[id(resource)] > self._faults.max_faults and resource in self.members:
            self._faults.note(culprit, None, f"{resource.name} is left out from now on")
            self.members = [other for other in self.members if other is not resource]
            self._orphans += [req for req, by in self._parked.items() if by is resource]

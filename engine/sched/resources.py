"""All resources of a scheduler, asked and told together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from engine.messages.requests import AddRequest
from engine.messages.step import StepPlan, StepResult
from engine.sched.faults import FaultLog
from engine.sched.request import Request
from engine.sched.resource import Fit, OnRefuse, Resource

if TYPE_CHECKING:
    from engine.sched.builder import Step


class Resources:
    """Calls hooks of resources. One that raises is named, refuses what it was asked for, and is
    left out after ``max_faults`` faults."""

    def __init__(self, resources: Sequence[Resource], faults: FaultLog) -> None:
        self.members = list(resources)
        self._faults = faults
        self._num_faults = {id(resource): 0 for resource in resources}
        self._has_extra = any(
            type(resource).extra is not Resource.extra for resource in self.members
        )

    def objection(self, add: AddRequest) -> str | None:
        """Why some resource could never serve such a request."""
        answers = (self._call(r, r.objection, None, add) for r in self.members)
        return next((answer for answer in answers if answer), None)

    def added(self, req: Request) -> None:
        for resource in self.members:
            self._call(resource, resource.added, None, req, about=req)

    def watch(self, req: Request) -> bool:
        """Must the request be asked about in every step?"""
        answers = {self._call(r, r.watches, True, req, about=req) for r in self.members}
        return True in answers

    def begin_step(self, step: Step) -> None:
        for resource in self.members:
            self._call(resource, resource.begin_step, None, step)

    def extra(self, req: Request, step: Step) -> int:
        """Tokens behind the known ones that some resource wants computed."""
        if not self._has_extra:
            return 0
        wanted = [self._call(r, r.extra, 0, req, step, about=req) for r in self.members]
        return int(max(wanted, default=0))

    def fit(self, req: Request, fit: Fit, step: Step) -> Fit:
        """What all of them allow of ``fit``, and the cause of the last refusal."""
        settled = fit.num_tokens == 0
        while not settled:  # monotone answers: asking again until all agree ends
            settled = True
            for resource in self.members:
                fault = Fit(0, f"fault of {resource.name}", OnRefuse.SKIP)
                answer = self._call(
                    resource, resource.fit, fault, req, fit.num_tokens, step, about=req
                )
                if answer.num_tokens < fit.num_tokens:
                    on_refuse = answer.on_refuse or resource.on_refuse
                    cause = answer.cause or resource.name
                    fit = answer._replace(on_refuse=on_refuse, cause=cause, by=resource)
                    settled = False
            settled = settled or fit.num_tokens <= 0
        return fit

    def take(self, req: Request, num_tokens: int, step: Step) -> None:
        for resource in self.members:
            self._call(resource, resource.take, None, req, num_tokens, step, about=req)

    def parked(self, req: Request, by: Resource | None) -> None:
        if by is not None:
            self._call(by, by.parked, None, req, about=req)

    def release(self, req: Request) -> None:
        for resource in self.members:
            self._call(resource, resource.release, None, req, about=req)

    def describe(self, plan: StepPlan) -> None:
        for resource in self.members:
            self._call(resource, resource.describe, None, plan)

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        for resource in self.members:
            self._call(resource, resource.settle, None, plan, result)

    def _call(
        self,
        resource: Resource,
        hook: Callable[..., Any],
        instead: Any,
        *args: Any,
        about: Request | None = None,
    ) -> Any:
        begun = self._faults.timer()
        culprit = f"{type(resource).__name__}.{hook.__name__}"
        try:
            return hook(*args)
        except Exception as error:  # a stranger's code
            self._fault(resource, culprit, about, f"{type(error).__name__}: {error}")
            return instead
        finally:
            self._faults.seconds[culprit] += self._faults.timer() - begun

    def _fault(self, resource: Resource, culprit: str, about: Request | None, what: str) -> None:
        self._faults.note(culprit, about, what)
        self._num_faults[id(resource)] += 1
        if self._num_faults[id(resource)] > self._faults.max_faults:
            self._faults.note(culprit, None, f"{resource.name} is left out from now on")
            self.members = [other for other in self.members if other is not resource]

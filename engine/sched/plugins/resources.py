"""Calls the hooks of all resources of a scheduler and checks the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.errors import RequestError
from engine.messages.kv_orders import Loaded
from engine.messages.requests import AddRequest, Arrival
from engine.messages.step import Masks, StepPlan, StepResult
from engine.sched.plugins import answers
from engine.sched.plugins.hooks import FaultLog
from engine.sched.request import Request, Status
from engine.sched.resource import Fit, OnRefuse, Resource
from engine.sched.table import SERIAL, WATCHED

if TYPE_CHECKING:
    from engine.sched.step_state import Step


HOOKS = (
    *("objection", "added", "arrived", "transferred", "reset"),
    *("watches", "serializes", "begin_step", "extra"),
    *("fit", "seated", "take", "parked", "release", "describe", "masks", "settle"),
    *("counters", "shutdown"),
)
ROW_HOOKS = ("extra", "fit", "take")  # called for one request in one step


class Own(NamedTuple):
    """A resource that overrides a hook, and the label of this hook in faults and times."""

    resource: Resource
    label: str  # name of the hook in faults and times


class Resources:
    """Calls the hooks that resources override, and checks their results.

    A hook that raises or returns an invalid value counts as a refusal. After more than
    ``max_faults`` faults the resource is disabled and the requests that it parked are woken.
    """

    def __init__(self, resources: Sequence[Resource], faults: FaultLog) -> None:
        self.members = list(resources)
        self._faults = faults
        self._timer = faults.timer
        self._seconds = faults.seconds
        self._num_faults = {id(resource): 0 for resource in resources}
        self._asleep = {resource.serves for resource in resources if resource.serves}
        self._own = self._by_hook()
        self._parked: dict[Request, Resource] = {}  # the resource that parked each request
        self._orphans: list[Request] = []

    def check(self, add: AddRequest) -> None:
        """Raise ``RequestError`` if a resource could never serve the request."""
        if self._asleep:
            self._awaken(add)
        for own in self._own["objection"]:
            answer: str | None
            answer = self._call(own, "objection", None, add, wrong=answers.wrong_objection)
            if answer:
                message = f"request {add.request_id!r}: {answer}"
                raise RequestError(message, param=own.resource.serves or None)

    def added(self, req: Request) -> None:
        self._notify("added", req)

    def arrived(self, arrival: Arrival) -> None:
        self._notify("arrived", arrival)

    def transferred(self, report: Loaded) -> None:
        self._notify("transferred", report)

    def reset(self) -> None:
        self._notify("reset")

    def flags(self, req: Request) -> int:
        """The request's flags: ``WATCHED`` if a resource takes part in each of its steps,
        ``SERIAL`` if it may be in only one step in flight."""
        watched, serial = (self._does_any(hook, req) for hook in ("watches", "serializes"))
        return WATCHED * watched + SERIAL * serial

    def override(self, *hooks: str) -> bool:
        """True if any resource overrides one of these hooks."""
        return any(self._own[hook] for hook in hooks)

    def begin_step(self, step: Step) -> None:
        self._notify("begin_step", step)

    def extra(self, req: Request, step: Step) -> int:
        """The largest number of draft tokens that a resource wants to verify after the request's
        last token."""
        most = 0
        for own in self._own["extra"]:
            begun = self._timer()
            try:
                wanted = own.resource.extra(req, step)
                fault = answers.wrong_extra(wanted, req.max_total)
            except Exception as error:  # plug-in code
                fault = answers.raised(error)
            self._seconds[own.label] += self._timer() - begun
            if fault is None:
                most = max(most, int(wanted))
            else:
                self._fault(own, req, fault)
        return most

    def fit(self, req: Request, num_tokens: int, step: Step) -> Fit:
        """How many of ``num_tokens`` further tokens all resources allow the request. If fewer, the
        result names the resource that refuses, and its reason."""
        own_fits = self._own["fit"]
        fit = self._agreed(own_fits, req, num_tokens, step)
        if fit.num_tokens <= 0:  # e.g. one wants to end a chunk where another cannot split it
            firm = [own for own in own_fits if not own.resource.is_flexible]
            if len(firm) < len(own_fits):
                fit = self._agreed(firm, req, num_tokens, step)
        return fit

    def _agreed(self, own_fits: Sequence[Own], req: Request, num_tokens: int, step: Step) -> Fit:
        fit = Fit(num_tokens)
        settled = not own_fits
        while not settled:  # ends, since ``fit`` is monotone
            settled = True
            for own in own_fits:
                answer = self._fit(own, req, fit.num_tokens, step)
                if answer.num_tokens < fit.num_tokens:
                    on_refuse = answer.on_refuse or own.resource.on_refuse
                    cause = answer.cause or own.resource.name
                    fit = answer._replace(on_refuse=on_refuse, cause=cause, by=own.resource)
                    if fit.num_tokens <= 0:  # the request may not be ready for others
                        return fit
                    settled = False
        return fit

    def seated(self, req: Request, step: Step) -> None:
        self._notify("seated", req, step)

    def take(self, req: Request, num_tokens: int, step: Step) -> None:
        self._notify("take", req, num_tokens, step)

    def parked(self, req: Request, by: Resource | None) -> None:
        if by is not None:
            self._parked[req] = by
            own = Own(by, f"{type(by).__name__}.parked")
            parked = self._call(own, "parked", False, req, wrong=answers.no_answer)
            if parked is False:  # the hook failed, so the resource would not wake the request
                self._orphans.append(req)

    def release(self, req: Request) -> None:
        if req.is_finished:  # a request that only loses its blocks may still be parked
            self._parked.pop(req, None)
        self._notify("release", req)

    def describe(self, plan: StepPlan) -> None:
        self._notify("describe", plan)

    def masks(self, plan: StepPlan) -> Masks | None:
        """Token masks of the batch rows in ``plan.masks``. ``None`` if they cannot be made: these
        rows then end with an error."""
        for own in self._own["masks"]:
            masks: Masks | None
            masks = self._call(own, "masks", None, plan, wrong=answers.wrong_masks)
            if masks is not None:
                return masks
        return None

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        self._notify("settle", plan, result)

    def shutdown(self) -> None:
        self._notify("shutdown")

    def counters(self) -> dict[str, int]:
        """The counters of all resources; a key is ``resource.counter``."""
        counts: dict[str, int] = {}
        for own in self._own["counters"]:
            counted = self._call(own, "counters", {}, wrong=answers.wrong_counters)
            counts |= {f"{own.resource.name}.{name}": int(n) for name, n in counted.items()}
        return counts

    def take_orphans(self) -> list[Request]:
        """Return, once each, parked requests that no resource will wake, as theirs has failed."""
        orphans, self._orphans = self._orphans, []
        return [req for req in orphans if req.status is Status.PARKED]

    # -- helpers

    def _awaken(self, add: AddRequest) -> None:
        """Enable resources that serve request fields which no request had before ``add``."""
        if given := {field for field in self._asleep if getattr(add, field, None)}:
            self._asleep -= given
            self._own = self._by_hook()

    def _by_hook(self) -> dict[str, list[Own]]:
        return {
            hook: [
                Own(resource, f"{type(resource).__name__}.{hook}")
                for resource in self.members
                if resource.serves not in self._asleep and _has_own(resource, hook)
            ]
            for hook in HOOKS
        }

    def _fit(self, own: Own, req: Request, num_tokens: int, step: Step) -> Fit:
        begun = self._timer()
        try:
            answer = own.resource.fit(req, num_tokens, step)
            fault = answers.wrong_fit(answer, num_tokens)
        except Exception as error:  # plug-in code
            fault = answers.raised(error)
        self._seconds[own.label] += self._timer() - begun
        if fault is None:
            return answer
        self._fault(own, req, fault)
        return Fit(0, f"fault of {own.resource.name}", OnRefuse.SKIP)

    def _does_any(self, hook: str, req: Request) -> bool:
        """True if this hook of any resource returns True for the request or raises an error."""
        own_hooks, wrong = self._own[hook], answers.wrong_bool
        wishes = [self._call(own, hook, True, req, wrong=wrong) for own in own_hooks]
        return any(wishes)

    def _notify(self, hook: str, *args: Any) -> None:
        for own in self._own[hook]:
            begun = self._timer()
            try:
                getattr(own.resource, hook)(*args)
            except Exception as error:  # plug-in code
                self._fault(own, _request_in(args), answers.raised(error))
            self._seconds[own.label] += self._timer() - begun

    def _call(
        self,
        own: Own,
        hook: str,
        instead: Any,
        *args: Any,
        wrong: Callable[[Any], str | None],
    ) -> Any:
        """Call a hook; return ``instead`` if it raises or if ``wrong`` returns an error text."""
        begun = self._timer()
        try:
            answer = getattr(own.resource, hook)(*args)
            fault = wrong(answer)
        except Exception as error:  # plug-in code
            fault = answers.raised(error)
        self._seconds[own.label] += self._timer() - begun
        if fault is None:
            return answer
        self._fault(own, _request_in(args), fault)
        return instead

    def _fault(self, own: Own, about: Request | None, what: str) -> None:
        resource = own.resource
        self._faults.record(own.label, about, what)
        self._num_faults[id(resource)] += 1
        if self._num_faults[id(resource)] > self._faults.max_faults and resource in self.members:
            self._faults.record(own.label, None, f"resource {resource.name} is now disabled")
            self.members = [other for other in self.members if other is not resource]
            self._own = self._by_hook()
            self._orphans += [req for req, by in self._parked.items() if by is resource]


def _has_own(resource: Resource, hook: str) -> bool:
    """True if the resource overrides this hook or, for ``watches``, any of ``ROW_HOOKS``: hooks
    that are called for single requests in each step."""
    has_own = getattr(type(resource), hook) is not getattr(Resource, hook)
    if hook == "watches":
        return has_own or any(_has_own(resource, other) for other in ROW_HOOKS)
    return has_own


def _request_in(args: Sequence[Any]) -> Request | None:
    """The first argument of a hook if it is a request, else ``None``."""
    return args[0] if args and isinstance(args[0], Request) else None

"""Calls the hooks of a policy, checks the results, and uses defaults where the policy fails.

FaultLog       counts faults of plug-ins and the time spent in their hooks
ReentryGuard   raises an error in a hook that calls the scheduler (``not_reentrant``)
PolicyGuard    wraps a policy so that its hooks never raise

Hooks are plug-in code. They may raise, return requests that do not exist or other invalid values,
but they cannot corrupt budgets, seats or blocks: only the scheduler changes those, after all hooks
were called. A fault is logged with the hook's name and the default result is used instead;
after ``max_faults`` faults the policy is disabled permanently and requests run in order of arrival.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, wraps
from itertools import islice
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.sched.plugins import answers
from engine.sched.plugins.ranks import Last, RankCheck
from engine.sched.policy import (
    Admission,
    Limits,
    Policy,
    SchedView,
    Verdict,
    as_columns,
    rank_of_one,
)
from engine.sched.predict.cost import StepShape
from engine.sched.request import Request
from engine.sched.roster import RankedQueue
from engine.sched.step_state import Step
from engine.sched.view import View

logger = logging.getLogger("engine.sched")
NO_LIMITS = Limits()
SLOW_SECONDS = 1.0  # a hook that takes longer than this in one step is logged

HOOKS = (
    *("rank", "ranks", "limits", "evict", "order", "next_waiting", "admit", "chunk"),
    *("outranks", "takes_blocks", "victim"),
    *("on_add", "on_grant", "on_preempt", "on_tokens", "on_step", "on_finish"),
)
# A policy with one of these hooks decides itself how many prompt tokens a step computes.
SHAPING = ("limits", "order", "chunk")
# Hooks that decide which requests run; a policy without any of them gets the default order.
MAKING_ROOM = ("takes_blocks", "outranks", "victim")
DECIDING = frozenset(("limits", "order", "next_waiting", "admit", "chunk", "victim"))


class FaultLog:
    """Counts the faults of plug-ins and the time spent in their hooks."""

    def __init__(self, max_faults: int, timer: Callable[[], float]) -> None:
        self.max_faults = max_faults
        self.timer = timer
        self.messages: list[str] = []  # of the first hundred faults
        self.num_faults = 0
        self.reentry = ReentryGuard()
        self.seconds: defaultdict[str, float] = defaultdict(float)  # by hook
        self._begun = 0.0
        self._seconds_before: dict[str, float] = {}  # ``seconds`` at the start of the step
        self._slowest = SLOW_SECONDS

    def begin_step(self) -> None:
        """Start to measure the hooks of the next step."""
        self.reentry.begin("schedule")
        self._begun, self._seconds_before = self.timer(), dict(self.seconds)

    def end_step(self) -> None:
        """Finish measuring a step. Logs its slowest hook if that took more than a second, and at
        least twice as long as the last hook that was logged."""
        self.reentry.end()
        if self.timer() - self._begun < self._slowest:
            return
        before = self._seconds_before
        spent = {hook: now - before.get(hook, 0.0) for hook, now in self.seconds.items()}
        hook = max(spent, key=spent.__getitem__, default="")
        if hook and spent[hook] >= self._slowest:
            self._slowest = 2 * spent[hook]
            logger.warning("%s took %.1f s in one step and delayed all requests", hook, spent[hook])

    def record(self, culprit: str, request: Request | None, what: str) -> None:
        """Count and log one fault."""
        about = f", request {request.request_id}" if request is not None else ""
        self.num_faults += 1
        if len(self.messages) < 100:
            self.messages.append(f"{culprit}{about}: {what}")
            logger.warning("%s; the default is used", self.messages[-1])


class ReentryGuard:
    """Raises ``RuntimeError`` if a scheduler method is called while another one runs, as a hook
    might do."""

    def __init__(self) -> None:
        self._doing = ""

    def begin(self, what: str) -> None:
        if self._doing:
            raise RuntimeError(
                f"{what}() was called within {self._doing}(), but must be called between two "
                "steps (only wake() and watch_again() may be called at any time)"
            )
        self._doing = what

    def end(self) -> None:
        self._doing = ""


class GuardsReentry(Protocol):
    """A class whose ``not_reentrant`` methods must not run within each other."""

    @property
    def reentry(self) -> ReentryGuard: ...


S = TypeVar("S", bound=GuardsReentry)
P = ParamSpec("P")
R = TypeVar("R")


def not_reentrant(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate a scheduler method that must not be called while another such method runs."""

    @wraps(method)
    def alone(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        guard = self.reentry
        guard.begin(method.__name__)
        try:
            return method(self, *args, **kwargs)
        finally:
            guard.end()

    return alone


class Default(Policy):
    """The default policy: order of arrival, with the hooks of the base class."""

    def rank(self, req: Request, view: SchedView) -> tuple[Any, ...]:
        return (req.arrival,)


class PolicyGuard(Policy):
    """Wraps a policy so that its hooks never raise: a default replaces each invalid result."""

    def __init__(self, inner: Policy, faults: FaultLog, view: View) -> None:
        self.inner = inner
        self.faults = faults
        self.is_left_out = False
        self.uses_ledger = bool(inner.uses_ledger)  # read once: a ledger must see all grants
        self._view = view
        self._name = type(inner).__name__
        self._label = {hook: f"{self._name}.{hook}" for hook in HOOKS}
        if type(inner).rank is rank_of_one:
            self._label["rank"] = self._label["ranks"]
        self._timer = faults.timer
        self._seconds = faults.seconds
        self._in_use = {
            hook for hook in HOOKS if getattr(type(inner), hook) is not getattr(Policy, hook)
        }
        self._default = Default()
        self._ranks = RankCheck()
        self._num_faults = 0
        self.is_rerank_due = False  # the ranks of both queues must be computed again

    # -- properties of the policy

    @property
    def dynamic(self) -> bool:  # type: ignore[override]
        return bool(self.inner.dynamic) and not self.is_left_out

    @property
    def waiting_may_preempt(self) -> bool:  # type: ignore[override]
        return bool(self.inner.waiting_may_preempt) and not self.is_left_out

    def overrides(self, *hooks: str) -> bool:
        """True if the policy overrides any of these hooks."""
        return not self._in_use.isdisjoint(hooks)

    @property
    def writes_both(self) -> bool:
        """True if the policy defines both ``rank`` and ``ranks``."""
        return "ranks" in self._in_use and type(self.inner).rank is not rank_of_one

    def idle_hooks(self, step: Step) -> str:
        """Names of the policy's hooks that may have kept all requests from running, as message
        text."""
        why = ""
        hooks = [hook for hook in HOOKS if hook in self._in_use and hook in DECIDING]
        if step.short:
            own = [hook for hook in MAKING_ROOM if hook in self._in_use]
            hooks = own or hooks
            why = f" ({step.short[0]} lacks KV blocks and may take them from no other)"
        return ", ".join(self._label[hook] for hook in hooks) + why

    def overrule(self) -> Policy:
        """The default policy with the requests' present ranks, for a step in which this policy
        schedules nothing."""
        return _Overruled()

    def take_rerank(self) -> bool:
        """True once after the policy was disabled: the caller must then rank all requests again."""
        due, self.is_rerank_due = self.is_rerank_due, False
        for req in self._view.parked if due else ():  # they return to queues with other ranks
            req.rank = (req.arrival,)
        return due

    def call_other(self, hook: str, wrong: Callable[[Any], str | None], *args: Any) -> Any:
        """Call a policy method that ``Policy`` does not define. Returns ``None`` if the method
        raises, or if ``wrong`` returns an error text for its result."""
        self._label.setdefault(hook, f"{self._name}.{hook}")
        return self._call(hook, wrong, *args)

    def disable(self, why: str) -> None:
        """Use the default policy from now on. The caller must rank all requests again."""
        self.is_left_out = self.is_rerank_due = True
        self._in_use.clear()
        logger.error(
            "policy %s is disabled after %s; requests now run in order of arrival", self._name, why
        )

    # -- hooks

    def rank(self, req: Request, view: SchedView) -> tuple[Any, ...]:
        if self.is_left_out and not self.is_rerank_due:
            return (req.arrival,)
        rank = None
        if not self.is_left_out:  # else the queues are still sorted by its ranks
            rank = self._call("rank", self._ranks.wrong, req, view)
        return rank if rank is not None else req.rank or (Last(),)

    def rerank(self, queue: RankedQueue, by_row: NDArray[np.object_]) -> None:
        """Sort a queue by the policy's new ranks; a request with an invalid rank keeps its old
        rank. ``by_row``: the request in each row of the scheduler's table."""
        if "ranks" not in self._in_use or not len(queue):
            queue.rerank(self.ranks(queue, self._view))
            return
        answer = self._call("ranks", partial(self._wrong_ranks, len(queue)), queue, self._view)
        if answer is None:
            return
        columns = as_columns(answer)
        if columns is not None:
            queue.rerank_columns([answers.as_sortable(column) for column in columns], by_row)
            return
        checked = [self._checked(*each, "ranks") for each in zip(queue, answer, strict=True)]
        queue.rerank(checked)

    def ranks(self, reqs: Sequence[Request], view: SchedView) -> list[tuple[Any, ...]]:
        """The rank of each request; an invalid rank is replaced by the request's previous one."""
        if self.is_left_out:
            return [self.rank(req, view) for req in reqs]
        ranks: list[Any] = []
        begun, ask, fault = self._timer(), self.inner.rank, None
        try:
            for req in reqs:
                ranks.append(ask(req, view))
        except Exception as error:  # plug-in code
            fault = answers.raised(error)
        self._seconds[self._label["rank"]] += self._timer() - begun
        if not self._ranks.are_good(ranks):
            ranks = [self._checked(req, rank) for req, rank in zip(reqs, ranks, strict=False)]
        if fault is not None:
            broken = reqs[len(ranks)]
            if not self.is_left_out:
                self._fault("rank", fault, broken)
            ranks.append(broken.rank or (Last(),))
            ranks += [self.rank(req, view) for req in reqs[len(ranks) :]]
        return ranks

    def limits(self, view: SchedView) -> Limits:
        if "limits" not in self._in_use:
            return NO_LIMITS
        limits: Limits = self._answer("limits", answers.wrong_limits, view)
        return limits

    def evict(self, view: SchedView) -> Iterable[Request]:
        if "evict" not in self._in_use:
            return ()
        # A policy may yield a request twice; the limit stops a policy that yields for ever.
        wrong = partial(answers.wrong_victims, self._view)
        named = self._call("evict", wrong, view, at_most=len(view.running) + 1)
        return dict.fromkeys(named or ())

    def order(self, view: SchedView) -> Iterator[Request]:
        if "order" not in self._in_use:
            yield from super().order(view)
            return
        named = self._call("order", answers.wrong_iterable, view)
        fault = None if named is not None else ""
        rest, timer, spent = iter(named or ()), self._timer, 0.0
        known = self._view.by_id.get
        try:
            while fault is None:
                begun = timer()
                try:
                    req = next(rest, None)
                except Exception as error:  # plug-in code
                    req, fault = None, answers.raised(error)
                spent += timer() - begun
                if req.__class__ is Request and known(req.request_id) is req:
                    yield req
                elif req is None:
                    break
                else:
                    fault = f"returns {answers.shown(req)}, which neither waits nor runs"
        finally:  # the caller may stop early
            self._seconds[self._label["order"]] += spent
        if fault is not None:
            if fault:
                self._fault("order", fault)
            yield from self._default.order(view)

    def next_waiting(self, view: SchedView) -> Request | None:
        if "next_waiting" not in self._in_use:
            return super().next_waiting(view)
        wrong = partial(answers.wrong_next, self._view)
        best: Request | None = self._answer("next_waiting", wrong, view)
        return best

    def admit(self, req: Request, view: SchedView) -> Admission:
        if "admit" not in self._in_use:
            return super().admit(req, view)
        admission: Admission = self._answer("admit", answers.wrong_admission, req, view)
        return admission

    def chunk(self, req: Request, num_tokens: int, view: SchedView) -> int:
        if "chunk" not in self._in_use:
            return num_tokens
        return self.chunks_of(num_tokens, view)(req)

    def chunks_of(self, num_tokens: int, view: SchedView) -> Callable[[Request], int]:
        """Return ``chunk`` with ``num_tokens`` and ``view`` bound: a function of the request. For
        many requests it is faster than ``chunk``."""
        ask, timer, seconds, label = self.inner.chunk, self._timer, self._seconds, self._label
        in_use, name = self._in_use, label["chunk"]

        def chunk(req: Request) -> int:
            if not in_use:  # disabled meanwhile
                return num_tokens
            begun = timer()
            try:
                answer = ask(req, num_tokens, view)
            except Exception as error:  # plug-in code
                seconds[name] += timer() - begun
                self._fault("chunk", answers.raised(error), req)
                return num_tokens
            seconds[name] += timer() - begun
            if answer.__class__ is int and 0 <= answer <= num_tokens:
                return answer
            try:
                fault = answers.wrong_count(answer, num_tokens)
                count = int(answer) if fault is None else num_tokens
            except Exception as error:  # plug-in code
                fault, count = answers.raised(error), num_tokens
            if fault is not None:
                self._fault("chunk", fault, req)
            return count

        return chunk

    def outranks(self, req: Request, other: Request) -> bool:
        if "outranks" not in self._in_use:
            return super().outranks(req, other)
        timer, fault = self._timer, None
        begun = timer()
        try:
            answer = self.inner.outranks(req, other)
        except Exception as error:  # plug-in code
            answer, fault = None, answers.raised(error)
        self._seconds[self._label["outranks"]] += timer() - begun
        if answer.__class__ is bool and fault is None:
            return answer
        if fault is None:
            try:
                fault = answers.wrong_bool(answer)
            except Exception as error:  # plug-in code
                fault = answers.raised(error)
            if fault is None:
                return bool(answer)
        self._fault("outranks", fault, req)
        return self._default.outranks(req, other)

    def victim(
        self, candidates: Sequence[Request], req: Request, view: SchedView
    ) -> Request | None:
        if "victim" not in self._in_use:
            return candidates[-1]
        given = tuple(candidates)

        def wrong(answer: object) -> str | None:
            known = answer is None or any(answer is other for other in given)
            return None if known else f"returns {answer!r}, which is not a candidate"

        victim = self._call("victim", wrong, given, req, view)
        return candidates[-1] if self._failed else victim

    def on_add(self, req: Request, view: SchedView) -> Verdict:
        verdict: Verdict = self._answer("on_add", answers.wrong_verdict, req, view)
        return verdict

    def on_grant(self, req: Request, num_tokens: int, view: SchedView) -> None:
        if "on_grant" not in self._in_use:
            return
        self.grants_of(num_tokens, view)(req)

    def grants_of(self, num_tokens: int, view: SchedView) -> Callable[[Request], None]:
        """Return a function that calls ``on_grant`` for a request with these arguments."""
        tell, timer, seconds, label = self.inner.on_grant, self._timer, self._seconds, self._label
        in_use, name = self._in_use, label["on_grant"]

        def on_grant(req: Request) -> None:
            if not in_use:  # disabled meanwhile
                return
            begun = timer()
            try:
                tell(req, num_tokens, view)
            except Exception as error:  # plug-in code
                self._fault("on_grant", answers.raised(error), req)
            seconds[name] += timer() - begun

        return on_grant

    def takes_blocks(self, req: Request, other: Request) -> bool:
        if "takes_blocks" not in self._in_use:
            return self.outranks(req, other)
        return bool(self._answer("takes_blocks", answers.wrong_bool, req, other))

    def on_preempt(self, req: Request, view: SchedView) -> None:
        if "on_preempt" in self._in_use:
            self._answer("on_preempt", answers.no_answer, req, view)

    def on_tokens(self, reqs: Sequence[Request], view: SchedView) -> None:
        if "on_tokens" in self._in_use and reqs:
            self._answer("on_tokens", answers.no_answer, tuple(reqs), view)

    def on_step(self, shape: StepShape, view: SchedView) -> None:
        self._answer("on_step", answers.no_answer, shape, view)

    def on_finish(self, req: Request, view: SchedView) -> None:
        if "on_finish" in self._in_use:
            self._answer("on_finish", answers.no_answer, req, view)

    # -- calls

    _failed = False  # True if the last call failed

    def _answer(self, hook: str, wrong: Callable[[Any], str | None], *args: Any) -> Any:
        """Call a hook of the policy or, if it is missing or fails, of the default policy."""
        if hook in self._in_use:
            answer = self._call(hook, wrong, *args)
            if not self._failed:
                return answer
            return getattr(Policy, hook)(self._default, *args)
        return getattr(Policy, hook)(self, *args)

    def _call(
        self, hook: str, wrong: Callable[[Any], str | None], *args: Any, at_most: int | None = None
    ) -> Any:
        """Call a hook. If it raises, or ``wrong`` returns an error text for its result, count a
        fault, set ``_failed`` and return ``None``.

        ``at_most``: read at most this many items of the result, an iterable.
        """
        begun = self._timer()
        answer, self._failed = None, False
        try:
            answer = getattr(self.inner, hook)(*args)
            if at_most is not None and isinstance(answer, Iterable):
                answer = list(islice(answer, at_most))
            fault = wrong(answer)
        except Exception as error:  # plug-in code
            fault = answers.raised(error)
        self._seconds[self._label[hook]] += self._timer() - begun
        if fault is None:
            return answer
        self._fault(hook, fault, next((arg for arg in args if isinstance(arg, Request)), None))
        return None

    def _fault(self, hook: str, what: str, request: Request | None = None) -> None:
        self._failed = True
        self._num_faults += 1
        self.faults.record(self._label[hook], request, what)
        if self._num_faults > self.faults.max_faults and not self.is_left_out:
            self.disable(f"{self._num_faults} faults")

    # -- checks

    def _checked(self, req: Request, rank: Any, hook: str = "rank") -> tuple[Any, ...]:
        """Return ``rank`` if it is valid, else the request's previous rank."""
        fault = None if self.is_left_out else self._ranks.wrong(rank)
        if fault is not None:
            self._fault(hook, fault, req)
        # A request without a valid rank keeps its previous rank.
        return (req.rank or (Last(),)) if self.is_left_out or fault is not None else rank

    def _wrong_ranks(self, num_requests: int, answer: object) -> str | None:
        """Return an error text unless ``answer`` has exactly one rank per request."""
        columns = as_columns(answer)
        if columns is None:
            return answers.wrong_list(answer, num_requests)
        fault = answers.wrong_columns(columns, num_requests)
        return fault or self._ranks.wrong_places(len(columns))


class _Overruled(Default):
    """The default policy, except that each request keeps its present rank."""

    def rank(self, req: Request, view: SchedView) -> tuple[Any, ...]:
        return req.rank

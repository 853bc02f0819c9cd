"""Trials of a policy, for failures that show only over many steps.

The trials are: an overload, crowds of requests, many small requests (to find data that grows), two
engines in one process, and other interpreters. None depends on the speed of the machine. A policy
may declare failures of the first two as intended (``Policy.by_design``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from statistics import median
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from engine.errors import ConfigError
from engine.sched.plugins.find import find_policy
from engine.sched.policy import Policy
from engine.sched.predict.lengths import GuardedPredictor
from policylab.verify.books import OURS, find_growth
from policylab.verify.case import Case
from policylab.verify.crowd import ALIKE, KINDS, MIXED, USERS, Crowd, CrowdKind, SeenState, Starved
from policylab.verify.draw import draw_case
from policylab.verify.elsewhere import Elsewhere, source_of
from policylab.verify.otherwise import PARTS, Question, with_policy
from policylab.verify.shrink import GoesOn, shrink, to_its_end
from policylab.verify.simulation import Simulation
from policylab.verify.starvation import Outcome, Waited, wait_in_overload
from policylab.verify.swarm import Broken, FoundCase, name_of, reproduction, smallest, what_broke

MIN_THROUGHPUT = 0.5  # share of fcfs's throughput, below which a policy fails
MIN_STEP_TOKENS = 0.6  # likewise for tokens computed per step, with long prompts
MAX_IDLE = 0.1  # share of steps in which nothing runs
MAX_UNLIKE = 8.0  # times as long as other users with the same requests
MOST_EVENTS = 60  # events in a case that is printed, at most
MOST_NAMES = 6  # user names taken from the policy's code, at most
SEEDS = 12  # cases planned in several interpreters
CROWD_STEPS = 250  # steps of crowds planned there

STARVATION, THROUGHPUT, RECOMPUTING = "starvation", "throughput", "recomputing"
EXCUSES = (STARVATION, THROUGHPUT, RECOMPUTING)


class TrialFailure(NamedTuple):
    """A failure of a policy in a trial. ``excuse``: the key of ``by_design`` that can declare it as
    intended; empty if none can. ``program``: a small program that shows it, or empty."""

    message: str
    excuse: str = ""
    program: str = ""
    is_rule: bool = False
    """True if a rule is broken, so that further trials would only show the same failure."""


@dataclass
class Trials:
    """The results of all trials."""

    failures: list[TrialFailure] = field(default_factory=list)
    by_design: list[str] = field(default_factory=list)
    """Results that the policy declares to be intended, each with its reason."""
    not_shown: list[str] = field(default_factory=list)
    """Trials that were not possible, each with the reason."""
    waited: Waited | None = None
    """The outcome of the overload trial for the request that waits in it."""


def run_trials(
    policy: Any,
    options: dict[str, Any] | None = None,
    *,
    max_wait: int | None = 1000,
    predictor: Any = None,
    goes_on: GoesOn = to_its_end,
) -> Trials:
    """Run all trials of a policy.

    ``max_wait``: steps within which a request must be served in an overload; ``None``: it may
    starve. ``predictor``: the engine's length predictor; ``None``: "history". ``goes_on``: limit of
    shrinking, see ``shrink``. Raises ``ConfigError`` for an invalid ``by_design``."""
    stated = statements(find_policy(policy, options or {}))
    trials = Trials()
    name = name_of(policy)
    found: list[TrialFailure] = []
    with ExitStack() as stack:
        others = _begin_elsewhere(stack, policy, options, trials)
        for failure in chain(
            _caught("in an overload", _in_overload(policy, options or {}, max_wait, trials)),
            _in_crowds(policy, options or {}, predictor, goes_on),
            _caught("as small requests come and go", _over_time(policy, options or {})),
            _elsewhere(policy, options, others, trials, goes_on),
            _caught("as two engines run at once", _two_at_once(policy, options or {})),
        ):
            found.append(failure)
            if failure.is_rule:
                break
    for failure in found:
        if failure.excuse in stated:
            why = f"{failure.message}. By design, it states: {stated[failure.excuse]}"
            trials.by_design.append(f"{name}: {why}")
        elif failure.excuse != STARVATION or max_wait is not None:
            trials.failures.append(failure._replace(message=f"{name}: {_with_way_out(failure)}"))
    return trials


def _caught(when: str, failures: Iterator[TrialFailure]) -> Iterator[TrialFailure]:
    """Yield the failures of a trial. An exception in the trial becomes a failure whose message
    contains ``when``, a text such as "in an overload"."""
    try:
        yield from failures
    except Exception as error:  # any error is a finding
        yield TrialFailure(f"breaks a rule {when}: {what_broke(error, 0).message}", is_rule=True)


def _with_way_out(failure: TrialFailure) -> str:
    if not failure.excuse:
        return failure.message
    stated = f'by_design = {{"{failure.excuse}": "why"}}'
    return f"{failure.message}; if it is meant to, state so in the class: {stated}"


def statements(policy: Policy) -> dict[str, str]:
    """Check and return the policy's ``by_design``. Raises ``ConfigError`` if it is invalid."""
    name, stated = type(policy).__name__, policy.by_design
    if not hasattr(stated, "items"):
        raise ConfigError(
            f"by_design of {name} is {stated!r}, must be a dict as in {{'starvation': 'why'}}"
        )
    for what, why in stated.items():
        if what not in EXCUSES:
            raise ConfigError(
                f"by_design of {name} has the key {what!r}, must be one of: {', '.join(EXCUSES)}"
            )
        if not (isinstance(why, str) and why.strip()):
            raise ConfigError(f"by_design[{what!r}] of {name} is {why!r}, must be the reason")
    return dict(stated)


# -- crowds


def _in_overload(
    policy: Any, options: dict[str, Any], max_wait: int | None, trials: Trials
) -> Iterator[TrialFailure]:
    """Failures of the trial in which a request waits while better-ranked requests keep arriving."""
    if max_wait is None:
        return
    waited = trials.waited = wait_in_overload(policy, options, max_wait)
    times = waited.num_refusals
    refused = f", accepted after {times} refusals," if times else ""
    if waited.outcome is Outcome.STARVED:
        yield TrialFailure(
            f"a request{refused} was not served in {max_wait} steps while better-ranked ones kept "
            "arriving; improve its rank with its waiting time",
            STARVATION,
        )
    elif waited.outcome is Outcome.DEFERRED:
        yield TrialFailure(
            f"a request{refused} was not served in {max_wait} steps, since on_add keeps it out of "
            "the queue (Defer); defer it to a time that comes",
            STARVATION,
        )


def _in_crowds(
    policy: Any, options: dict[str, Any], predictor: Any, goes_on: GoesOn
) -> Iterator[TrialFailure]:
    users = (*USERS, *names_in(policy))
    for kind in KINDS:
        crowd = Crowd(policy, options, kind, users=users, predictor=predictor or "history")
        try:
            seen = crowd.run()
            check_predictor(crowd.simulation)
        except Exception as error:  # any error is a finding
            broken = what_broke(error, crowd.simulation.num_steps)
            yield _broken(crowd.case, broken, kind, goes_on)
            return
        yield from _judged(seen, of_fcfs(kind, len(users)), kind)


def _judged(seen: SeenState, fcfs: SeenState, kind: CrowdKind) -> Iterator[TrialFailure]:
    """Failures of a policy that served a crowd, compared with fcfs. If it refused most requests,
    only starvation counts."""
    where = f"in a crowd of {kind.name}"
    if seen.starved is not None:
        yield TrialFailure(f"{_shown(seen.starved)} {where}", STARVATION)
        return
    if seen.num_refused > seen.num_taken:
        return
    refused = f"; it refused {seen.num_refused} requests" if seen.num_refused else ""
    if (share := seen.rate / fcfs.rate) < MIN_THROUGHPUT:
        yield TrialFailure(
            f"serves {share:.2f} of fcfs's throughput {where} (below {MIN_THROUGHPUT}){refused}",
            THROUGHPUT,
        )
    if kind not in (ALIKE, MIXED) and seen.step_tokens < MIN_STEP_TOKENS * fcfs.step_tokens:
        yield TrialFailure(
            f"computes {seen.step_tokens:.1f} tokens per step {where}, where fcfs computes "
            f"{fcfs.step_tokens:.1f} (below {MIN_STEP_TOKENS} of it){refused}",
            THROUGHPUT,
        )
    if seen.num_rescued or seen.num_idle > MAX_IDLE * seen.num_steps:
        yield TrialFailure(
            f"runs no request in {seen.num_rescued + seen.num_idle} of {seen.num_steps} steps "
            f"{where}, although requests could run{refused}",
            THROUGHPUT,
        )
    if kind is ALIKE:
        yield from _unlike(seen, where)


def _unlike(seen: SeenState, where: str) -> Iterator[TrialFailure]:
    """Yield a failure if a user's requests take far longer than those of other users."""
    if len(seen.steps_by_user) < len(USERS):
        return
    usual = median(seen.steps_by_user.values())
    user = max(seen.steps_by_user, key=seen.steps_by_user.__getitem__)
    if (times := seen.steps_by_user[user] / usual) > MAX_UNLIKE:
        yield TrialFailure(
            f"makes requests of user {user!r} take {times:.0f} times as long as those of others "
            f"{where}",
            STARVATION,
        )


def _shown(starved: Starved) -> str:
    what = "starves a running request" if starved.has_run else "starves a waiting request"
    state = "ran and then" if starved.has_run else "arrived and"
    return (
        f"{what}: request {starved.request_id} of user {starved.user!r} ({starved.num_prompt} "
        f"prompt tokens, {starved.num_output} output tokens so far) {state} got nothing in "
        f"{starved.num_steps} steps from step {starved.since} on, while others were computed,"
    )


@cache
def of_fcfs(kind: CrowdKind, num_users: int) -> SeenState:
    """How fcfs serves this kind of crowd with ``num_users`` users."""
    return Crowd("fcfs", {}, kind, users=tuple(map(str, range(num_users)))).run()


def names_in(policy: Any) -> tuple[str, ...]:
    """User names that the policy may treat specially: words found in its code."""
    found: dict[str, None] = {}
    cls = type(find_policy(policy, {})) if isinstance(policy, str) else policy
    for base in (cls if isinstance(cls, type) else type(cls)).__mro__:
        if base.__module__.partition(".")[0] in OURS or base is object:
            continue
        for value in vars(base).values():
            if isinstance(value, FunctionType):
                found |= dict.fromkeys(_words(value.__code__))
    return tuple(found)[:MOST_NAMES]


def _words(code: CodeType) -> Iterator[str]:
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _words(value)
        elif isinstance(value, str) and value.isidentifier() and value not in USERS:
            yield value


def check_predictor(simulation: Simulation) -> None:
    """Raise ``AssertionError`` if the length predictor failed or predicted a negative length."""
    predictor = simulation.scheduler.view.predictor
    if isinstance(predictor, GuardedPredictor):
        assert not predictor.num_failures, predictor.first_failure
        lowest = predictor.lowest
        assert lowest >= 0, f"length predictor {predictor.name} predicts {lowest} output tokens"


def _broken(case: Case, broken: Broken, kind: CrowdKind, goes_on: GoesOn) -> TrialFailure:
    small = smallest(FoundCase(-1, case, broken), goes_on=goes_on)
    program = reproduction(small) if len(small.events) <= MOST_EVENTS else ""
    message = f"breaks a rule in a crowd of {kind.name}: {broken.message} ({broken.place})"
    return TrialFailure(message, program=program, is_rule=True)


# -- growing data, and two engines


def _over_time(policy: Any, options: dict[str, Any]) -> Iterator[TrialFailure]:
    growth = find_growth(policy, options)
    if growth is not None:
        yield TrialFailure(
            f"keeps data that grows: {growth.place} grows by {growth.bytes_per_request:.1f} bytes "
            f"per request, still after {growth.num_requests} requests (users and programs stayed "
            "the same); delete in on_finish what is kept of a request"
        )


def _two_at_once(policy: Any, options: dict[str, Any]) -> Iterator[TrialFailure]:
    """A failure if two engines in one process plan differently from one engine alone."""
    kind = MIXED._replace(num_steps=CROWD_STEPS)
    both = [Crowd(policy, options, kind, is_patient=True) for _ in range(2)]
    while both[0].goes_on:
        for crowd in both:
            crowd.step()
    first, second = (crowd.finish().digest for crowd in both)
    alone = Crowd(policy, options, kind, is_patient=True).run().digest
    if not first == second == alone:
        yield TrialFailure(
            "plans differently when two engines run in one process, at the same time or one after "
            "the other: they share state, such as a default argument, a class attribute or a "
            "module global; keep state in attributes of the object"
        )


# -- other interpreters

Others = tuple[Elsewhere, Elsewhere]


def _questions() -> list[Question]:
    crowds = [Question(crowd=kind.name, num_steps=CROWD_STEPS) for kind in (ALIKE, MIXED)]
    return [*(Question(seed) for seed in range(SEEDS)), *crowds]


def _begin_elsewhere(
    stack: ExitStack, policy: Any, options: dict[str, Any] | None, trials: Trials
) -> Others | None:
    """Start two other interpreters and send them all questions. Returns ``None`` if they cannot be
    started."""
    try:
        first, second = _pair(stack, policy, options)
    except ConfigError as error:
        trials.not_shown.append(f"{_NOT_ELSEWHERE}: {error}")
        return None
    for question in _questions():
        first.begin(question)
        second.begin(question)
    return first, second


_NOT_ELSEWHERE = "it was not tested whether plans are the same in other processes"


def _elsewhere(
    policy: Any,
    options: dict[str, Any] | None,
    others: Others | None,
    trials: Trials,
    goes_on: GoesOn,
) -> Iterator[TrialFailure]:
    if others is None:
        return
    try:
        for question in _questions():
            first, second = (other.end() for other in others)
            if reads := (*first.reads, *second.reads):
                message = f"depends on its process: {reads[0]}; make it an option of the policy"
                yield TrialFailure(message, is_rule=True)
                return
            if first != second:
                yield _differs(policy, options, question, goes_on)
                return
    except ConfigError as error:
        trials.not_shown.append(f"{_NOT_ELSEWHERE}: {error}")


def _differs(
    policy: Any, options: dict[str, Any] | None, question: Question, goes_on: GoesOn
) -> TrialFailure:
    """Return the failure for a question that two interpreters planned differently, with the
    smallest such case as a program."""
    with ExitStack() as stack:
        both, program = _pair(stack, policy, options), ""
        case = _case(question, policy, options)
        if _is_other(both, _question_of(case)):
            small = shrink(
                case, lambda each: _is_other(both, _question_of(each)), 300, goes_on=goes_on
            )
            question, program = _question_of(small), reproduction(small)
    return TrialFailure(
        "plans differently in another process, with the same requests: it depends on "
        f"{_cause(policy, options, question)}. Use no clock but view.now, no random numbers but "
        "view.rng, and nothing that differs between processes (hash(), id(), order of a set)",
        program=program,
        is_rule=True,
    )


def _cause(policy: Any, options: dict[str, Any] | None, question: Question) -> str:
    """Text on which parts of the environment change the policy's plans, found by varying one part
    at a time."""
    causes: list[str] = []
    for parts in ((), *((part,) for part in PARTS)):
        with ExitStack() as stack:
            if not _is_other(_pair(stack, policy, options, parts), question):
                continue
        if not parts:
            return "something that differs in every run, such as a clock or object addresses"
        causes += parts
    return " or ".join(causes) or "something that is specific to the process"


def _case(question: Question, policy: Any, options: dict[str, Any] | None) -> Case:
    """Return the case to plan for a question: drawn from its seed, or the crowd's requests."""
    if question.seed is not None:
        return draw_case(question.seed, policy, options)
    [kind] = [kind for kind in KINDS if kind.name == question.crowd]
    crowd = Crowd(
        policy, options or {}, kind._replace(num_steps=question.num_steps), is_patient=True
    )
    while crowd.goes_on:
        crowd.step()
    return crowd.case


def _pair(
    stack: ExitStack,
    policy: Any,
    options: dict[str, Any] | None,
    parts: tuple[str, ...] = PARTS,
) -> Others:
    source = source_of(policy)
    opened = (closing(Elsewhere(source, options, number, parts)) for number in (1, 2))
    first, second = map(stack.enter_context, opened)
    return first, second


def _question_of(case: Case) -> Question:
    return Question(case=with_policy(case, "fcfs", case.setup.config.policy_options))


def _is_other(both: Others, question: Question) -> bool:
    for each in both:
        each.begin(question)
    first, second = (each.end() for each in both)
    return first != second

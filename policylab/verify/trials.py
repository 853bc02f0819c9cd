"""Trials of a policy: what is a fault of it, though each single step keeps every rule.

One trial each: crowds (somebody starves, little is served or computed), a long row of small
requests (books that grow), two engines at once, and other interpreters. None depends on how fast
the machine is. A policy may state that it is meant so (``Policy.by_design``), but for the last
three, which no policy is meant to be.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
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

MIN_THROUGHPUT = 0.5  # of that of fcfs; a policy that serves less is no choice but a fault
MIN_STEP_TOKENS = 0.6  # the same of tokens computed in a step, where prompts fill each
MAX_IDLE = 0.1  # of the steps
MAX_UNLIKE = 8.0  # times as long as others with the same requests
MOST_EVENTS = 60  # of a case that is worth printing
MOST_NAMES = 6  # of users that a policy may be written for
SEEDS = 12  # cases that are planned in several interpreters
CROWD_STEPS = 250  # of a crowd that is planned there

STARVATION, THROUGHPUT, RECOMPUTING = "starvation", "throughput", "recomputing"
EXCUSES = (STARVATION, THROUGHPUT, RECOMPUTING)


class TrialFailure(NamedTuple):
    """A fault of a policy. ``excuse``: the statement with which it is none; empty: there is none.
    ``program``: the smallest program found that shows it, if one does."""

    message: str
    excuse: str = ""
    program: str = ""
    is_rule: bool = False
    """A rule is broken, so that further trials would show the same."""


@dataclass
class Trials:
    """What came of all of them."""

    failures: list[TrialFailure] = field(default_factory=list)
    by_design: list[str] = field(default_factory=list)
    """What was seen and is meant to be so, with the policy's reason."""
    not_shown: list[str] = field(default_factory=list)
    """What could not be tried, and why."""
    waited: Waited | None = None
    """What became of a request in an overload of better ones."""


def run_trials(
    policy: Any,
    options: dict[str, Any] | None = None,
    *,
    max_wait: int | None = 1000,
    predictor: Any = None,
    goes_on: GoesOn = to_its_end,
) -> Trials:
    """All trials of a policy.

    ``max_wait``: steps in which a request must be served though better ones keep coming; ``None``:
    the policy may starve requests. ``predictor``: of lengths, in place of "history".
    ``goes_on``: how long what breaks is made smaller, see ``shrink``. Raises ``ConfigError`` for
    statements that mean nothing.
    """
    stated = statements(find_policy(policy, options or {}))
    trials = Trials()
    name = name_of(policy)
    found: list[TrialFailure] = []
    with ExitStack() as stack:
        others = _begin_elsewhere(stack, policy, options, trials)
        for failure in chain(
            _in_overload(policy, options or {}, max_wait, trials),
            _in_crowds(policy, options or {}, predictor, goes_on),
            _over_time(policy, options or {}),
            _elsewhere(policy, options, others, trials, goes_on),
            _two_at_once(policy, options or {}),
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


def _with_way_out(failure: TrialFailure) -> str:
    if not failure.excuse:
        return failure.message
    stated = f'by_design = {{"{failure.excuse}": "why"}}'
    return f"{failure.message}; if it is meant to, state so in the class: {stated}"


def statements(policy: Policy) -> dict[str, str]:
    """What the policy states to be by design. Raises ``ConfigError`` for what means nothing."""
    name, stated = type(policy).__name__, policy.by_design
    if not hasattr(stated, "items"):
        raise ConfigError(
            f"by_design of {name} is {stated!r}, must be a dict, as {{'starvation': 'why'}}"
        )
    for what, why in stated.items():
        if what not in EXCUSES:
            raise ConfigError(
                f"by_design of {name} names {what!r}; what may be stated is {', '.join(EXCUSES)}"
            )
        if not (isinstance(why, str) and why.strip()):
            raise ConfigError(f"by_design[{what!r}] of {name} is {why!r}, must say why it is so")
    return dict(stated)


# -- crowds


def _in_overload(
    policy: Any, options: dict[str, Any], max_wait: int | None, trials: Trials
) -> Iterator[TrialFailure]:
    """A request waits while better ones keep coming."""
    if max_wait is None:
        return
    try:
        waited = trials.waited = wait_in_overload(policy, options, max_wait)
    except Exception as error:  # any error is a finding
        message = f"breaks a rule in an overload: {what_broke(error, 0).message}"
        yield TrialFailure(message, is_rule=True)
        return
    times = waited.num_refusals
    refused = f", refused {times} times and then taken," if times else ""
    if waited.outcome is Outcome.STARVED:
        yield TrialFailure(
            f"a request{refused} was not served in {max_wait} steps while better ones kept "
            "coming; let it age",
            STARVATION,
        )
    elif waited.outcome is Outcome.DEFERRED:
        yield TrialFailure(
            f"a request{refused} was not served in {max_wait} steps, as on_add keeps it out of the "
            "queue (Defer); name a time that comes",
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
    """What is wrong with how a crowd was served. A crowd that was sent away is left out."""
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
            f"computes {seen.step_tokens:.1f} tokens a step {where}, where fcfs computes "
            f"{fcfs.step_tokens:.1f} (below {MIN_STEP_TOKENS} of it){refused}",
            THROUGHPUT,
        )
    if seen.num_rescued or seen.num_idle > MAX_IDLE * seen.num_steps:
        yield TrialFailure(
            f"lets nobody run in {seen.num_rescued + seen.num_idle} of {seen.num_steps} steps "
            f"{where}, though requests can{refused}",
            THROUGHPUT,
        )
    if kind is ALIKE:
        yield from _unlike(seen, where)


def _unlike(seen: SeenState, where: str) -> Iterator[TrialFailure]:
    """Is a user served much worse than others whose requests are the same?"""
    if len(seen.steps_by_user) < len(USERS):
        return
    usual = median(seen.steps_by_user.values())
    user = max(seen.steps_by_user, key=seen.steps_by_user.__getitem__)
    if (times := seen.steps_by_user[user] / usual) > MAX_UNLIKE:
        yield TrialFailure(
            f"lets requests of user {user!r} take {times:.0f} times as long as those of others "
            f"{where}",
            STARVATION,
        )


def _shown(starved: Starved) -> str:
    what = "starves a running request" if starved.has_run else "starves a waiting request"
    state = "has run and then" if starved.has_run else "came and"
    return (
        f"{what}: request {starved.request_id} of user {starved.user!r} ({starved.num_prompt} "
        f"tokens of prompt, {starved.num_output} of output so far) {state} got nothing in "
        f"{starved.num_steps} steps from step {starved.since} on, while others were computed,"
    )


@cache
def of_fcfs(kind: CrowdKind, num_users: int) -> SeenState:
    """What fcfs does with the crowd. Who its users are makes no difference to it."""
    return Crowd("fcfs", {}, kind, users=tuple(map(str, range(num_users)))).run()


def names_in(policy: Any) -> tuple[str, ...]:
    """Users that the policy may be written for: words that stand in its code."""
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
    """Has the predictor of lengths given sensible answers only?"""
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


# -- books, and two engines


def _over_time(policy: Any, options: dict[str, Any]) -> Iterator[TrialFailure]:
    try:
        growth = find_growth(policy, options)
    except Exception as error:  # any error is a finding
        broken = what_broke(error, 0)
        message = f"breaks a rule as small requests come and go: {broken.message}"
        yield TrialFailure(message, is_rule=True)
        return
    if growth is not None:
        yield TrialFailure(
            f"keeps books that grow: {growth.place} grows by {growth.bytes_per_request:.1f} bytes "
            f"with each request, and still did when {growth.num_requests} had ended (users and "
            "programs were the same all the time); forget in on_finish what is kept of a request"
        )


def _two_at_once(policy: Any, options: dict[str, Any]) -> Iterator[TrialFailure]:
    """Two engines take turns in one process: each must plan as if it were alone."""
    kind = MIXED._replace(num_steps=CROWD_STEPS)
    try:
        both = [Crowd(policy, options, kind, is_patient=True) for _ in range(2)]
        while both[0].goes_on:
            for crowd in both:
                crowd.step()
        first, second = (crowd.finish().digest for crowd in both)
        alone = Crowd(policy, options, kind, is_patient=True).run().digest
    except Exception as error:  # any error is a finding
        message = f"breaks a rule as two engines run at once: {what_broke(error, 0).message}"
        yield TrialFailure(message, is_rule=True)
        return
    if not first == second == alone:
        yield TrialFailure(
            "plans otherwise when two engines run in one process, or one after the other, though "
            "each gets the same: they share something, as a default argument, an attribute of the "
            "class or a global of the module"
        )


# -- other interpreters

Others = tuple[Elsewhere, Elsewhere]


def _questions() -> list[Question]:
    crowds = [Question(crowd=kind.name, num_steps=CROWD_STEPS) for kind in (ALIKE, MIXED)]
    return [*(Question(seed) for seed in range(SEEDS)), *crowds]


def _begin_elsewhere(
    stack: ExitStack, policy: Any, options: dict[str, Any] | None, trials: Trials
) -> Others | None:
    """Two other interpreters, to which all questions have been sent."""
    try:
        source = source_of(policy)
    except ConfigError as error:
        trials.not_shown.append(f"{_NOT_ELSEWHERE}: {error}")
        return None
    try:
        first, second = (stack.enter_context(Elsewhere(source, options, n)) for n in (1, 2))
    except ConfigError as error:
        trials.not_shown.append(f"{_NOT_ELSEWHERE}: {error}")
        return None
    for question in _questions():
        first.begin(question)
        second.begin(question)
    return first, second


_NOT_ELSEWHERE = "nothing is shown about other processes, where its plans must be the same"


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
                message = f"depends on its process: {reads[0]}; make it an option"
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
    """What is wrong, and the smallest case that shows it."""
    with ExitStack() as stack:
        both, program = _pair(stack, policy, options), ""
        case = _case(question, policy, options)
        if _is_other(both, _question_of(case)):
            small = shrink(
                case, lambda each: _is_other(both, _question_of(each)), 300, goes_on=goes_on
            )
            question, program = _question_of(small), reproduction(small)
    return TrialFailure(
        "plans otherwise in another process, with the same requests: it depends on "
        f"{_cause(policy, options, question)}. Ask no clock but view.now and no dice but view.rng, "
        "and go by nothing that differs from process to process (hash(), id(), order of a set)",
        program=program,
        is_rule=True,
    )


def _cause(policy: Any, options: dict[str, Any] | None, question: Question) -> str:
    """What makes the difference, found by letting single things differ."""
    causes: list[str] = []
    for parts in ((), *((part,) for part in PARTS)):
        with ExitStack() as stack:
            if not _is_other(_pair(stack, policy, options, parts), question):
                continue
        if not parts:
            return "what is never twice the same, as a clock or the addresses of objects"
        causes += parts
    return " or ".join(causes) or "something of the process"


def _case(question: Question, policy: Any, options: dict[str, Any] | None) -> Case:
    """The case of a question."""
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
    first, second = (stack.enter_context(Elsewhere(source, options, n, parts)) for n in (1, 2))
    return first, second


def _question_of(case: Case) -> Question:
    return Question(case=with_policy(case, "fcfs", case.setup.config.policy_options))


def _is_other(both: Others, question: Question) -> bool:
    for each in both:
        each.begin(question)
    first, second = (each.end() for each in both)
    return first != second

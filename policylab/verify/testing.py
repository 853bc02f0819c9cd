"""Checks that a policy keeps what the engine promises its users, for the tests of its author.

    from policylab.verify.testing import check_policy

    def test_my_policy():
        check_policy(MyPolicy)

``metronome verify --policy my_package.MyPolicy`` runs the same checks for any length of time.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import NoneType
from typing import Any

from engine.config.check import check_kind
from engine.errors import ConfigError, PolicyError
from engine.sched.plugins.find import find_policy
from policylab.verify.shrink import Clocked
from policylab.verify.starvation import Outcome, Waited
from policylab.verify.swarm import FoundCase, Report, Swarm, name_of, reproduction, smallest
from policylab.verify.trials import run_trials

CHECK_EVERY = 4  # operations after which the whole state is checked
SHRINKING_RUNS = 1000
SHRINKING_SECONDS = 20.0


class NotShown(UserWarning):
    """The policy broke no rule, but something could not be checked."""


def check_policy(
    policy: Any,
    *,
    options: dict[str, Any] | None = None,
    steps: int = 20_000,
    seed: int = 0,
    max_wait: int | None = 1000,
    length_predictor: Any = None,
) -> Report:
    """Raise ``PolicyError`` if the policy breaks a rule; otherwise return what was run.

    The policy runs in random engines with random requests of all features, from ``seed`` on, for
    ``steps`` steps. In each: every token is right and sent once, every request finishes within a
    bound on its work, none is preempted repeatedly without progress, no block, seat or request is
    lost, hooks neither raise nor return invalid answers, better-ranked requests get blocks first,
    and the same seed gives the same plans. Then a request waits in an overload of better-ranked
    ones; if it is refused it arrives again, and it must be served within ``max_wait`` steps.
    ``None`` allows starvation. Refusing it every time is allowed, but shows nothing about
    starvation: ``waited`` of the report has the result, and a ``NotShown`` warning is raised if it
    shows nothing, or if no request was accepted at all.

    The policy also serves crowds, in which no request may starve and the policy must serve at least
    half of what fcfs serves. It must keep no data that grows with finished requests, and must plan
    the same in other processes and next to another engine in its own process. What it states in
    ``by_design`` is no failure. A class that another process cannot find gets a ``NotShown``
    warning.

    ``length_predictor``: as for an engine; it must predict 0 or more tokens.

    ``policy``: a class, an object (each run uses a copy), a dotted path or the name of a shipped
    policy; ``options`` are the arguments of its constructor. The error names hook, request and
    seed, and ends with the smallest program found that shows the failure. Raises ``ConfigError`` if
    the policy cannot be checked at all.
    """
    __tracebackhide__ = True  # a failing test shows its own line and the message
    _check_arguments(steps, seed, max_wait)
    find_policy(policy, options or {})
    name, gaps = name_of(policy), list[str]()
    with _quiet():  # faults of the policy are reported in the error
        report = Swarm(policy, options or {}, every=CHECK_EVERY).run(count(seed), steps)
        problems = [_explain(name, found) for found in report.found]
        if not problems:
            trials = run_trials(
                policy,
                options or {},
                max_wait=max_wait,
                predictor=length_predictor,
                goes_on=Clocked(SHRINKING_SECONDS),
            )
            report.waited, gaps = trials.waited, trials.not_shown
            problems = [_with_program(each.message, each.program) for each in trials.failures]
    for problem in problems:
        raise PolicyError(problem)
    for gap in (*_not_shown(name, report), *(f"{name}: {gap}" for gap in gaps)):
        warnings.warn(gap, NotShown, stacklevel=2)
    return report


def _check_arguments(steps: int, seed: int, max_wait: int | None) -> None:
    """Raise ``ConfigError`` for numbers with which nothing would be checked."""
    for name, value, least in (("steps", steps, 1), ("seed", seed, 0), ("max_wait", max_wait, 1)):
        kinds = (int, NoneType) if name == "max_wait" else (int,)
        check_kind(name, value, kinds)
        if value is not None and value < least:
            raise ConfigError(f"{name} is {value}, must be at least {least}")


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("engine")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _not_shown(name: str, report: Report) -> Iterator[str]:
    """What the checks do not show, although they passed."""
    if not report.num_requests:
        yield (
            f"{name}: it accepted no request in {report.num_runs} random engines, so only refusals "
            "were tested"
        )
    match report.waited:
        case Waited(outcome=Outcome.REFUSED, num_refusals=num_refusals):
            yield (
                f"{name}: the request in the overload trial was {Outcome.REFUSED.value} (it was "
                f"refused {num_refusals} times); pass max_wait=None if the policy is meant to "
                "refuse it"
            )
        case Waited(outcome=Outcome.ALONE):
            yield f"{name}: the request in the overload trial was {Outcome.ALONE.value}"


def _explain(name: str, found: FoundCase) -> str:
    small = smallest(found, SHRINKING_RUNS, goes_on=Clocked(SHRINKING_SECONDS))
    message = f"{name}, seed {found.seed}: {found.broken.message} ({found.broken.place})"
    return _with_program(message, reproduction(small))


def _with_program(message: str, program: str) -> str:
    return (
        f"{message}\nThe smallest program found that shows the failure:\n\n{program}"
        if program
        else message
    )

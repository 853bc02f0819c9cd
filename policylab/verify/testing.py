"""Holds any policy to what the engine promises its users: for the tests of its author.

    from policylab.verify.testing import check_policy

    def test_my_policy():
        check_policy(MyPolicy)

``metronome verify --policy my_package.MyPolicy`` does the same for as long as one likes.
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

CHECK_EVERY = 4  # steps after which the state as a whole is looked at
SHRINKING_RUNS = 1000
SHRINKING_SECONDS = 20.0


class NotShown(UserWarning):
    """The policy broke no rule, but something was not put to the test: it refused too much."""


def check_policy(
    policy: Any,
    *,
    options: dict[str, Any] | None = None,
    steps: int = 20_000,
    seed: int = 0,
    max_wait: int | None = 1000,
    length_predictor: Any = None,
) -> Report:
    """Raise ``PolicyError`` if the policy breaks a rule; otherwise say what was tried.

    Random engines and workloads of all features, from ``seed`` on, for ``steps`` steps. In each of
    them: every token is right and comes once, every request finishes within a bound on their work,
    none is preempted again and again for nothing, no block, seat or request is lost, hooks
    neither raise nor give illegal answers, blocks go by rank, and the same seed gives the same
    plans. Then a request waits in an overload of better ones, comes again if it is refused, and
    must be served within ``max_wait`` steps; ``None`` allows the policy to starve requests. To
    refuse it each time is allowed and shows nothing about starvation: ``waited`` of the answer says
    what became of it, and a ``NotShown`` warning if that shows nothing, or if no request was taken
    at all.

    The policy also serves crowds, in which nobody may starve and at least half of what fcfs serves
    is served, keeps no books that grow with requests that have ended, and plans the same in other
    processes and next to another engine in its own. What it states in ``by_design`` is no fault of
    it. A class that another process cannot find gets a ``NotShown`` warning.

    ``length_predictor``: as given to an engine; it must predict numbers from 0 on.

    ``policy``: a class, an object (each run uses a copy), a dotted path or the name of a shipped
    one; ``options`` are the arguments of its constructor. The error names hook, request and seed
    and ends with the smallest program found that shows it. ``ConfigError``: what was given cannot
    be checked at all.
    """
    __tracebackhide__ = True  # a test that fails shows its own line and the message
    _check_arguments(steps, seed, max_wait)
    find_policy(policy, options or {})
    name, gaps = name_of(policy), list[str]()
    with _quiet():  # faults of the policy are in the error, once
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
    """What the checks say nothing about, though they passed."""
    if not report.num_requests:
        yield (
            f"{name}: it took no request of {report.num_runs} random engines, so nothing is shown "
            "but that it refuses"
        )
    match report.waited:
        case Waited(outcome=Outcome.REFUSED, num_refusals=num_refusals):
            yield (
                f"{name}: the request that was to wait in an overload was {Outcome.REFUSED.value} "
                f"(it came and was refused {num_refusals} times); pass max_wait=None if it is "
                "meant to go away"
            )
        case Waited(outcome=Outcome.ALONE):
            yield f"{name}: the request that was to wait in an overload was {Outcome.ALONE.value}"


def _explain(name: str, found: FoundCase) -> str:
    small = smallest(found, SHRINKING_RUNS, goes_on=Clocked(SHRINKING_SECONDS))
    message = f"{name}, seed {found.seed}: {found.broken.message} ({found.broken.place})"
    return _with_program(message, reproduction(small))


def _with_program(message: str, program: str) -> str:
    return (
        f"{message}\nThe smallest program found that shows it:\n\n{program}" if program else message
    )

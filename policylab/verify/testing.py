"""``check_policy``, which tests a policy in its author's test suite.

    from policylab.verify.testing import check_policy

    def test_my_policy():
        check_policy(MyPolicy)

``metronome verify --policy my_package.MyPolicy`` runs the same checks for any length of time."""

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
    """Warning: the policy broke no rule, but something could not be checked."""


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

    The policy runs for ``steps`` steps in random engines with random requests; seeds count up from
    ``seed``. Every token must be right and sent once, every request must finish within a bound on
    its work and must not be preempted repeatedly without progress, no block, seat or request may be
    lost, hooks must not raise or return invalid answers, better-ranked requests must get blocks
    first, and the same seed must give the same plans.

    When better-ranked requests keep arriving, a request must be served within ``max_wait`` steps
    (``None``: it may starve). In crowds of requests none may starve, and throughput must be at
    least half of that of fcfs. The policy must keep no data that grows with finished requests, and
    must plan the same in other processes and next to another engine. Results that it declares in
    ``by_design`` as intended are allowed. A ``NotShown`` warning names what could not be checked.

    ``policy``: a class, an object (each run uses a copy), a dotted path or the name of a shipped
    policy; ``options``: arguments of its constructor. ``length_predictor``: as for an engine. The
    error names hook, request and seed, and ends with the smallest program found that shows the
    failure. Raises ``ConfigError`` if the policy cannot be checked at all."""
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
    """Raise ``ConfigError`` for arguments with which nothing would be checked."""
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
    """Sentences on what the passed checks could not show."""
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

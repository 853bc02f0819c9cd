"""Holds any policy to what the engine promises its users: for the tests of its author.

    from engine.verify.testing import check_policy

    def test_my_policy():
        check_policy(MyPolicy)

``metronome verify --policy my_package.MyPolicy`` does the same for as long as one likes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import NoneType
from typing import Any

from engine.config.check import check_kind
from engine.errors import ConfigError, PolicyError
from engine.sched.plugins.find import find_policy
from engine.verify.starvation import Waited, wait_in_overload
from engine.verify.swarm import Found, Report, Swarm, name_of, reproduction, smallest

CHECK_EVERY = 4  # steps after which the state as a whole is looked at
SHRINKING_RUNS = 1000


def check_policy(
    policy: Any,
    *,
    options: dict[str, Any] | None = None,
    steps: int = 20_000,
    seed: int = 0,
    max_wait: int | None = 1000,
) -> Report:
    """Raise ``PolicyError`` if the policy breaks a rule; otherwise say what was tried.

    Random engines and workloads of all features, from ``seed`` on, for ``steps`` steps. In each of
    them: every token is right and comes once, every request finishes within a bound on their work,
    none is preempted again and again for nothing, no block, seat or request is lost, hooks
    neither raise nor give illegal answers, blocks go by rank, and the same seed gives the same
    plans. Then a request waits in an overload of better ones, comes again if it is refused, and
    must be served within ``max_wait`` steps; ``None`` allows the policy to starve it.

    ``policy``: a class, an object (each run uses a copy), a dotted path or the name of a shipped
    one; ``options`` are the arguments of its constructor. The error names hook, request and seed
    and ends with the smallest program found that shows it. ``ConfigError``: what was given cannot
    be checked at all.
    """
    __tracebackhide__ = True  # a test that fails shows its own line and the message
    _check_arguments(steps, seed, max_wait)
    options = options or {}
    find_policy(policy, options)
    with _quiet():  # faults of the policy are in the error, once
        report = Swarm(policy, options, every=CHECK_EVERY).run(count(seed), steps)
        problems = [_explain(name_of(policy), found) for found in report.found]
        if max_wait is not None and not problems:
            waited = wait_in_overload(policy, options, max_wait)
            problems += _unfair(name_of(policy), waited, max_wait)
    for problem in problems:
        raise PolicyError(problem)
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


def _unfair(name: str, waited: Waited, max_wait: int) -> list[str]:
    """Error text for a policy that did not serve the request in an overload."""
    if waited.num_steps is not None:
        return []
    if waited.num_refusals:
        return [
            f"{name}: a request was refused {waited.num_refusals} times in {max_wait} steps while "
            "better ones kept coming, and not served; take it in some time, or pass max_wait=None "
            "if it is meant to go away"
        ]
    return [
        f"{name}: a request was not served in {max_wait} steps while better ones kept coming; let "
        "it age, or pass max_wait=None if it is meant to wait"
    ]


def _explain(name: str, found: Found) -> str:
    small = smallest(found, SHRINKING_RUNS)
    return (
        f"{name}, seed {found.seed}: {found.broken.message} ({found.broken.place})\n"
        f"The smallest program found that shows it:\n\n{reproduction(small)}"
    )

"""Holds any policy to what the engine promises its users: for the tests of whoever writes one.

    from engine.sched.testing import check_policy

    def test_my_policy():
        check_policy(MyPolicy)

``metronome verify --policy my_package.MyPolicy`` does the same for as long as one likes.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from engine.errors import PolicyError
from engine.sched.verify.starvation import steps_until_served
from engine.sched.verify.swarm import Found, Report, Swarm, name_of, reproduction, smallest

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
    them: every token is right and comes once, everybody finishes within a bound on their work,
    nobody is preempted again and again for nothing, no block, seat or request is lost, hooks
    neither raise nor give illegal answers, and the same seed gives the same plans. Then a request
    waits in an overload of better ones and must be served within ``max_wait`` steps; ``None``
    allows the policy to starve it.

    ``policy``: a class, an object (each run uses a copy), a dotted path or the name of a shipped
    one; ``options`` are the arguments of its constructor. The error names hook, request and seed
    and ends with the smallest program found that shows it.
    """
    report = Swarm(policy, options or {}, every=CHECK_EVERY).run(count(seed), steps)
    for found in report.found:
        raise PolicyError(_explain(name_of(policy), found))
    if max_wait is not None and steps_until_served(policy, options or {}, max_wait) is None:
        raise PolicyError(
            f"{name_of(policy)}: a request was not served in {max_wait} steps while better ones "
            "kept coming; let it age, or pass max_wait=None if it is meant to wait"
        )
    return report


def _explain(name: str, found: Found) -> str:
    small = smallest(found, SHRINKING_RUNS)
    return (
        f"{name}, seed {found.seed}: {found.broken.message} ({found.broken.place})\n"
        f"The smallest program found that shows it:\n\n{reproduction(small)}"
    )

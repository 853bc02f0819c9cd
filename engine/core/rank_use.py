"""What the ranks of a core have spent the time of their steps with, for those who watch it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from engine.core.engine_core import Executor
from engine.core.group import WorkerGroup
from engine.messages.stats import RankUse
from engine.observe.guard import Failures, ObserverGuard

RankUses = Callable[[], list[RankUse]]


def rank_uses(executor: Executor[Any], core: int, failures: Failures) -> RankUses:
    """A function that reads what each rank of this core does, in order of ranks; it returns [] for
    a core with one worker. failures: counts errors of reading, after which it returns []."""
    if not isinstance(executor, WorkerGroup):
        return list
    effect = "waits of ranks are no longer reported"
    guard = ObserverGuard(failures, "rank_times", effect, stops=True)
    read = partial(_read, executor, core)
    return lambda: guard.run(read) or []


def _read(group: WorkerGroup, core: int) -> list[RankUse]:
    return [
        RankUse(core, rank, *(each / 1e9 for each in times))
        for rank, times in enumerate(group.rank_times())
    ]

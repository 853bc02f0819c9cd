"""How the answers of several cores become one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from engine.messages.stats import SchedulerStats

GAUGES: dict[str, Any] = {
    "num_running": 0,
    "num_waiting": 0,
    "num_parked": 0,
    "kv_usage": 0.0,
    "blocked": "",
}
"""Fields of statistics that describe the moment, as they are of a core that is gone."""


def first_of(answers: list[Any]) -> Any:
    """The answer of the first core: all answer alike."""
    return answers[0]


def traces_of(answers: list[list[str] | None]) -> list[str] | None:
    """The traces of all cores; ``None`` if a profile was started."""
    return [path for answer in answers for path in answer or ()] or None


def sum_of(stats: Sequence[SchedulerStats | None]) -> SchedulerStats | None:
    """Statistics of several schedulers as those of one; ``None`` if one keeps none."""
    known = [each for each in stats if each is not None]
    if len(known) < len(stats) or not known:
        return None
    summed = {
        field.name: _sum([getattr(each, field.name) for each in known])
        for field in msgspec.structs.fields(SchedulerStats)
    }
    return SchedulerStats(**{**summed, "kv_usage": summed["kv_usage"] / len(known)})


def _sum(values: list[Any]) -> Any:
    if isinstance(values[0], str):
        return "; ".join(filter(None, values))
    if not isinstance(values[0], dict):
        return sum(values)
    total: defaultdict[str, float] = defaultdict(float)
    for each in values:
        for key, value in each.items():
            total[key] += value
    return dict(total)


class CountersOfTheDead:
    """What cores that have died had counted, so that totals of all cores never go back."""

    def __init__(self) -> None:
        self._latest: dict[int, SchedulerStats] = {}  # by core, of those that live
        self._gone: SchedulerStats | None = None

    def note(self, core: int, stats: SchedulerStats | None) -> None:
        """The latest statistics of a core."""
        if stats is not None:
            self._latest[core] = stats

    def bury(self, core: int) -> None:
        """The core has died: what is known of it counts from now on."""
        last = self._latest.pop(core, None)
        if last is not None:
            last = msgspec.structs.replace(last, **GAUGES)
            self._gone = last if self._gone is None else sum_of([self._gone, last])

    def add_to(self, stats: SchedulerStats | None) -> SchedulerStats | None:
        """Statistics of the cores that live, with the counts of those that do not."""
        if stats is None or self._gone is None:
            return stats
        total = sum_of([stats, self._gone])
        return total and msgspec.structs.replace(
            total, **{name: getattr(stats, name) for name in GAUGES}
        )


JOINED: dict[str, Callable[[list[Any]], Any]] = {
    "reset_prefix_cache": all,
    "stats": sum_of,
    "profile": traces_of,
}
"""How the answers of several cores are joined, by utility."""

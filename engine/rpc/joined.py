"""Combines the answers of several cores to a utility call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from engine.errors import ConfigError
from engine.messages.stats import AdapterUse, GroupUse, RankUse, SchedulerStats, StoreUse

GAUGES: dict[str, Any] = {
    "num_running": 0,
    "num_waiting": 0,
    "num_parked": 0,
    "kv_usage": 0.0,
    "blocked": "",
    "kv_groups": [],
    "num_snapshots": 0,
    "snapshot_usage": 0.0,
    "adapters": None,
    "waiting_by_cause": {},
    "stores": {},
    "ranks": [],
}
"""The gauges of the statistics, each with its value for a core that has died."""


def first_of(answers: list[Any]) -> Any:
    """Return the first core's answer, for utilities to which all cores answer the same."""
    return answers[0]


def known_of(answers: list[Any]) -> Any:
    """Return the first answer that is not ``None``: that of a core that knows an adapter, which
    another may not have used yet."""
    return next((answer for answer in answers if answer is not None), None)


def all_adapters(answers: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The adapters that some core has loaded, as the first such core describes them."""
    by_name: dict[str, dict[str, Any]] = {}
    for answer in answers:
        for adapter in answer:
            by_name.setdefault(adapter["name"], adapter)
    return sorted(by_name.values(), key=lambda adapter: int(adapter["number"]))


def traces_of(answers: list[list[str] | None]) -> list[str] | None:
    """The paths of the trace files of all cores; ``None`` if there are no files."""
    return [path for answer in answers for path in answer or ()] or None


def sum_of(stats: Sequence[SchedulerStats | None]) -> SchedulerStats | None:
    """The sum of the statistics of several schedulers; ``None`` if any are missing."""
    known = [each for each in stats if each is not None]
    if len(known) < len(stats) or not known:
        return None
    summed = {
        field.name: _sum([getattr(each, field.name) for each in known])
        for field in msgspec.structs.fields(SchedulerStats)
    }
    means = {name: summed[name] / len(known) for name in ("kv_usage", "snapshot_usage")}
    return SchedulerStats(**{**summed, **means})


def _sum(values: list[Any]) -> Any:
    if any(isinstance(each, AdapterUse | None) for each in values):
        return _sum_of_adapters([each for each in values if each is not None])
    if isinstance(values[0], str):
        return "; ".join(filter(None, values))
    if isinstance(values[0], list):
        if any(isinstance(one, RankUse) for each in values for one in each):
            return [one for each in values for one in each]
        return _sum_of_groups(values)
    if not isinstance(values[0], dict):
        return sum(values)
    if any(isinstance(use, StoreUse) for each in values for use in each.values()):
        return _sum_of_stores(values)
    total: defaultdict[str, float] = defaultdict(float)
    for each in values:
        for key, value in each.items():
            total[key] += value
    return dict(total)


def _sum_of_adapters(several: list[AdapterUse]) -> AdapterUse | None:
    """Sum the use of adapters over all cores; ``None`` if no core takes adapters."""
    if not several:
        return None
    columns = [[getattr(each, name) for each in several] for name in AdapterUse.__struct_fields__]
    return AdapterUse(*map(_sum, columns))


def _sum_of_stores(several: list[dict[str, StoreUse]]) -> dict[str, StoreUse]:
    """Sum the use of each store over all cores."""
    return {
        name: _sum_of_store([each[name] for each in several if name in each])
        for name in dict.fromkeys(name for each in several for name in each)
    }


def _sum_of_store(uses: list[StoreUse]) -> StoreUse:
    of_all = max if uses[0].is_common else sum
    blocks, sizes = [use.num_blocks for use in uses], [use.num_bytes for use in uses]
    num_cores = sum(use.num_cores for use in uses)
    return StoreUse(of_all(blocks), of_all(sizes), num_cores, uses[0].is_common)


def _sum_of_groups(several: list[list[GroupUse]]) -> list[GroupUse]:
    """Sum the used blocks of each KV group over all cores. A dead core's list is empty."""
    known = filter(None, several)
    return [
        msgspec.structs.replace(same[0], num_blocks=sum(each.num_blocks for each in same))
        for same in zip(*known, strict=True)
    ]


class DeadCounters:
    """Counters of cores that have died, so that totals over all cores never decrease."""

    def __init__(self) -> None:
        self._latest: dict[int, SchedulerStats] = {}  # of living cores, by index
        self._gone: SchedulerStats | None = None

    def update(self, core: int, stats: SchedulerStats | None) -> None:
        """Store the latest statistics of a core."""
        if stats is not None:
            self._latest[core] = stats

    def add_dead(self, core: int) -> None:
        """Keep the latest counters of a core that has died."""
        last = self._latest.pop(core, None)
        if last is not None:
            last = msgspec.structs.replace(last, **GAUGES)
            self._gone = last if self._gone is None else sum_of([self._gone, last])

    def add_to(self, stats: SchedulerStats | None) -> SchedulerStats | None:
        """Add the counters of dead cores to ``stats``, the statistics of the living ones."""
        if stats is None or self._gone is None:
            return stats
        total = sum_of([stats, self._gone])
        return total and msgspec.structs.replace(
            total, **{name: getattr(stats, name) for name in GAUGES}
        )


def digest_of_all(answers: list[str | None]) -> str | None:
    """The digest of an adapter that all cores have read; ``None`` if some are still reading. Raises
    ``ConfigError`` if they have read different files."""
    if None in answers:
        return None
    if len(set(answers)) > 1:
        raise ConfigError(
            "the cores have read different files of the adapter: give all of them the same files"
        )
    return answers[0]


JOINED: dict[str, Callable[[list[Any]], Any]] = {
    "reset_prefix_cache": all,
    "stats": sum_of,
    "profile": traces_of,
    "adapter_state": digest_of_all,
    "adapters": all_adapters,
    "find_adapter": known_of,
    "pin_adapter": any,
    "remove_adapter": known_of,
}
"""For each utility, the function that combines the answers of the cores."""

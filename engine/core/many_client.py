"""Several cores behind one client: the same calls, each core with requests of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from engine.core.balance import Balancer
from engine.core.zmq_client import STEP_SECONDS, EngineCoreClient
from engine.errors import RequestError
from engine.messages.outputs import CoreOutputs, Finished
from engine.messages.requests import AddRequest
from engine.messages.stats import SchedulerStats
from engine.messages.wire import Welcome


class ManyCoresClient:
    """What ``EngineCoreClient`` is, for cores that share the work. If one dies, all are dead.

    A request goes to the core that ``Balancer`` chooses and stays there; utilities are called on
    all cores.
    """

    def __init__(self, cores: Sequence[EngineCoreClient]) -> None:
        self._cores = list(cores)
        self._balancer = Balancer(len(self._cores), self.decided.block_size)
        self._poller = zmq.Poller()
        for core in self._cores:
            for each in core.sources:
                self._poller.register(each, zmq.POLLIN)

    @property
    def decided(self) -> Welcome:
        """What each core runs with."""
        return self._cores[0].decided

    @property
    def id_prefix(self) -> str:
        return self._cores[0].id_prefix

    def add(self, request: AddRequest) -> None:
        """Queue a request. Raises ``RequestError`` for a live id or one that can never fit, and
        ``RefusedError`` for one that is not taken now."""
        for error in self.add_all([request]).values():
            raise error

    def add_all(self, requests: Sequence[AddRequest]) -> dict[int, Exception]:
        """Queue these, in order. Returns what ``add`` raised, by place; {} if all were taken."""
        self.check_alive()
        errors: dict[int, Exception] = {}
        places: defaultdict[int, list[int]] = defaultdict(list)  # by core
        for place, request in enumerate(requests):
            if self._balancer.core_of(request.request_id) is None:
                places[self._balancer.choose(request)].append(place)
            else:
                errors[place] = RequestError(
                    f"request id {request.request_id!r} is in use; wait until it has finished or "
                    "choose another"
                )
        for core, own in places.items():
            refused = self._cores[core].add_all([requests[place] for place in own])
            for index, error in refused.items():
                errors[own[index]] = error
                self._balancer.end(requests[own[index]].request_id)
        return errors

    def abort(self, request_ids: Sequence[str]) -> list[Finished]:
        """Finish these; unknown ids do nothing. No output follows.

        Returns what became of those that were alive; ``index`` is their place in ``request_ids``.
        """
        self.check_alive()
        finished: list[Finished] = []
        places: defaultdict[int, list[int]] = defaultdict(list)
        for place, request_id in enumerate(request_ids):
            core = self._balancer.core_of(request_id)
            if core is not None:
                places[core].append(place)
        for core, own in places.items():
            for end in self._cores[core].abort([request_ids[place] for place in own]):
                end.index = own[end.index]
                finished.append(end)
            for place in own:
                self._balancer.end(request_ids[place])
        return finished

    def step(self) -> list[CoreOutputs]:
        """Outputs that have come; waits a moment for them if there are none."""
        batches = self._take()
        if not batches:
            self._poller.poll(round(1000 * STEP_SECONDS))
            batches = self._take()
        return batches

    def wake(self) -> None:
        """Let ``step`` return soon, if it waits in another thread."""
        self._cores[0].wake()

    def check_alive(self) -> None:
        """Raise ``EngineDeadError`` if one of the cores has died."""
        for core in self._cores:
            core.check_alive()

    def has_unfinished(self) -> bool:
        return any(core.has_unfinished() for core in self._cores)

    def num_unfinished(self) -> int:
        return sum(core.num_unfinished() for core in self._cores)

    def stats(self) -> SchedulerStats | None:
        """Gauges and counters of all cores together, ``None`` if they keep none."""
        self.check_alive()
        return sum_of([core.stats() for core in self._cores])

    def call(self, name: str, *args: Any) -> Any:
        """A utility by name, on all cores. Raises ``ConfigError`` for one that does not exist.

        What they answer together: the sum of their statistics, all traces, True if it is for all;
        else what the first core answered.
        """
        self.check_alive()
        answers = [core.call(name, *args) for core in self._cores]
        return JOINED.get(name, first_of)(answers)

    def shutdown(self) -> None:
        """Leave the cores, and end those that are ours; harmless when repeated."""
        for core in self._cores:
            core.shutdown()

    def _take(self) -> list[CoreOutputs]:
        batches = [batch for core in self._cores for batch in core.take()]
        for batch in batches:
            for end in batch.finished:
                self._balancer.end(batch.request_ids[end.index])
        return batches


def first_of(answers: list[Any]) -> Any:
    """What every core answers alike."""
    return answers[0]


def traces_of(answers: list[list[str] | None]) -> list[str] | None:
    """Those of all cores; ``None`` if a profile was started."""
    return [path for answer in answers for path in answer or ()] or None


def sum_of(stats: Sequence[SchedulerStats | None]) -> SchedulerStats | None:
    """Statistics of several schedulers as those of one; ``None`` if one keeps none."""
    known = [each for each in stats if each is not None]
    if len(known) < len(stats):
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


JOINED: dict[str, Callable[[list[Any]], Any]] = {
    "reset_prefix_cache": all,
    "stats": sum_of,
    "profile": traces_of,
}
"""What several cores' answers are together, by utility."""

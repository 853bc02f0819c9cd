"""Several cores behind one client: the same calls, each core with requests of its own."""

from __future__ import annotations

import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

from engine.core.client import CoreClient, NumCores
from engine.errors import ConfigError, EngineDeadError
from engine.messages.requests import (
    AddRequest,
    CoreOutputs,
    Finished,
    as_request_ids,
    in_use,
)
from engine.messages.stats import SchedulerStats
from engine.rpc.balance import Balancer
from engine.rpc.zmq_client import STEP_SECONDS, EngineCoreClient

logger = logging.getLogger("engine.core")


class ManyCoresClient(CoreClient):
    """Cores that share the work. If one dies, all are dead, and the error names it; or, if the
    client ``survives`` that, its requests end with an error, and the others go on.

    A request goes to the core that ``Balancer`` chooses and stays there; utilities are called on
    all cores. Raises ``ConfigError`` for cores that do not run the same model.
    """

    def __init__(self, cores: Sequence[EngineCoreClient], *, survives: bool = False) -> None:
        self._cores = list(cores)
        self._alive = list(range(len(self._cores)))
        self._survives = survives
        self._lost: list[CoreOutputs] = []  # ends of requests whose core died
        _check_alike(self._cores)
        self.decided = self._cores[0].decided  # as do all the others
        self.id_prefix = _prefix_of(self._cores)
        self._death: EngineDeadError | None = None
        self._balancer = Balancer(len(self._cores), self.decided.block_size)
        self._poller = zmq.Poller()
        for core in self._cores:
            for each in core.sources:
                self._poller.register(each, zmq.POLLIN)

    @property
    def pids(self) -> list[int]:
        """Processes of those cores that are our own, for tools that watch them."""
        return [pid for core in self._cores for pid in core.pids]

    def add_all(self, requests: Sequence[AddRequest]) -> dict[int, Exception]:
        self.check_alive()
        errors: dict[int, Exception] = {}
        places: defaultdict[int, list[int]] = defaultdict(list)  # by core
        for place, request in enumerate(requests):
            if self._balancer.core_of(request.request_id) is not None:
                errors[place] = in_use(request.request_id)  # another core would take it
            else:
                places[self._balancer.choose(request)].append(place)
        for core, own in places.items():
            errors |= self._add_to(core, requests, own)
        return errors

    def abort(self, request_ids: Sequence[str]) -> None:
        self.check_alive()
        names: defaultdict[int, list[str]] = defaultdict(list)  # by core
        for request_id in as_request_ids(request_ids):
            core = self._balancer.core_of(request_id)
            if core is not None:
                names[core].append(request_id)
                self._balancer.end(request_id)
        for core, own in names.items():
            with self._named(core):
                self._cores[core].abort(own)

    def step(self) -> list[CoreOutputs]:
        batches = self._take()
        if not batches:
            self._poller.poll(round(1000 * STEP_SECONDS))
            batches = self._take()
        return batches

    def wake(self) -> None:
        for index in self._alive:
            self._cores[index].wake()

    def check_alive(self) -> None:
        for index in list(self._alive):
            with self._named(index):
                self._cores[index].check_alive()

    def num_unfinished(self) -> int:
        alive = sum(self._cores[index].num_unfinished() for index in self._alive)
        return alive + sum(len(batch.finished) for batch in self._lost)

    def num_cores(self) -> NumCores:
        return NumCores(len(self._alive), len(self._cores))

    def latest_stats(self) -> SchedulerStats | None:
        told = []
        for index in list(self._alive):
            with self._named(index):
                told.append(self._cores[index].latest_stats())
        return sum_of(told)

    def call(self, name: str, *args: Any) -> Any:
        """Call a utility on all cores. Returns their answers as one: the sum of statistics, all
        traces, True if all said so; else the answer of the first core."""
        self.check_alive()
        return JOINED.get(name, first_of)(self._of_all(name, *args))

    def shutdown(self) -> None:
        shut_down(self._cores)

    def _add_to(
        self, core: int, requests: Sequence[AddRequest], places: list[int]
    ) -> dict[int, Exception]:
        refused: dict[int, Exception] = {}
        with self._named(core):
            refused = self._cores[core].add_all([requests[place] for place in places])
        for index in refused:
            self._balancer.end(requests[places[index]].request_id)
        return {places[index]: error for index, error in refused.items()}

    def _of_all(self, name: str, *args: Any) -> list[Any]:
        answers = []
        for index in list(self._alive):
            with self._named(index):
                answers.append(self._cores[index].call(name, *args))
        return answers

    @contextmanager
    def _named(self, index: int) -> Iterator[None]:
        """The error of a core that died, naming the core. None if the others go on without it."""
        try:
            yield
        except EngineDeadError as error:
            which = f"core {index} of {len(self._cores)} at {self._cores[index].address.data}"
            death = EngineDeadError(f"{which}: {error}")
            if not self._survives or self._alive == [index]:
                raise death from error.__cause__
            if index in self._alive:
                self._go_on_without(index, death)

    def _go_on_without(self, index: int, death: EngineDeadError) -> None:
        self._alive.remove(index)
        for source in self._cores[index].sources:
            self._poller.unregister(source)
        names = self._balancer.remove(index)
        logger.error("%s; its %d requests fail, the other cores go on", death, len(names))
        message = f"the core that ran this request has died: {death}"
        ends = [
            Finished(place, "error", message=message, code="core_died")
            for place in range(len(names))
        ]
        nothing = [0] * len(names)
        self._lost.append(CoreOutputs(names, [], nothing, time.monotonic(), finished=ends))

    def _take(self) -> list[CoreOutputs]:
        """Outputs that have come. The death of a core is raised once they were read."""
        if self._death is not None:
            raise EngineDeadError(str(self._death)) from self._death.__cause__
        batches = self._take_from_all()
        if self._death is not None:  # the last look: what was there already may have hidden more
            batches += self._take_from_all()
        if self._death is not None and not batches:
            raise self._death
        for batch in batches:
            for end in batch.finished:
                self._balancer.end(batch.request_ids[end.index])
        return batches

    def _take_from_all(self) -> list[CoreOutputs]:
        """The outputs of each core. A death is noted, to be raised later."""
        batches, self._lost = self._lost, []
        for index in list(self._alive):
            try:
                with self._named(index):
                    batches += self._cores[index].take()
            except EngineDeadError as error:
                self._death = error
        return batches


def shut_down(cores: Sequence[EngineCoreClient]) -> None:
    """Shut down all of them, each while the others end too."""
    for core in cores:
        core.ask_to_end()
    for core in cores:
        core.shutdown()


def _prefix_of(cores: Sequence[EngineCoreClient]) -> str:
    """Empty if we are the first client of every core. Otherwise the cores gave us different
    prefixes, so we make our own."""
    if not any(core.id_prefix for core in cores):
        return ""
    return f"clients-{secrets.token_hex(8)}/"


def _check_alike(cores: Sequence[EngineCoreClient]) -> None:
    """Raise ``ConfigError`` unless a request means the same to all of these."""
    first = cores[0]
    for core in cores[1:]:
        for name in ("max_model_len", "vocab_size", "eos_token_ids", "block_size"):
            own, other = getattr(first.decided, name), getattr(core.decided, name)
            if own != other:
                raise ConfigError(
                    f"{name} is {own} for the core at {first.address.data} and {other} for that at "
                    f"{core.address.data}; cores that share the work must run the same model with "
                    "the same options"
                )


def first_of(answers: list[Any]) -> Any:
    """The answer of the first core: all answer alike."""
    return answers[0]


def traces_of(answers: list[list[str] | None]) -> list[str] | None:
    """The traces of all cores; ``None`` if a profile was started."""
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
"""How the answers of several cores are joined, by utility."""

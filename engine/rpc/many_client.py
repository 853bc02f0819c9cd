"""ManyCoresClient: a client of several cores that share the requests."""

from __future__ import annotations

import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import zmq

from engine.core.client import CoreClient, NumCores
from engine.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    RequestError,
    RestartingError,
)
from engine.ipc import sockets
from engine.messages.media import MediaContent
from engine.messages.requests import (
    AddRequest,
    CoreOutputs,
    Finished,
    as_request_ids,
    in_use,
)
from engine.messages.stats import SchedulerStats
from engine.messages.wire import MAX_CALL_BYTES
from engine.rpc.adapter_loads import AdapterLoads
from engine.rpc.apart import PrefillApart, Roles
from engine.rpc.balance import Balancer
from engine.rpc.joined import JOINED, DeadCounters, first_of, sum_of
from engine.rpc.restarts import RestartOutcome, Restarts, Start
from engine.rpc.zmq_client import STEP_SECONDS, EngineCoreClient

logger = logging.getLogger("engine.core")


class ManyCoresClient(CoreClient):
    """A client of several cores; each request runs on one of them, chosen by ``Balancer``.

    If a core dies, its requests end with an error and the other cores continue; ``start``, if
    given, restarts the core. The client is dead when no core is left. Raises ``ConfigError`` for
    cores that do not run the same model."""

    max_call_bytes = MAX_CALL_BYTES

    def __init__(
        self,
        cores: Sequence[EngineCoreClient],
        *,
        start: Start | None = None,
        at_end: Callable[[], object] = lambda: None,
        roles: Roles | None = None,
    ) -> None:
        """at_end: called when all cores have been shut down. roles: if some cores only compute
        prompts."""
        self._at_end = at_end
        self._cores = list(cores)
        self._alive = list(range(len(self._cores)))
        self._num_deaths = 0
        self._lost: list[CoreOutputs] = []  # ends of requests whose core has died
        check_alike(self._cores)
        self.decided = self._cores[0].decided  # equal for all cores
        self.id_prefix = _prefix_of(self._cores)
        self.reads_shared_memory = any(core.reads_shared_memory for core in self._cores)
        self._death: EngineDeadError | None = None
        self._over: EngineDeadError | None = None  # set when no core is left
        self._balancer = Balancer(len(self._cores), self.decided.block_size)
        self._counters = DeadCounters()
        self._paused: tuple[Any, ...] | None = None  # arguments of ``pause``, for restarted cores
        self._loads = AdapterLoads()  # for restarted cores, too
        self._poller = zmq.Poller()
        self._waker = sockets.Waker()  # since ``take`` clears those of the cores
        self._poller.register(self._waker.fd, zmq.POLLIN)
        self._restarts: Restarts | None = None
        if start is not None:
            self._restarts = Restarts(start, self._waker.wake)
        self._apart: PrefillApart | None = None
        if roles is not None:
            self._apart = PrefillApart(roles, self._cores, self._balancer, self._named)
        for index, core in enumerate(self._cores):
            self._watch(index, core)

    @property
    def pids(self) -> list[int]:
        """Process ids of the cores that this client has started, for monitoring."""
        return [pid for index in self._alive for pid in self._cores[index].pids]

    @property
    def loads(self) -> list[int]:
        """Tokens that the requests of each core have yet to compute, at most, as far as is known:
        those of this client and of others."""
        return self._balancer.loads

    def add_all(self, requests: Sequence[AddRequest]) -> dict[int, Exception]:
        self.check_alive()
        if not self._alive:
            return {place: self._restarting() for place in range(len(requests))}
        errors: dict[int, Exception] = {}
        apart, sent = self._apart, list(requests)
        places: defaultdict[int, list[int]] = defaultdict(list)  # by core
        for place, request in enumerate(requests):
            if self._balancer.core_of(request.request_id) is not None:
                errors[place] = in_use(request.request_id)  # another core would accept it
            elif apart is None:
                places[self._balancer.choose(request)].append(place)
            else:
                try:
                    core, sent[place] = apart.choose(request)
                    places[core].append(place)
                except RequestError as error:
                    errors[place] = error
        for core, own in places.items():
            errors |= self._add_to(core, sent, own)
        if apart is not None:
            apart.tend()
        return errors

    def bring(self, request_ids: Sequence[str], content: MediaContent) -> None:
        self.check_alive()
        if self._apart is not None:
            request_ids = [*request_ids, *self._apart.prefills_of(request_ids)]
        for core, own in self._by_core(request_ids).items():
            with self._named(core):
                self._cores[core].bring(own, content)

    def abort(self, request_ids: Sequence[str]) -> None:
        self.check_alive()
        names = self._by_core(as_request_ids(request_ids))
        for request_id in chain(*names.values()):
            self._balancer.end(request_id)
        for core, own in names.items():
            with self._named(core):
                self._cores[core].abort(own)
        if self._apart is not None:
            for request_id in chain(*names.values()):
                self._apart.end(request_id)
            self._apart.tend()

    def step(self) -> list[CoreOutputs]:
        batches = self._take()
        if not batches:
            self._poller.poll(round(1000 * STEP_SECONDS))
            self._waker.clear()
            batches = self._take()
        return batches

    def wake(self) -> None:
        self._waker.wake()
        for index in self._alive:
            self._cores[index].wake()

    def check_alive(self) -> None:
        self._join()
        for index in list(self._alive):
            with self._named(index):
                self._cores[index].check_alive()

    def num_unfinished(self) -> int:
        alive = sum(self._cores[index].num_unfinished() for index in self._alive)
        lost = sum(len(batch.finished) for batch in self._lost)
        return alive + lost - (0 if self._apart is None else self._apart.num_unfinished())

    def num_cores(self) -> NumCores:
        num_prefill = 0 if self._apart is None else self._apart.num_cores
        prefill_alive = sum(index < num_prefill for index in self._alive)
        num_alive, num_all = len(self._alive), len(self._cores)
        return NumCores(num_alive, num_all, self._num_deaths, num_prefill, prefill_alive)

    def latest_stats(self) -> SchedulerStats | None:
        known = []
        for index in list(self._alive):
            with self._named(index):
                stats = self._cores[index].latest_stats()
                self._counters.update(index, stats)
                known.append(stats)
        return self._with_counters(sum_of(known))

    def call(self, name: str, *args: Any) -> Any:
        """Call a utility on all cores. Statistics are added, traces are joined, and
        ``reset_prefix_cache`` returns whether all cores succeeded; else the first core's answer is
        returned.

        Raises ``RestartingError`` while all cores are being restarted."""
        self.check_alive()
        if name in ("pause", "resume"):
            self._paused = args if name == "pause" else None
        answers = list(self._of_all(name, *args).values())
        if not answers:
            if name in ("pause", "resume"):  # also for cores that are restarted later
                return None
            raise self._restarting()
        answer = JOINED.get(name, first_of)(answers)
        if self._loads.record(name, args, answer):
            self._balancer.adapters.update(self._loads.digests())
        return self._with_counters(answer) if name == "stats" else answer

    def end_restarts(self) -> None:
        if self._restarts is not None:
            self._restarts.stop()

    def shutdown(self) -> None:
        self._over = self._over or EngineDeadError("the engine was shut down")
        if self._restarts is not None:
            self._restarts.close()
        shut_down(self._cores)
        self._at_end()
        self._waker.close()

    def _with_counters(self, stats: SchedulerStats | None) -> SchedulerStats | None:
        stats = self._counters.add_to(stats)
        return stats if self._apart is None else self._apart.add_to(stats)

    def _by_core(self, request_ids: Sequence[str]) -> dict[int, list[str]]:
        """The ids of unfinished requests, by the number of their core."""
        names: defaultdict[int, list[str]] = defaultdict(list)
        for request_id in request_ids:
            if (core := self._balancer.core_of(request_id)) is not None:
                names[core].append(request_id)
        return names

    def _add_to(
        self, core: int, requests: Sequence[AddRequest], places: list[int]
    ) -> dict[int, Exception]:
        refused: dict[int, Exception] = {}
        with self._named(core):
            refused = self._cores[core].add_all([requests[place] for place in places])
        for index in refused:
            self._balancer.end(requests[places[index]].request_id)
            if self._apart is not None:
                self._apart.end(requests[places[index]].request_id)
        return {places[index]: error for index, error in refused.items()}

    def begin_each(self, name: str, *args: Any) -> Callable[[], dict[int, Any] | None]:
        self.check_alive()
        answers: dict[int, Any] = {}
        errors: list[EngineError] = []
        begun = self._begin_all(errors, name, *args)

        def take() -> dict[int, Any] | None:
            self.check_alive()
            for index, (core, number) in list(begun.items()):
                if index in self._alive and self._cores[index] is core:
                    if not core.is_answered(number):
                        continue
                    with _collected(errors):
                        answers[index] = core.end_call(name, number)
                del begun[index]
            if begun:
                return None
            if errors:
                raise errors[0]
            return answers

        return take

    def _of_all(self, name: str, *args: Any) -> dict[int, Any]:
        """Call a utility on all cores and return their answers, by core. All are called before any
        has answered, so it takes as long as the slowest. If it fails on some cores, the first error
        is raised after all have answered."""
        answers: dict[int, Any] = {}
        errors: list[EngineError] = []
        for index, (core, number) in self._begin_all(errors, name, *args).items():
            with self._named(index), _collected(errors):
                answers[index] = core.end_call(name, number)
                if name == "stats":
                    self._counters.update(index, answers[index])
        if errors:
            raise errors[0]
        return answers

    def _begin_all(
        self, errors: list[EngineError], name: str, *args: Any
    ) -> dict[int, tuple[EngineCoreClient, int]]:
        """Send a utility call to all cores. Returns the client and the call's number of each; what
        goes wrong is added to ``errors``."""
        begun: dict[int, tuple[EngineCoreClient, int]] = {}
        for index in list(self._alive):
            core = self._cores[index]
            with self._named(index), _collected(errors):
                begun[index] = core, core.begin_call(name, *args)
        return begun

    @contextmanager
    def _named(self, index: int) -> Iterator[None]:
        """Context that handles the death of core ``index`` within it: the core is restarted if
        allowed, or left out. Raises ``EngineDeadError`` if no core is left."""
        try:
            yield
        except EngineDeadError as error:
            which = f"core {index} of {len(self._cores)} at {self._cores[index].address.data}"
            death = f"{which}: {error}"
            if index not in self._alive:
                return
            if self._alive == [index] and not self._is_restarting:
                if self._restarts is None:
                    raise EngineDeadError(death) from error.__cause__
                if (why_not := self._restarts.why_not(index)) is not None:
                    death = f"{death}; it is not started again: {why_not}"
                    raise EngineDeadError(death) from error.__cause__
            self._go_on_without(index, death)

    def _go_on_without(self, index: int, death: str) -> None:
        core = self._cores[index]
        place = f" on {core.place}" if core.place else ""
        self._alive.remove(index)
        if core.route is not None:
            core.route.close()
        self._num_deaths += 1
        for source in core.sources:
            self._poller.unregister(source)
        names = self._balancer.remove(index)
        if self._apart is not None:
            names = self._apart.lost(index, names)
        self._counters.add_dead(index)
        what = self._start_again(index, core)
        logger.error("%s; its %d unfinished requests end with an error%s", death, len(names), what)
        # Clients of a server see what comes before the colon.
        message = f"core {index}{place}, which ran this request, has died: {death}"
        ends = [
            Finished(place, "error", message=message, code="core_died")
            for place in range(len(names))
        ]
        nothing = [0] * len(names)
        self._lost.append(CoreOutputs(names, [], nothing, time.monotonic(), finished=ends))

    def _start_again(self, index: int, dead: EngineCoreClient | None) -> str:
        """Restart a core, if allowed. Returns what happens next, for the log."""
        num = len(self._cores)
        rest = f"; {len(self._alive)} of {num} cores go on" if num > 1 else ""
        if self._restarts is None:
            return rest
        if (why_not := self._restarts.why_not(index)) is not None:
            return f"; it is not started again: {why_not}{rest}"
        number = self._restarts.begin(index, dead)
        return f"; it is started again ({number} of {self._restarts.most} times){rest}"

    @property
    def _is_restarting(self) -> bool:
        return self._restarts is not None and self._restarts.is_pending

    def _restarting(self) -> RestartingError:
        seconds = 1.0 if self._restarts is None else self._restarts.seconds_left
        return RestartingError("the core has died and is being started again", seconds)

    def _join(self) -> None:
        """Take restarted cores into use. Raises ``EngineDeadError`` if no core is left."""
        if self._over is not None:
            raise EngineDeadError(str(self._over)) from self._over.__cause__
        if self._restarts is None or not self._restarts.is_pending:
            return
        for outcome in self._restarts.take():
            try:
                self._join_core(outcome)
            except (EngineDeadError, ConfigError) as error:
                self._fail_restart(outcome.core, error)

    def _fail_restart(self, index: int, error: EngineError) -> None:
        """Handle a failed restart of a core. Raises ``EngineDeadError`` if no core is left."""
        which = f"core {index} of {len(self._cores)}"
        if self._restarts is not None and self._restarts.is_stopped:
            logger.warning("%s is not started again: the engine is ending", which)
        else:
            what = self._start_again(index, None)
            logger.error("%s could not be started again: %s%s", which, error, what)
        if not self._alive and not self._is_restarting:
            self._over = EngineDeadError(f"{which} could not be started again: {error}")
            raise self._over from error.__cause__

    def _join_core(self, outcome: RestartOutcome) -> None:
        """Use a core that was restarted. Raises the error of a failed restart, and ``ConfigError``
        for a core that handles requests differently from the dead one."""
        core, index = outcome.client, outcome.core
        if core is None:
            raise outcome.error or EngineDeadError("it has ended")
        try:
            check_alike([self._cores[index], core])
            if self._paused is not None:
                core.call("pause", *self._paused)
            self._loads.repeat(core)
        except BaseException:
            core.shutdown()
            raise
        self._cores[index] = core
        self._alive = sorted([*self._alive, index])
        self._balancer.restore(index)
        self._watch(index, core)
        logger.warning(
            "core %d of %d serves again, started in %.1f s (process %s)",
            index,
            len(self._cores),
            outcome.seconds,
            ", ".join(map(str, core.pids)),
        )

    def _watch(self, index: int, core: EngineCoreClient) -> None:
        for each in core.sources:
            self._poller.register(each, zmq.POLLIN)
        if len(self._cores) > 1:
            with self._named(index):
                core.follow(partial(self._balancer.update, index))

    def _take(self) -> list[CoreOutputs]:
        """The outputs received from all cores. After the death of the last core, it raises the
        error only when no outputs are left to return."""
        if self._death is not None:
            raise EngineDeadError(str(self._death)) from self._death.__cause__
        try:
            self._join()
        except EngineDeadError as error:
            self._death = error
        batches = self._take_from_all()
        if self._death is not None:  # read once more, since earlier outputs may have hidden others
            batches += self._take_from_all()
        if self._death is not None and not batches:
            raise self._death
        for batch in batches:
            for started in batch.started:
                self._balancer.start(batch.request_ids[started.index])
            for end in batch.finished:
                self._balancer.end(batch.request_ids[end.index])
        return batches if self._apart is None else self._apart.take(batches)

    def _take_from_all(self) -> list[CoreOutputs]:
        """The outputs received from all cores. If the last core has died, the error is stored, so
        that ``_take`` can raise it after the outputs."""
        batches, self._lost = self._lost, []
        for index in list(self._alive):
            try:
                with self._named(index):
                    batches += self._cores[index].take()
            except EngineDeadError as error:
                self._death = error
        return batches


@contextmanager
def _collected(errors: list[EngineError]) -> Iterator[None]:
    """Context that adds an error within it to ``errors``, unless a core has died."""
    try:
        yield
    except EngineDeadError:
        raise
    except EngineError as error:
        errors.append(error)


def shut_down(cores: Sequence[EngineCoreClient]) -> None:
    """Shut down several clients concurrently."""
    for core in cores:
        core.request_end()
    for core in cores:
        core.shutdown()


def _prefix_of(cores: Sequence[EngineCoreClient]) -> str:
    """The prefix of request ids: "" if no core has assigned a prefix, else a random prefix."""
    if not any(core.id_prefix for core in cores):
        return ""
    return f"clients-{secrets.token_hex(8)}/"


def check_alike(cores: Sequence[EngineCoreClient]) -> None:
    """Raise ``ConfigError`` unless all cores handle a request in the same way."""
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

"""InprocClient: a client of a core in the same process."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from engine.config.decide import Decided
from engine.core.client import CoreClient
from engine.core.control import AdapterDoor, MediaDoor, Utilities
from engine.core.engine_core import EngineCore
from engine.core.polling import Work, parked_seconds
from engine.errors import EngineDeadError
from engine.kv.changes import CacheChanges
from engine.messages.kv_orders import Loaded
from engine.messages.media import MediaContent
from engine.messages.requests import (
    AddRequest,
    CoreOutputs,
    Finished,
    as_request_ids,
    check_request,
    in_use,
    with_ends,
)
from engine.messages.stats import RankUse, SchedulerStats, StoreUse
from engine.observe.guard import Failures
from engine.sched.interface import StepOutputs

logger = logging.getLogger("engine.core")


class Loads(Protocol):
    """Loads of KV blocks from outside the pool."""

    def take_reports(self) -> Sequence[Loaded]:
        """The loads that have ended since the last call. Called before each step."""

    def step_ended(self) -> None:
        """Called after each step."""

    def uses(self) -> dict[str, StoreUse]:
        """What each store has, by name."""


class InprocClient(CoreClient):
    """Calls the core directly; ``step`` runs one engine step in the caller's thread.

    An exception in a step leaves the core dead."""

    decided: Decided
    id_prefix = ""

    def __init__(
        self,
        core: EngineCore,
        decided: Decided,
        *,
        clock: Callable[[], float] = time.monotonic,
        failures: Failures | None = None,
        adapters: AdapterDoor | None = None,
        methods: Mapping[str, Callable[..., Any]] | None = None,
        media: MediaDoor | None = None,
    ) -> None:
        """Wrap a core. failures: counts the errors of the core's observers, for its statistics;
        adapters: the feature that knows LoRA adapters, if the core takes any; methods: further
        functions that clients may call by name; media: keeps the content of media."""
        self.decided = decided
        self._core: EngineCore | None = core
        self._clock = clock
        self._aborted: dict[str, tuple[int, Finished]] = {}  # ends to report with the next step
        self._cause: BaseException | None = None
        self._adapters = adapters
        self._media = media
        self.loads: Loads | None = None
        """Knows which loads of KV blocks have ended, if blocks are kept outside the pool."""
        self.rank_uses: Callable[[], list[RankUse]] = list
        """Returns what the ranks of the core do, if several compute its model."""
        self._woken = threading.Event()
        self.wake_loop: Callable[[], object] = lambda: None
        """Wakes whoever calls ``turn`` in a loop and sleeps."""
        self._idle_since: float | None = None
        self._utilities = Utilities(
            core.scheduler,
            core.executor,
            failures or Failures(),
            adapters,
            methods,
            stores=lambda: {} if self.loads is None else self.loads.uses(),
            ranks=lambda: self.rank_uses(),
        )

    def add(self, request: AddRequest) -> None:
        core = self._live()
        check_request(request, self.decided.vocab_size, self.decided.capabilities)
        if request.request_id in self._aborted:
            raise in_use(request.request_id)
        if self._adapters is not None:
            request = self._adapters.resolved(request)
        core.scheduler.add_request(request)

    def add_all(self, requests: Sequence[AddRequest]) -> dict[int, Exception]:
        errors: dict[int, Exception] = {}
        for index, request in enumerate(requests):
            try:
                self.add(request)
            except EngineDeadError:
                raise
            except Exception as error:  # e.g. of the policy: only this request fails
                errors[index] = error
        return errors

    def abort(self, request_ids: Sequence[str]) -> None:
        scheduler = self._live().scheduler
        for name, client_index, end in scheduler.finish_requests(as_request_ids(request_ids)):
            self._aborted[name] = (client_index, end)

    def drop(self, request_ids: Sequence[str]) -> None:
        """Abort requests without any further output for them."""
        self._live().scheduler.finish_requests(request_ids, "abort")

    def bring(self, request_ids: Sequence[str], content: MediaContent) -> None:
        scheduler = self._live().scheduler
        if self._media is not None:
            scheduler.arrived(self._media.take(request_ids, content))

    def step(self) -> list[CoreOutputs]:
        outputs = list(self.turn().values())
        if self.loads is not None and self._live().has_work and not self.has_unfinished():
            self.turn()  # nobody may call this again, and the last blocks are not stored yet
        if outputs or not self.is_idle:
            self._idle_since = None
            return outputs
        now = self._clock()  # requests are paused, parked, or await something
        self._idle_since = now if self._idle_since is None else self._idle_since
        if self._woken.wait(parked_seconds(now - self._idle_since)):
            self._woken.clear()
            self._idle_since = None
        return outputs

    def turn(self) -> StepOutputs:
        """Run one engine step without sleeping; returns its outputs, keyed by client index."""
        core = self._live()
        try:
            if self.loads is not None:
                for report in self.loads.take_reports():
                    core.scheduler.transferred(report)
            outputs = core.step()
        except BaseException as error:  # the step is incomplete after any error
            self._cause = error
            if not isinstance(error, Exception):
                raise
            raise EngineDeadError(
                f"the engine core died: {type(error).__name__}: {error}"
            ) from error
        if self.loads is not None:
            self.loads.step_ended()
        return self._with_aborted(outputs) if self._aborted else outputs

    def wake(self) -> None:
        self._woken.set()

    def fail(self, error: Exception) -> None:
        """Take note that the core has died of this error. Any thread may call it."""
        self._cause = self._cause or error
        self.wake()
        self.wake_loop()

    @property
    def shared_device(self) -> str:
        """Name of the device to which clients may copy pixels; "" for none."""
        return "" if self._media is None else self._media.device

    @property
    def core(self) -> EngineCore:
        """The core object. Raises ``EngineDeadError`` if it has ended."""
        return self._live()

    def check_alive(self) -> None:
        self._live()

    @property
    def is_idle(self) -> bool:
        """True if the last step had no plan to compute and no result to collect."""
        return self._live().is_idle

    def next_work(self, num_moved: int) -> Work:
        """Return the kind of the next step: ``"prefill"`` if it may compute prompt tokens, else
        ``"decode"``. ``num_moved``: number of requests that got output tokens in the last step."""
        counts = self._live().scheduler.get_request_counts()
        return "prefill" if counts.waiting or counts.running > num_moved else "decode"

    def follow_cache(self) -> CacheChanges | None:
        """Begin to collect which blocks enter and leave the prefix cache; ``None`` without one."""
        return self._live().scheduler.follow_cache()

    def adapter_digests(self) -> dict[str, str]:
        """Digests of the loaded LoRA adapters, by name."""
        if self._adapters is None:
            return {}
        listed = self._adapters.methods["adapters"]()
        return {each["name"]: each["digest"] for each in listed}

    def num_unfinished(self) -> int:
        if self._core is None:
            return 0
        return self._core.scheduler.get_num_unfinished_requests() + len(self._aborted)

    def latest_stats(self) -> SchedulerStats | None:
        self._live()
        return self._utilities.stats()

    def call(self, name: str, *args: Any) -> Any:
        self._live()
        return self._utilities.call(name, args)

    def shutdown(self) -> None:
        if self._core is not None:
            if self.loads is not None and self._cause is None:
                self._store_last()
            core, self._core = self._core, None
            try:
                core.executor.shutdown()
            finally:
                core.scheduler.shutdown()
                gc.unfreeze()  # ``build_core`` froze what is garbage now, perhaps in cycles

    def _store_last(self) -> None:
        """Store the KV blocks that the last steps have filled."""
        assert self._core is not None
        try:
            self._core.finish_steps()
        except Exception:  # they are only missing from the stores
            logger.exception("the KV blocks of the last steps could not be stored")

    def _with_aborted(self, outputs: StepOutputs) -> StepOutputs:
        """Add the last outputs of aborted requests to the outputs of a step."""
        ends: defaultdict[int, list[tuple[str, Finished]]] = defaultdict(list)
        for name, (client_index, end) in self._aborted.items():
            ends[client_index].append((name, end))
        self._aborted.clear()
        nothing = CoreOutputs([], [], [], self._clock())
        return outputs | {
            client_index: with_ends(outputs.get(client_index, nothing), own)
            for client_index, own in ends.items()
        }

    def _live(self) -> EngineCore:
        if self._cause is not None:
            cause = f"{type(self._cause).__name__}: {self._cause}"
            raise EngineDeadError(f"the engine core died: {cause}") from self._cause
        if self._core is None:
            raise EngineDeadError("the engine was shut down")
        return self._core

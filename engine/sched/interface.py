"""SchedulerInterface: the methods of a scheduler that the engine core calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from engine.messages.requests import AddRequest, CoreOutputs, Finished, FinishReason
from engine.messages.stats import SchedulerStats
from engine.messages.step import Masks, StepPlan, StepResult

if TYPE_CHECKING:
    from engine.kv.connector import KVSource
    from engine.sched.predict.headroom import Judgement

StepOutputs = dict[int, CoreOutputs]  # by client index


class RequestCounts(NamedTuple):
    """Numbers of unfinished requests by status."""

    running: int
    waiting: int
    parked: int = 0


class FinishedRequest(NamedTuple):
    """A request that ``finish_requests`` has finished, and the message about it to its client."""

    request_id: str
    client_index: int
    end: Finished


class PauseState(Enum):
    """Which requests a pause stops."""

    UNPAUSED = "unpaused"
    PAUSED_NEW = "paused new"  # running requests continue, no waiting request starts
    PAUSED_ALL = "paused all"  # nothing is scheduled


class SchedulerInterface(ABC):
    """Decides, step by step, how many tokens of which requests the workers compute.

    ``add_request`` and ``finish_requests`` may be called between any two steps. Each plan that
    ``schedule`` returns is passed to ``update_from_output`` once, in the same order; several plans
    may be in flight.

    A custom scheduler (``scheduler_cls``) is created by ``cls(config, kv, policy, clock=, timer=,
    seed=, resources=)``: ``SchedulerConfig``, ``KVManager``, ``Policy``, two functions that return
    seconds (the engine's clock, and a timer for hooks), an int, and a tuple of ``Resource``. It may
    ignore all of them but ``kv``, from which the blocks in its plans must be reserved.
    """

    @abstractmethod
    def add_request(self, add: AddRequest) -> object:
        """Queue a request. Raises ``RequestError`` if it could never run, or if an unfinished
        request has the same id. The engine ignores the returned value."""

    @abstractmethod
    def schedule(self) -> StepPlan:
        """Plan the next step. Request counters advance before the step's result is known."""

    def masks(self, plan: StepPlan) -> Masks | None:
        """Bit masks of the allowed next tokens for the rows of ``plan.masks``. Called once, when
        all earlier steps are settled. With ``None`` these rows fail."""
        return None

    @abstractmethod
    def update_from_output(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Settle a step: append tokens, finish requests that stop. Returns outputs by client."""

    @abstractmethod
    def finish_requests(
        self, request_ids: str | Iterable[str] | None, reason: FinishReason = "abort"
    ) -> list[FinishedRequest]:
        """Finish the requests with these ids (``None``: all); returns those that were unfinished.

        A plain string is one id; unknown ids are ignored.
        """

    @abstractmethod
    def get_request_counts(self) -> RequestCounts:
        """The numbers of running, waiting and parked requests."""

    @abstractmethod
    def has_finished_requests(self) -> bool:
        """True if finished requests have not been reported to the worker yet."""

    def wake(self, request_id: str) -> None:
        """Return a parked request to the queue; unknown ids are ignored."""

    def get_num_unfinished_requests(self) -> int:
        return sum(self.get_request_counts())

    def has_unfinished_requests(self) -> bool:
        return self.get_num_unfinished_requests() > 0

    def has_requests(self) -> bool:
        """True if there are unfinished requests, or finished ones to report to the worker."""
        return self.has_unfinished_requests() or self.has_finished_requests()

    def take_outputs(self) -> StepOutputs:
        """Take the outputs of requests that ended outside a step: deadlines and aborts."""
        return {}

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Empty the prefix cache. While blocks are in use, return False and keep the cache.

        ``reset_running``: first preempt all running requests; they keep their order in the queue.
        They stay preempted even if False is returned because a transfer uses some blocks.
        """
        return False

    def set_pause_state(self, state: PauseState) -> None:
        """Stop starting new requests, or stop scheduling at all, until ``UNPAUSED``."""
        name = type(self).__name__
        raise NotImplementedError(f"{name} cannot be paused: it lacks set_pause_state")

    def get_kv_connector(self) -> KVSource | None:
        """The KV source from which KV computed elsewhere is loaded, or ``None``."""
        return None

    def take_judgements(self) -> list[Judgement]:
        """Take the decisions since the last call that depended on measured times. The step log
        records them, so that a replay can repeat them."""
        return []

    def expect_judgement(self, judgement: Judgement) -> None:
        """In a replay: use this recorded decision in the next step."""

    def make_stats(self) -> SchedulerStats | None:
        """Current statistics, or ``None`` if the scheduler keeps none."""
        return None

    def shutdown(self) -> None:
        """Release files, connections and threads."""

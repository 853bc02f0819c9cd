"""SchedulerInterface: the methods of a scheduler that the engine core calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from engine.messages.requests import AddRequest, Arrival, CoreOutputs, Finished, FinishReason
from engine.messages.stats import SchedulerStats
from engine.messages.step import Masks, StepPlan, StepResult

if TYPE_CHECKING:
    from engine.kv.changes import CacheChanges
    from engine.messages.kv_orders import Loaded
    from engine.sched.predict.headroom import Judgement
    from engine.sched.predict.loads import LoadChoice

StepOutputs = dict[int, CoreOutputs]  # by client index


class RequestCounts(NamedTuple):
    """Numbers of unfinished requests by status."""

    running: int
    waiting: int
    parked: int = 0


class FinishedRequest(NamedTuple):
    """A request that ``finish_requests`` ended, and the message for its client."""

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

    The engine passes each plan from ``schedule`` to ``update_from_output`` once, in the same order.
    Meanwhile it may request further plans. ``add_request`` and ``finish_requests`` may be called
    between any two steps.

    A custom scheduler (``scheduler_cls``) is created by ``cls(config, kv, policy, clock=, timer=,
    seed=, resources=)``: ``SchedulerConfig``, ``KVManager``, ``Policy``, two functions that return
    seconds (the engine's clock, and a timer for hooks), an int, and a tuple of ``Resource``. The KV
    blocks in its plans must be reserved from ``kv``.
    """

    @abstractmethod
    def add_request(self, add: AddRequest) -> object:
        """Queue a request; the returned value is ignored. Raises ``RequestError`` if the request
        could never run, or if an unfinished request has the same id."""

    @abstractmethod
    def schedule(self) -> StepPlan:
        """Plan the next step. Earlier steps may still be running."""

    def masks(self, plan: StepPlan) -> Masks | None:
        """Bit masks of the allowed next tokens for the rows in ``plan.masks``; with ``None`` these
        rows fail. Called once per plan, after the results of all earlier steps."""
        return None

    @abstractmethod
    def update_from_output(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Append a step's tokens and finish requests. Returns the outputs for each client index."""

    @abstractmethod
    def finish_requests(
        self, request_ids: str | Iterable[str] | None, reason: FinishReason = "abort"
    ) -> list[FinishedRequest]:
        """Finish the requests with these ids (``None``: all). Returns those that were unfinished.

        A string is one id; unknown ids are ignored.
        """

    @abstractmethod
    def get_request_counts(self) -> RequestCounts:
        """The numbers of running, waiting and parked requests."""

    @abstractmethod
    def has_finished_requests(self) -> bool:
        """True if the worker does not know yet that some requests have finished."""

    def wake(self, request_id: str) -> None:
        """Return a parked request to the queue; an unknown id is ignored."""

    def arrived(self, arrival: Arrival) -> None:
        """Note that the content of a media item has come, or cannot come. Ids of requests that have
        ended are ignored."""

    def transferred(self, report: Loaded) -> None:
        """Note that a load of KV blocks from outside the pool has ended."""

    def get_num_unfinished_requests(self) -> int:
        return sum(self.get_request_counts())

    def has_unfinished_requests(self) -> bool:
        return self.get_num_unfinished_requests() > 0

    def has_requests(self) -> bool:
        """True if a request is unfinished, or the worker does not know of a finished one yet."""
        return self.has_unfinished_requests() or self.has_finished_requests()

    def take_outputs(self) -> StepOutputs:
        """Return new outputs of requests that ended outside a step, by a deadline or an abort."""
        return {}

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Empty the prefix cache and return True, or return False while any KV block is in use.

        ``reset_running``: first preempt all running requests, which then wait in their former
        order.
        """
        return False

    def reset_encoder_cache(self) -> None:
        """Drop the encoder outputs that no request uses now. Later requests encode their media
        again, also where an output is still in use."""

    def follow_cache(self) -> CacheChanges | None:
        """Begin to collect which blocks enter and leave the prefix cache, for clients of several
        cores. ``None``: their requests are then sent to cores by load only."""
        return None

    def set_pause_state(self, state: PauseState) -> None:
        """Pause the scheduler as ``state`` defines, or resume it (``UNPAUSED``)."""
        name = type(self).__name__
        raise NotImplementedError(f"{name} cannot be paused: it lacks set_pause_state")

    def take_judgements(self) -> list[Judgement | LoadChoice]:
        """Return the decisions since the last call that depended on measured times or on stores of
        KV blocks, for a step log."""
        return []

    def expect_judgement(self, judgement: Judgement | LoadChoice) -> None:
        """In a replay: let the next step use this recorded decision instead of its own."""

    def make_stats(self) -> SchedulerStats | None:
        """Current statistics, or ``None`` if the scheduler keeps none."""
        return None

    def shutdown(self) -> None:
        """Release files, connections and threads."""

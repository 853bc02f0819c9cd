"""What the core asks of a scheduler."""

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
    """Unfinished requests by status."""

    running: int
    waiting: int
    parked: int = 0


class FinishedRequest(NamedTuple):
    """A request that ``finish_requests`` has finished, and the end that its client gets."""

    request_id: str
    client_index: int
    end: Finished


class PauseState(Enum):
    """What a pause holds back."""

    UNPAUSED = "unpaused"
    PAUSED_NEW = "paused new"  # running requests go on, waiting ones are held
    PAUSED_ALL = "paused all"  # nothing is scheduled


class SchedulerInterface(ABC):
    """Decides, step by step, how many tokens of which requests the workers compute.

    ``add_request`` and ``finish_requests`` may come between any two steps. Each plan that
    ``schedule`` returns comes back once, in the same order, to ``update_from_output``; several may
    be outstanding.

    One of your own (``scheduler_cls``) is made by ``cls(config, kv, policy, clock=, timer=, seed=,
    resources=)``: ``SchedulerConfig``, ``KVManager``, ``Policy``, two functions that return seconds
    (of the engine's clock, and to time hooks with), an int, and a tuple of ``Resource``. It may
    leave all of them unread but the blocks: those that its plans name are those of ``kv``.
    """

    @abstractmethod
    def add_request(self, add: AddRequest) -> object:
        """Queue a request. Raises ``RequestError`` for one that could never run or a live id. The
        engine does not read what is returned."""

    @abstractmethod
    def schedule(self) -> StepPlan:
        """Plan the next step; counts advance before its result is known."""

    def masks(self, plan: StepPlan) -> Masks | None:
        """Allowed next tokens for the rows of ``plan.masks``; called once, when all earlier plans
        are settled. ``None``: those rows fail."""
        return None

    @abstractmethod
    def update_from_output(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Settle a step: append tokens, finish what stopped; columns grouped by client."""

    @abstractmethod
    def finish_requests(
        self, request_ids: str | Iterable[str] | None, reason: FinishReason = "abort"
    ) -> list[FinishedRequest]:
        """Finish these (None: all) and return those that were alive, and their ends.

        A plain string is one id; unknown ids do nothing.
        """

    @abstractmethod
    def get_request_counts(self) -> RequestCounts:
        """Running, waiting and parked requests."""

    @abstractmethod
    def has_finished_requests(self) -> bool:
        """Are there finished requests that the worker has not been notified of?"""

    def wake(self, request_id: str) -> None:
        """Return a parked request to the queue; unknown ids are ignored."""

    def get_num_unfinished_requests(self) -> int:
        return sum(self.get_request_counts())

    def has_unfinished_requests(self) -> bool:
        return self.get_num_unfinished_requests() > 0

    def has_requests(self) -> bool:
        """Unfinished requests, or finished ones that the worker must still be notified of."""
        return self.has_unfinished_requests() or self.has_finished_requests()

    def take_outputs(self) -> StepOutputs:
        """Outputs that belong to no step, of requests that passed a deadline or were ended."""
        return {}

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forget cached prefixes. While blocks are in use, return False and keep the cache.

        ``reset_running``: first send all running requests back to the queue, in their order. They
        stay there even if the result is False because a transfer uses some of the blocks.
        """
        return False

    def set_pause_state(self, state: PauseState) -> None:
        """Hold back new requests, or everything, until ``UNPAUSED``."""
        raise NotImplementedError(f"{type(self).__name__} cannot be paused")

    def get_kv_connector(self) -> KVSource | None:
        """The connector that moves KV to and from the local pool; ``None`` without one."""
        return None

    def take_judgements(self) -> list[Judgement]:
        """Decisions from measured times since the last call, for a replayable step log."""
        return []

    def expect_judgement(self, judgement: Judgement) -> None:
        """In a replay: use this decision in the next step."""

    def make_stats(self) -> SchedulerStats | None:
        """Statistics of the moment, ``None`` if it keeps none."""
        return None

    def shutdown(self) -> None:
        """Let go of what was opened."""

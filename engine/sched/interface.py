"""What the core asks of a scheduler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from engine.messages.outputs import CoreOutputs, FinishReason
from engine.messages.requests import AddRequest
from engine.messages.stats import SchedulerStats
from engine.messages.step import Masks, StepPlan, StepResult
from engine.sched.request import Request

if TYPE_CHECKING:
    from engine.kv.connector import KVSource
    from engine.sched.predict.headroom import Judgement

StepOutputs = dict[int, CoreOutputs]  # by client index


class RequestCounts(NamedTuple):
    """Unfinished requests by status."""

    running: int
    waiting: int
    parked: int = 0


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
    """

    @abstractmethod
    def add_request(self, add: AddRequest) -> Request:
        """Queue a request. Raises ``RequestError`` for one that could never run or a live id."""

    @abstractmethod
    def schedule(self) -> StepPlan:
        """Plan the next step; counts advance before its result is known."""

    def masks(self, plan: StepPlan) -> Masks | None:
        """What the rows of ``plan.masks`` may be followed by; asked once, when all plans before
        this one have come back. ``None``: those rows fail."""
        return None

    @abstractmethod
    def update_from_output(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Settle a step: append tokens, finish what stopped; columns grouped by client."""

    @abstractmethod
    def finish_requests(
        self, request_ids: str | Iterable[str] | None, reason: FinishReason = "abort"
    ) -> list[Request]:
        """Finish these (None: all) and return those that were alive.

        A plain string is one id; unknown ids do nothing.
        """

    @abstractmethod
    def get_request_counts(self) -> RequestCounts:
        """Running, waiting and parked requests."""

    @abstractmethod
    def has_finished_requests(self) -> bool:
        """Are there finished requests of which the worker was not told yet?"""

    def wake(self, request_id: str) -> None:
        """What a parked request waited for has arrived; unknown ids do nothing."""

    def get_num_unfinished_requests(self) -> int:
        return sum(self.get_request_counts())

    def has_unfinished_requests(self) -> bool:
        return self.get_num_unfinished_requests() > 0

    def has_requests(self) -> bool:
        """Unfinished ones, or finished ones the worker must still hear of."""
        return self.has_unfinished_requests() or self.has_finished_requests()

    def take_outputs(self) -> StepOutputs:
        """Outputs that belong to no step: requests that met a deadline, or were ended."""
        return {}

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forget cached prefixes; False (and the cache is as it was) while blocks are in use.

        ``reset_running``: send all running requests back to the queue first, in their order. They
        are back there also if the answer is False, since a transfer uses some of the blocks.
        """
        return False

    def set_pause_state(self, state: PauseState) -> None:
        """Hold back new requests, or everything, until ``UNPAUSED``."""
        raise NotImplementedError(f"{type(self).__name__} cannot be paused")

    def get_kv_connector(self) -> KVSource | None:
        """Where KV comes from and goes to beside the local pool, if anywhere."""
        return None

    def take_judgements(self) -> list[Judgement]:
        """What was made of measured times since the last call, for a log that is replayed."""
        return []

    def expect_judgement(self, judgement: Judgement) -> None:
        """A replay: this was judged in the step that comes next."""

    def make_stats(self) -> SchedulerStats | None:
        """Statistics of the moment, ``None`` if it keeps none."""
        return None

    def shutdown(self) -> None:
        """Let go of what was opened."""

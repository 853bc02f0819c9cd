"""SnapshotPolicy: decides which snapshots of recurrent states are taken, and which are dropped."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import Enum

from engine.kv.request_states import RequestStates
from engine.kv.snapshots import KeptSnapshot
from engine.sched.policy import API_VERSION
from engine.sched.predict.cost import CostModel
from engine.sched.request import Request
from engine.sched.resource import AttachedScheduler


class SnapshotView:
    """What a snapshot policy may read. It must not change these objects.

    ``block_size``: tokens of a KV block; snapshots are taken after full blocks. ``num_blocks``: KV
    blocks that a snapshot takes. ``num_usable``: blocks of the pool. ``interval``: the option
    ``state_snapshot_interval``; 0 if it is not given."""

    def __init__(self, scheduler: AttachedScheduler, states: RequestStates) -> None:
        self._view = scheduler.view
        self._kv = scheduler.kv
        self._states = states
        self.block_size = scheduler.kv.block_size
        self.num_blocks = states.snapshots.num_blocks
        self.num_usable = scheduler.kv.num_usable
        self.interval = states.interval

    @property
    def now(self) -> float:
        """Time in seconds, on the clock of ``KeptSnapshot.last_used``."""
        return self._view.now

    @property
    def is_pool_full(self) -> bool:
        """True if each further block that is taken evicts another one's content."""
        return self._states.snapshots.is_pool_full

    @property
    def kept(self) -> Sequence[KeptSnapshot]:
        """All snapshots in the prefix cache. Looks at each of them."""
        return self._states.snapshots.all_kept()

    def find(self, block_hash: bytes) -> KeptSnapshot | None:
        """The snapshot with this hash; ``None`` if it is not in the prefix cache."""
        return self._states.snapshots.kept(block_hash)

    @property
    def pool_fill(self) -> float:
        """Share of the pool's blocks, 0 to 1, that hold cached content."""
        return self._states.snapshots.pool_fill

    def branches(self, req: Request) -> Sequence[int]:
        """Numbers of tokens after which the request's prompt divides from those of others, as far
        as is known: where its prefix hit was shorter than the cached KV, since there was no
        snapshot, and where that has happened to other requests."""
        if self._kv.num_held[req.row]:
            return self._states.branches(req)
        return self._states.branches(req, self._kv.lookup(req))

    def before(self, req: Request, num_tokens: int) -> int:
        """Tokens up to the request's last snapshot that stays, below ``num_tokens``, or else to the
        end of its prefix hit."""
        return self._states.before(req, num_tokens)

    @property
    def cost(self) -> CostModel:
        """The cost model, which predicts how many seconds a step takes."""
        return self._view.cost

    def compute_seconds(self, num_tokens: int, context: int) -> float:
        """Predicted seconds to compute these tokens of a prompt, after ``context`` others, within a
        step that computes others too."""
        cost = self._view.cost
        return cost.prefill_seconds(num_tokens, context) - cost.step_seconds(0, 0)

    @property
    def copy_seconds(self) -> float:
        """Predicted seconds to copy a snapshot: to read its bytes and to write them. Derived from
        the time in which a step reads KV."""
        cost, num_read = self._view.cost, 2 * self.num_blocks * self.block_size
        return cost.step_seconds(0, 0, num_read) - cost.step_seconds(0, 0)


class Take(Enum):
    """Whether a snapshot is taken at the end of a block."""

    NO = "no"
    UNTIL_NEXT = "until next"  # taken; the request's next snapshot replaces it
    STAYS = "stays"  # taken; it stays until it is dropped or evicted


class SnapshotPolicy(ABC):
    """Base class of snapshot policies. A policy reads the view and changes only its own fields.

    A policy that drops none leaves the order to the pool: content used least recently is evicted
    first, and a snapshot is used whenever a request begins with its tokens."""

    api_version = API_VERSION  # the API version it was written for; a plug-in may pin a number

    @abstractmethod
    def stop(self, req: Request, after: int, view: SnapshotView) -> int | None:
        """The next number of tokens above ``after``, a multiple of the block size, at which a chunk
        of the prompt is to end, so that a snapshot can be taken. ``None``: no chunk is cut. Called
        for each chunk; must change nothing."""

    @abstractmethod
    def takes(self, req: Request, num_tokens: int, view: SnapshotView) -> Take:
        """Whether to take a snapshot after ``num_tokens`` tokens of the request, where a step ends
        with a full block, in its prompt or output."""

    def victims(self, num_more: int, view: SnapshotView) -> Iterable[KeptSnapshot]:
        """Snapshots to drop before others are taken. ``num_more``: how many of these do not replace
        an earlier one of the same request."""
        return ()

    def used(self, known: Sequence[KeptSnapshot], view: SnapshotView) -> None:
        """Called when a request starts from the last of these snapshots; the others are those
        before it, after fewer tokens."""

    def taken(self, known: Sequence[KeptSnapshot], view: SnapshotView) -> None:
        """Called when a snapshot of a request is in the prefix cache. ``known``: all snapshots that
        the request has used or made, by number of tokens."""

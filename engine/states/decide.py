"""StateSnapshots: takes the snapshots of recurrent states that a snapshot policy chooses.

    fit       ends a chunk of a prompt where a snapshot is wanted
    describe  reserves a snapshot for each row whose step reaches the end of a block
    settle    publishes the snapshots that the step has written, and discards the others

A snapshot stays until it is dropped or evicted, or replaces the one that its request took before,
so that a request that ends or is preempted leaves one after its last full block.

The scheduler itself loads the snapshots of prefix hits (``engine.sched.step.builder``): a request
that starts after a prefix hit needs its states even if this resource fails."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from engine.kv.request_states import RequestStates
from engine.kv.snapshots import Snapshot
from engine.messages.step import Column, SnapshotPart, StepPlan, StepResult
from engine.sched.request import Request
from engine.sched.resource import AttachedScheduler, Fit, Resource
from engine.sched.roster import Rows
from engine.sched.step.settle import up_to_end
from engine.sched.step_state import Step
from engine.sched.table import Table
from engine.states.guard import GuardedSnapshotPolicy
from engine.states.policies import ByCost
from engine.states.policy import SnapshotPolicy, SnapshotView, Take


class Save(NamedTuple):
    """A snapshot that a step writes. ``place``: index of the request's row in the plan;
    ``num_tokens``: tokens after which it is taken; ``stays``: False if the request's next snapshot
    replaces it."""

    req: Request
    generation: int
    place: int
    num_tokens: int
    stays: bool
    written: Snapshot

    @property
    def is_current(self) -> bool:
        """True if the request has neither ended nor restarted since."""
        req = self.req
        return not req.is_finished and req.table.generation.at[req.row] == self.generation


class StateSnapshots(Resource):
    """Takes snapshots of the model's recurrent states, for the prefix cache."""

    name = "snapshots"
    needs = ("snapshots",)
    is_flexible = True

    def __init__(self, policy: SnapshotPolicy | None = None) -> None:
        self._chosen = policy or ByCost()
        self._running: dict[int, Request] = {}  # by row
        self._saves: dict[int, list[Save]] = {}  # by number of the step in flight
        self._num_loaded = 0
        self._table: Table  # of the running requests

    def attach(self, scheduler: AttachedScheduler) -> None:
        self._kv = scheduler.kv
        assert self._kv.states is not None
        self._states: RequestStates = self._kv.states
        default = self._chosen if type(self._chosen) is ByCost else ByCost()
        view = SnapshotView(scheduler, self._states)
        self._policy = GuardedSnapshotPolicy(self._chosen, default, view, scheduler)
        self._is_chunked = scheduler.config.enable_chunked_prefill

    def watches(self, req: Request) -> bool:
        """Returns False: ``fit`` cuts prompts only, so decodes need no call of it."""
        return False

    def fit(self, req: Request, num_tokens: int, step: Step) -> Fit:
        start = self._kv.ready(req) if req.is_waiting else req.num_computed
        if start + 1 >= req.num_tokens + req.num_pending or not self._is_chunked:
            return Fit(num_tokens)
        stop = self._policy.stop(req, start)
        while stop is not None and stop < start + num_tokens:
            if not self._states.has_snapshot(req, stop):
                return Fit(stop - start)
            stop = self._policy.stop(req, stop)
        return Fit(num_tokens)

    def seated(self, req: Request, step: Step) -> None:
        self._running[req.row], self._table = req, req.table
        known = self._states.known(req)
        if known and known[-1].num_tokens == self._kv.ready(req):  # it was not evicted since
            self._policy.used(known)

    def release(self, req: Request) -> None:
        self._running.pop(req.row, None)

    def describe(self, plan: StepPlan) -> None:
        part = plan.snapshots or SnapshotPart(self._states.snapshots.num_blocks)
        self._num_loaded += len(part.load_slots)
        if saves := self._planned(plan):
            plan.snapshots = msgspec.structs.replace(
                part,
                save_slots=plan.slots[[save.place for save in saves]],
                save_lengths=_column([save.num_tokens for save in saves]),
                save_blocks=_column([block for save in saves for block in save.written.blocks]),
            )
            self._saves[plan.step] = saves  # now that the worker will write them

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        saves = self._saves.pop(plan.step, ())
        lost = set() if result.lost_snapshots is None else set(result.lost_snapshots.tolist())
        for index, save in enumerate(saves):
            later = self._later(save, plan, result)
            if index in lost or later is None or not save.is_current:
                self._states.snapshots.discard(save.written)
            else:
                kept = self._states.publish(
                    save.req, save.num_tokens, save.written, later, stays=save.stays
                )
                if kept is not None:
                    self._policy.taken(self._states.known(save.req))

    def counters(self) -> dict[str, int]:
        snapshots = self._states.snapshots
        return {
            "published": snapshots.num_published,
            "lost": snapshots.num_lost,
            "loaded": self._num_loaded,
        }

    # -- helpers

    def _planned(self, plan: StepPlan) -> list[Save]:
        """Reserve the snapshots that the step of a plan is to write."""
        if not plan.num_tokens:
            return []
        places, lengths = ends_of_blocks(plan, self._table, self._kv.block_size)
        if not places.size:
            return []
        wanted: list[tuple[Request, int, int, bool]] = []
        rows = plan.rows[places].tolist()
        for row, place, length in zip(rows, places.tolist(), lengths.tolist(), strict=True):
            req = self._running[row]
            if length <= req.num_tokens and self._states.has_snapshot(req, length):
                continue
            take = self._policy.takes(req, length)
            if take is not Take.NO:
                wanted.append((req, place, length, take is Take.STAYS))
        snapshots = self._states.snapshots
        if wanted:
            num_more = len(wanted) - sum(self._states.replaces(req) for req, *_ in wanted)
            for kept in self._policy.victims(num_more):
                snapshots.drop(kept.block_hash)
        reserved = snapshots.reserve(len(wanted))
        return [
            Save(req, req.table.generation.at[req.row], place, length, stays, written)
            for (req, place, length, stays), written in zip(wanted, reserved, strict=False)
        ]

    def _later(self, save: Save, plan: StepPlan, result: StepResult) -> list[int] | None:
        """The accepted drafts of the step that are among the last tokens of a snapshot. ``None`` if
        the row failed, if one of these drafts was rejected, or if the request ends before them."""
        if save.place in result.errors:
            return None
        num_later = save.num_tokens - save.req.num_tokens
        if plan.drafts is None or num_later <= 0:
            return []
        first = int(result.counts[: save.place].sum())
        end = first + int(result.counts[save.place])
        accepted = result.token_ids[first : end - 1].tolist()
        later = up_to_end(save.req, accepted) if accepted else accepted
        return None if num_later > len(later) else later[:num_later]


def ends_of_blocks(plan: StepPlan, table: Table, block_size: int) -> tuple[Rows, Column]:
    """Find the states of a step that are those at the end of a block. A row without drafts has one
    state, that after its last token; a row with drafts has one after each draft and one after the
    token before them. Returns the index in the plan and the number of tokens of each."""
    ends = plan.starts + plan.counts
    if plan.num_tokens == len(plan.rows):
        places = (ends % block_size == 0).nonzero()[0]
        return places, ends[places]
    rows = plan.rows  # the plan has no drafts yet, but the positions for them are counted
    known = table.num_tokens.all[rows] + table.num_pending.all[rows]
    num_drafts = (table.num_computed.all[rows] - known + 1).clip(min=0)
    first = -(-(ends - num_drafts) // block_size)
    nums = (ends // block_size - first + 1).clip(min=0)
    places = np.repeat(np.arange(len(ends)), nums)
    nth = np.arange(len(places)) - np.repeat(nums.cumsum() - nums, nums)
    return places, ((first[places] + nth) * block_size).astype(np.int32)


def _column(values: list[int]) -> Column:
    return np.array(values, dtype=np.int32)

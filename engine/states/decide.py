"""StateSnapshots: decides which snapshots of recurrent states are taken and loaded.

    a request starts after a prefix hit ──> its snapshot is loaded into its slot
    fit            ──> a chunk of a prompt ends where a snapshot is wanted
    describe       ──> steps that end at the end of a block reserve a snapshot
    settle         ──> snapshots that were written are published, others discarded

A snapshot after a position of a prompt that ``stops`` returns stays until it is evicted. Any other
one replaces the one that its request took before, so that a request that ends or is preempted
leaves one after its last full block."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.kv.request_states import RequestStates
from engine.kv.snapshots import Snapshot
from engine.messages.step import EMPTY, Column, SnapshotPart, StepPlan, StepResult
from engine.sched.request import Request
from engine.sched.resource import AttachedScheduler, Fit, Resource
from engine.sched.roster import Rows
from engine.sched.step_state import Step
from engine.sched.table import Table

logger = logging.getLogger("engine.sched")


class Save(NamedTuple):
    """A snapshot that a step writes. ``place``: index of the request's row in the plan;
    ``num_tokens``: tokens after which it is taken; ``stays``: not replaced by the next one."""

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
    """Takes and loads snapshots of the model's recurrent states, for the prefix cache."""

    name = "snapshots"
    needs = ("snapshots",)

    def __init__(self, interval: int = 0) -> None:
        """``interval``: tokens after which a further snapshot of each request is taken that stays;
        a multiple of the block size; 0: none."""
        self._interval = interval
        self._running: dict[int, Request] = {}  # by row
        self._loads: list[tuple[int, Sequence[int]]] = []  # slots and blocks
        self._saves: dict[int, list[Save]] = {}  # by number of the step in flight
        self._num_loaded = 0
        self._table: Table  # of the running requests

    def attach(self, scheduler: AttachedScheduler) -> None:
        self._kv = scheduler.kv
        assert self._kv.states is not None
        self._states: RequestStates = self._kv.states
        self._states.interval = self._interval
        self._is_chunked = scheduler.config.enable_chunked_prefill

    def watches(self, req: Request) -> bool:
        """Always False: decodes need no call."""
        return False

    def fit(self, req: Request, num_tokens: int, step: Step) -> Fit:
        start = self._kv.ready(req) if req.is_waiting else req.num_computed
        if start + 1 >= req.num_tokens + req.num_pending or not self._is_chunked:
            return Fit(num_tokens)
        stops = self.stops(req)
        if self._interval:
            stops.add((start // self._interval + 1) * self._interval)
        for stop in sorted(stops):
            if start < stop < start + num_tokens and not self._states.has_snapshot(req, stop):
                return Fit(stop - start)
        return Fit(num_tokens)

    def stops(self, req: Request) -> set[int]:
        """Numbers of tokens of the prompt after which a snapshot is taken that stays, besides those
        of the interval: before the last token, where the same prompt starts again; at the end of
        the last full block, where a longer one does; and where the cached KV ended, if the prefix
        hit was shorter."""
        size = self._kv.block_size
        stops = {(req.num_prompt - 1) // size * size, req.num_prompt // size * size}
        if self._kv.num_held[req.row]:
            num_beyond = self._states.num_beyond(req)
        else:
            num_beyond = self._kv.lookup(req).num_beyond
        if num_beyond:
            stops.add(self._kv.ready(req) + num_beyond)
        return stops

    def seated(self, req: Request, step: Step) -> None:
        self._running[req.row], self._table = req, req.table
        if blocks := self._states.to_load(req):
            self._loads.append((req.slot, blocks))

    def release(self, req: Request) -> None:
        self._running.pop(req.row, None)

    def describe(self, plan: StepPlan) -> None:
        loads, self._loads = self._loads, []
        try:
            saves = self._planned(plan)
        except Exception:  # the loads must reach the worker, or the requests get wrong tokens
            logger.exception("step %d: no snapshot of recurrent states is taken", plan.step)
            saves = []
        self._num_loaded += len(loads)
        if saves or loads:
            size = self._states.snapshots.num_blocks
            plan.snapshots = SnapshotPart(
                size,
                _column([slot for slot, _ in loads]),
                _column([block for _, blocks in loads for block in blocks]),
                plan.slots[[save.place for save in saves]],
                _column([save.num_tokens for save in saves]),
                _column([block for save in saves for block in save.written.blocks]),
            )

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        saves = self._saves.pop(plan.step, ())
        lost = set() if result.lost_snapshots is None else set(result.lost_snapshots.tolist())
        for index, save in enumerate(saves):
            later = self._later(save, plan, result)
            if index in lost or later is None or not save.is_current:
                self._states.snapshots.discard(save.written)
            else:
                self._states.publish(
                    save.req, save.num_tokens, save.written, later, stays=save.stays
                )

    def counters(self) -> dict[str, int]:
        snapshots = self._states.snapshots
        return {
            "published": snapshots.num_published,
            "lost": snapshots.num_lost,
            "loaded": self._num_loaded,
        }

    # -- helpers

    def _planned(self, plan: StepPlan) -> list[Save]:
        """The snapshots that the step of a plan is to write, in reserved blocks."""
        if not plan.num_tokens:
            return []
        places, lengths = ends_of_blocks(plan, self._table, self._kv.block_size)
        wanted: list[tuple[Request, int, int, bool]] = []
        rows = plan.rows[places].tolist()
        for row, place, length in zip(rows, places.tolist(), lengths.tolist(), strict=True):
            req = self._running[row]
            if length <= req.num_tokens and self._states.has_snapshot(req, length):
                continue
            stays = length <= req.num_prompt and length in self.stops(req)
            stays = stays or (self._interval > 0 and length % self._interval == 0)
            wanted.append((req, place, length, stays))
        reserved = self._states.snapshots.reserve(len(wanted))
        saves = [
            Save(req, req.table.generation.at[req.row], place, length, stays, written)
            for (req, place, length, stays), written in zip(wanted, reserved, strict=False)
        ]
        if saves:
            self._saves[plan.step] = list(saves)
        return saves

    def _later(self, save: Save, plan: StepPlan, result: StepResult) -> list[int] | None:
        """The tokens sampled by the step that belong to a snapshot, since they are accepted drafts;
        ``None`` if the step failed or rejected drafts that belong to it."""
        if save.place in result.errors:
            return None
        num_later = save.num_tokens - save.req.num_tokens
        if plan.drafts is None or num_later <= 0:
            return []
        num_accepted = int(result.counts[save.place]) - 1
        if num_later > num_accepted:
            return None
        first = int(result.counts[: save.place].sum())
        tokens: list[int] = result.token_ids[first : first + num_later].tolist()
        return tokens


def ends_of_blocks(plan: StepPlan, table: Table, block_size: int) -> tuple[Rows, Column]:
    """Find the states of a step that lie at the end of a block: the states after the last token of
    a row and, if it has drafts, after each draft and after the token before them. Returns the index
    in the plan, and the number of tokens, of each."""
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
    return np.array(values, dtype=np.int32) if values else EMPTY

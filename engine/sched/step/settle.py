"""Settles a step: appends tokens, publishes KV blocks, ends requests, builds the outputs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.kv.manager import KVManager
from engine.messages.requests import CoreOutputs, FinishReason
from engine.messages.step import EMPTY, Column, StepPlan, StepResult
from engine.messages.vectors import PooledPart
from engine.sched.plugins.resources import Resources
from engine.sched.policy import Policy
from engine.sched.predict.ledger import Ledger
from engine.sched.request import End, Request, Status
from engine.sched.roster import NO_ROWS, Roster, Rows
from engine.sched.step.outputs import Members, OutputColumns
from engine.sched.table import Counts, TableColumn
from engine.sched.view import View

FEW = 8  # up to this many rows, arrays that only later steps could reuse are not built
NO_RESULT = StepResult(0, EMPTY, EMPTY)
logger = logging.getLogger("engine.sched")


class Settler:
    """Processes the results of steps; ends, preempts and restarts requests for any reason."""

    def __init__(
        self,
        roster: Roster,
        kv: KVManager,
        policy: Policy,
        view: View,
        resources: Resources,
    ) -> None:
        self.roster = roster
        self.kv = kv
        self.policy = policy
        self.view = view
        self.resources = resources
        self.counters = Counters()
        self.ledger = view.ledger if policy.uses_ledger else None
        self.appender = Appender(roster, kv, self.ledger)
        self._ended: list[End] = []  # requests that ended outside a step, not reported yet

    def settle(self, plan: StepPlan, result: StepResult) -> dict[int, CoreOutputs]:
        """Process one step's result; returns its outputs by client index."""
        self.roster.table.land(plan.rows)
        self.resources.settle(plan, result)
        outputs = OutputColumns(self.view.now, result)
        failed = self._fail(plan, result) if result.errors else ()
        if plan.drafts is not None:
            self._roll_back(plan, plan.drafts.counts, result)
        may_have_ended = self.appender.append(plan, result, outputs)
        self.policy.on_tokens(outputs.reqs, self.view)
        if result.pooled is not None:
            self._end_pooled(plan, result.pooled, outputs)
        for index in may_have_ended:
            req = outputs.reqs[index]
            if (stop := stopped_by(req, req.tokens[-1], req.num_tokens)) is not None:
                self.view.lengths.add(req.num_output)
                self.finish(req)
                outputs.finish(index, *stop)
        for end in failed:
            outputs.end(end)
        if outputs.has_ends or len(outputs.reqs) < len(plan.rows):
            self._retire(plan.rows)
        return self._to_clients(outputs)

    def take_outputs(self) -> dict[int, CoreOutputs]:
        """Return, once, the last outputs of requests that ended outside a step, by client index."""
        if not self._ended:
            return {}
        return self._to_clients(OutputColumns(self.view.now, NO_RESULT))

    @property
    def has_ended(self) -> bool:
        """True if a request has ended whose last output has not been returned yet."""
        return bool(self._ended)

    def end(
        self, req: Request, reason: FinishReason, message: str, code: str | None = None
    ) -> None:
        """End a request for a reason other than its tokens, such as a deadline. ``code``: the error
        code for the client; ``None``: the default for ``reason``."""
        self.finish(req)
        self.counters.num_failed += reason == "error"
        self._ended.append(End(req, reason, message, code))

    def expire(self, req: Request, missed: str) -> None:
        """End a request that missed its deadline. ``missed``: "started" or "finished", whichever
        did not happen in time."""
        self.counters.num_expired += 1
        self.end(req, "deadline", f"the request was not {missed} by its deadline")

    def finish(self, req: Request) -> None:
        """Free the blocks, the seat and all resources of a request that has ended."""
        self.kv.finish(req)
        self.roster.finish(req, self.view.now)
        self.resources.release(req)
        if self.ledger is not None:
            self.ledger.on_finish(req)
        self.policy.on_finish(req, self.view)

    def end_if_never(self, req: Request, num_tokens: int) -> bool:
        """End a request if ``num_tokens`` tokens need more blocks than exist, since it could never
        start. Returns whether it was ended."""
        needed = self.kv.whole_blocks_for(num_tokens)
        if needed <= self.kv.num_usable:
            return False
        self.end(
            req,
            "error",
            f"the request needs room for {num_tokens} tokens in {needed} KV blocks, but there are "
            f"only {self.kv.num_usable}; raise num_kv_blocks",
        )
        return True

    def unseat(self, req: Request, cause: str) -> None:
        """Preempt a running request: free its blocks and return it to the queue, where it waits
        because of ``cause``."""
        self.policy.on_preempt(req, self.view)
        self.kv.release(req)
        self.resources.release(req)
        self.roster.table.start_from(req.row, 0)
        req.history.num_preempted += 1
        self.roster.table.facts.num_preempted.at[req.row] = req.history.num_preempted
        self.counters.num_preemptions += 1
        req.history.events.append(("preempted", self.view.now))
        self.roster.unseat(req, self.view.now, cause)

    def revoke(self, req: Request, start: int) -> None:
        """Discard invalid KV: what the request wrote from position ``start`` on, and all KV
        computed from it.

        Requests that took such blocks from the prefix cache restart.
        """
        # A row of an ended request still exists: a request that reads the blocks is in a step in
        # flight or in the one being settled.
        involved = [other for other in self.roster.by_row if other is not None]
        for row in self.kv.revoke(req, start, involved):
            self.restart(row)

    # -- helpers

    def _roll_back(self, plan: StepPlan, num_drafts: Column, result: StepResult) -> None:
        """Subtract rejected drafts from ``num_computed``, except for requests preempted
        meanwhile."""
        table, rows = self.roster.table, plan.rows
        rejected = num_drafts - (result.counts - 1).clip(min=0)
        current = (table.generation.all[rows] == plan.generations) & (table.slot.all[rows] >= 0)
        table.take_back(rows, np.where(current & (num_drafts > 0), rejected, 0))

    def _fail(self, plan: StepPlan, result: StepResult) -> list[End]:
        """End the requests for which the step reports an error, and discard the KV that it wrote
        for them. Returns an ``End`` for each ended request."""
        failed = []
        for index, message in result.errors.items():
            row = int(plan.rows[index])
            req = self.roster.by_row[row]
            stale = self.roster.table.generation.at[row] != plan.generations[index]
            if req is None:
                continue
            self.revoke(req, int(plan.starts[index]))
            if stale or req.is_finished:  # restarted or aborted meanwhile
                continue
            self.finish(req)
            self.counters.num_failed += 1
            failed.append(End(req, "error", message, result.codes.get(index)))
        return failed

    def _end_pooled(self, plan: StepPlan, pooled: PooledPart, outputs: OutputColumns) -> None:
        """End the requests whose results the step has, unless they ended or restarted during it."""
        table = self.roster.table
        for place, width, values in pooled.entries():
            row = int(plan.rows[place])
            req = self.roster.by_row[row]
            is_current = table.generation.at[row] == plan.generations[place]
            if req is None or req.is_finished or not is_current:
                continue
            table.facts.stamp_one(row, outputs.now)
            index = outputs.add_pooled(req, place, values, width)
            self.finish(req)
            outputs.finish(index, "stop", None)

    def restart(self, row: int) -> None:
        """Return the request in this row to the queue, to compute all tokens again. Its results in
        flight are dropped."""
        req = self.roster.by_row[row]
        assert req is not None
        self.roster.table.restart(row)
        if req.status is Status.RUNNING:
            self.unseat(req, "restarted")

    def _to_clients(self, outputs: OutputColumns) -> dict[int, CoreOutputs]:
        ended, self._ended = self._ended, []
        for end in ended:
            outputs.end(end)
        return outputs.by_client()

    def _retire(self, rows: Rows) -> None:
        """Free the rows of finished requests that no step in flight contains any more."""
        table = self.roster.table
        gone = rows[table.alive.all[rows] + table.in_flight.all[rows] == 0]
        for row in gone.tolist() if gone.size else ():
            if self.roster.by_row[row] is not None:
                self.roster.retire(row)


class Appender:
    """Appends tokens to requests and publishes the blocks they fill."""

    def __init__(self, roster: Roster, kv: KVManager, ledger: Ledger | None) -> None:
        self._roster = roster
        self._kv = kv
        self._block_size = np.array(kv.block_size, dtype=np.int32)
        self._ledger = ledger
        self._members = Members(NO_ROWS, roster)  # of the last result processed with arrays
        self._version = -1  # running-set version of ``_members``, if they are all running requests
        self._last = -1  # running-set version of the last result, if its step was full

    def append(self, plan: StepPlan, result: StepResult, outputs: OutputColumns) -> list[int]:
        """Append the step's sampled tokens to the requests and to ``outputs``. Returns the indices
        in ``outputs`` of requests that these tokens may end.

        Tokens of requests that finished or restarted during the step are dropped."""
        is_full = self._roster.running_rows.pop_full_step(plan.step)
        before, self._last = self._last, self._roster.running_rows.version if is_full else -1
        is_new = not is_full or before != self._last  # arrays would have to be built first
        num_sampled = len(result.token_ids)
        if plan.drafts is not None:  # only then can a row have several tokens
            num_sampled = int(np.count_nonzero(result.counts))
        if len(result.token_ids) > num_sampled or (is_new and num_sampled <= FEW):
            return self._one_by_one(plan, result, outputs)
        return self._in_columns(plan, result, outputs, is_full)

    def running_members(self) -> Members:
        """All running requests, in ascending order of rows."""
        return self._members_of(self._roster.running_rows.columns.rows, is_full=True)

    def commit_ends(self, rows: Rows, counts: Counts, other: TableColumn) -> None:
        """Publish each block that has just become full and computed.

        ``counts``: the new values, in ``rows``, of the column that has grown by one: ``num_tokens``
        or ``num_computed``. ``other``: the column of these two that has not grown."""
        ends = (counts % self._block_size == 0).nonzero()[0]
        if not ends.size:
            return
        full = rows[ends]
        full = full[other.all[full] >= counts[ends]]
        if full.size:
            self._kv.commit_next(self._roster.requests(full))

    def _one_by_one(self, plan: StepPlan, result: StepResult, outputs: OutputColumns) -> list[int]:
        """Do ``append`` row by row, for rows with several tokens or for few rows."""
        table, tokens, last = self._roster.table, result.token_ids.tolist(), 0
        ended = []
        columns = zip(
            plan.rows.tolist(), plan.generations.tolist(), result.counts.tolist(), strict=True
        )
        for place, (row, generation, count) in enumerate(columns):
            first, last = last, last + count
            is_current = table.alive.at[row] and table.generation.at[row] == generation
            req = self._roster.by_row[row]
            if not count or not is_current or req is None:
                continue
            is_first, table.has_output.at[row] = not table.has_output.at[row], 1
            taken = up_to_end(req, tokens[first:last])
            num_tokens = table.append_one(row, req.tokens, taken)
            if self._ledger is not None:
                self._ledger.on_tokens([(req.user, len(taken))])
            table.facts.stamp_one(row, outputs.now)
            self._kv.commit(req, min(table.num_computed.at[row], num_tokens))
            if is_first:
                self._kv.trim(req)
            index = outputs.add(req, taken, place, is_first=is_first)
            stop_id = table.stop_id.at[row]
            if num_tokens >= table.limit.at[row] or stop_id == taken[-1] or stop_id == -2:
                ended.append(index)
        return ended

    def _in_columns(
        self, plan: StepPlan, result: StepResult, outputs: OutputColumns, is_full: bool
    ) -> list[int]:
        """Do ``append`` with numpy, for at most one token per row. ``is_full``: the plan's rows are
        exactly the running requests."""
        table = self._roster.table
        is_full = is_full and len(result.token_ids) == len(plan.rows)
        rows, tokens, places = self._sampled(plan, result, is_full)
        members = self._members_of(rows, is_full)
        new, started = tokens.tolist(), members.take_started()
        num_tokens = table.append(rows, members.tokens, new)
        table.facts.stamp(rows, started, outputs.now)
        outputs.add_members(members, new, places, started)
        self.commit_ends(rows, num_tokens, table.num_computed)
        for index in started:
            self._kv.trim(members.reqs[index])
        if self._ledger is not None:
            self._ledger.on_tokens((req.user, 1) for req in members.reqs)
        return members.may_have_ended(tokens, num_tokens)

    def _members_of(self, rows: Rows, is_full: bool) -> Members:
        """The ``Members`` of these rows. If they are all running requests (``is_full``), the object
        is reused as long as the same requests run."""
        version = self._roster.running_rows.version if is_full else -1
        if not is_full or version != self._version:
            self._members, self._version = Members(rows, self._roster), version
        return self._members

    def _sampled(
        self, plan: StepPlan, result: StepResult, is_full: bool
    ) -> tuple[Rows, Counts, Sequence[int]]:
        """Return the rows of the table that got a token in the step and still belong to the same
        request, their tokens, and their indices in the plan."""
        table, rows, tokens = self._roster.table, plan.rows, result.token_ids
        if is_full:
            return rows, tokens, range(len(rows))
        sampled = (result.counts > 0) & (table.alive.all[rows] == 1)
        sampled &= table.generation.all[rows] == plan.generations
        places = sampled.nonzero()[0]
        if len(places) < len(rows):
            rows = rows[places]
            tokens = tokens[result.counts.cumsum()[places] - 1]
        return rows, tokens, places.tolist()


def stopped_by(req: Request, token: int, num_tokens: int) -> tuple[FinishReason, int | None] | None:
    """Finish reason and stop reason if ``token`` ends the request; ``None`` if it does not.

    ``num_tokens``: the request's length with this token. The stop reason of a stop token is its id;
    the end-of-text token and the length limit have none. Stop tokens count only from ``min_tokens``
    on.
    """
    if token in req.stop_ids and num_tokens - req.num_prompt >= req.params.min_tokens:
        return "stop", None if token in req.add.eos_token_ids else token
    if num_tokens >= req.max_total:
        return "length", None
    return None


def up_to_end(req: Request, tokens: list[int]) -> list[int]:
    """Cut a step's new tokens after the first one that ends the request; without one, keep all."""
    if len(tokens) == 1:
        return tokens
    num_known = req.num_tokens
    for count, token in enumerate(tokens, 1):
        if stopped_by(req, token, num_known + count) is not None:
            return tokens[:count]
    return tokens


@dataclass(slots=True)
class Counters:
    """Counters since the start."""

    num_steps: int = 0  # calls of ``schedule``; the number of the step
    num_computed_steps: int = 0  # steps with tokens to compute
    num_scheduled_tokens: int = 0
    num_preemptions: int = 0
    num_failed: int = 0
    num_refused: int = 0
    num_expired: int = 0
    num_rescued_steps: int = 0
    rescued_from: str = ""
    blocked: str = ""
    step_seconds: float = 0.0
    floor_seconds: float = 0.0

    def count_rescue(self, culprit: str, *, was_saved: bool) -> None:
        """Count a step in which the policy scheduled no request but the default order did
        (``was_saved``); log the first such step. ``culprit``: what scheduled no request and why,
        for the log."""
        self.num_rescued_steps += was_saved
        if was_saved and self.num_rescued_steps == 1:
            self.rescued_from = f"{culprit} scheduled no request although one could run"
            logger.warning(
                "%s; the default order is used for such steps, num_rescued_steps counts them",
                self.rescued_from,
            )

"""What a step's result means for each request: append, publish, stop, retire."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.kv.manager import KVManager
from engine.messages.outputs import CoreOutputs, FinishReason
from engine.messages.step import EMPTY, Column, StepPlan, StepResult
from engine.sched.agenda import Errand
from engine.sched.append import Appender
from engine.sched.columns import OutputColumns
from engine.sched.policy import Policy
from engine.sched.request import Request, Status
from engine.sched.resources import Resources
from engine.sched.roster import Roster
from engine.sched.seated import Rows
from engine.sched.stop import stopped_by
from engine.sched.table import ONE
from engine.sched.tally import Tally
from engine.sched.view import View

NO_RESULT = StepResult(0, EMPTY, EMPTY)
_DEADLINES = {Errand.START_BY: "started", Errand.END_BY: "finished"}


class Settler:
    """The half of the scheduler that runs when a result is there."""

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
        self.tally = Tally()
        self.ledger = view.ledger if policy.uses_ledger else None
        self.appender = Appender(roster, kv, self.ledger)
        self._ended: list[tuple[Request, FinishReason, str]] = []  # outside of any result
        self._to_restart: set[int] = set()  # rows, once the transfer into their blocks is over

    def settle(self, plan: StepPlan, result: StepResult) -> dict[int, CoreOutputs]:
        """Outputs of one step by client index."""
        table = self.roster.table
        table.in_flight.all[plan.rows] -= ONE
        self.resources.settle(plan, result)
        outputs = OutputColumns(self.view.now, result)
        failed = self._fail(plan, result) if result.errors else ()
        if plan.drafts is not None:
            self._roll_back(plan, plan.drafts.counts, result)
        for index in self.appender.append(plan, result, outputs):
            if (stop := stopped_by(outputs.reqs[index])) is not None:
                self.view.lengths.add(outputs.reqs[index].num_output)
                self.finish(outputs.reqs[index])
                outputs.finish(index, *stop)
        for req, message in failed:
            outputs.end(req, "error", message)
        if outputs.has_ends or len(outputs.reqs) < len(plan.rows):
            self._retire(plan.rows)
        return self._to_clients(outputs)

    def take_outputs(self) -> dict[int, CoreOutputs]:
        """Ends that came with no result."""
        if not self._ended:
            return {}
        return self._to_clients(OutputColumns(self.view.now, NO_RESULT))

    def end(self, req: Request, reason: FinishReason, message: str) -> None:
        """The request ends now, for a reason that no result brought; its client is told."""
        self.finish(req)
        self.tally.num_failed += reason == "error"
        self._ended.append((req, reason, message))

    def expire(self, req: Request, errand: Errand) -> None:
        """A deadline of the request has passed."""
        self.tally.num_expired += 1
        self.end(req, "deadline", f"not {_DEADLINES[errand]} by its deadline")

    def finish(self, req: Request) -> None:
        """The request has ended: blocks, seat and whatever else it held are free."""
        req.story.kv_transfer_params = self.kv.forget(req)
        self.roster.finish(req, self.view.now)
        self.resources.release(req)
        self._to_restart.discard(req.row)
        if self.ledger is not None:
            self.ledger.on_finish(req)
        self.policy.on_finish(req, self.view)

    def end_if_never(self, req: Request, num_tokens: int) -> bool:
        """Blocks for so many tokens at once are not free. If the pool is too small the request
        ends: it would wait for ever, and others behind it."""
        needed = -(-num_tokens // self.kv.block_size) * self.kv.num_groups
        if needed <= self.kv.num_usable:
            return False
        self.end(
            req,
            "error",
            f"{num_tokens} tokens that must be held at once take {needed} KV blocks, but the whole "
            f"pool has {self.kv.num_usable}",
        )
        return True

    def take_orphans(self) -> Iterator[Request]:
        """Whom resources had parked that were left out: they are to be woken, unless a transfer
        writes into their blocks and nobody will say when it is over."""
        for req in self.resources.take_orphans():
            if self.kv.is_loading(req):
                self.end(req, "error", "what loaded its KV was left out")
            else:
                yield req

    def unseat(self, req: Request, cause: str) -> None:
        """Blocks and seat are taken; the request waits at its rank and will recompute.

        A request that only held blocks while it waited loses those.
        """
        self.kv.release(req)
        self.resources.release(req)
        self.roster.table.num_computed.at[req.row] = 0
        if req.status is not Status.RUNNING:
            self.roster.holding.pop(req.row)
            return
        req.story.num_preempted += 1
        self.tally.num_preemptions += 1
        req.story.events.append(("preempted", self.view.now))
        self.roster.unseat(req, self.view.now, cause)

    def revoke(self, req: Request, start: int) -> None:
        """What the request wrote from this position on cannot be trusted, nor what was made of it.

        Whoever adopted some of it starts again. Whoever read it is in a step in flight or in the
        one being settled, so its row is still there, whether it has ended or not.
        """
        involved = [other for other in self.roster.by_row if other is not None]
        for row in self.kv.revoke(req, start, involved):
            self.restart(row)

    # -- helpers

    def _roll_back(self, plan: StepPlan, num_drafts: Column, result: StepResult) -> None:
        """Rejected drafts were computed in vain. Who was preempted has nothing computed at all."""
        table, rows = self.roster.table, plan.rows
        rejected = num_drafts - (result.counts - 1).clip(min=0)
        current = (table.generation.all[rows] == plan.generations) & (table.slot.all[rows] >= 0)
        table.num_computed.all[rows] -= np.where(current & (num_drafts > 0), rejected, 0)

    def _fail(self, plan: StepPlan, result: StepResult) -> list[tuple[Request, str]]:
        """Rows with an error end alone; what they wrote leaves the cache."""
        failed = []
        for index, message in result.errors.items():
            row = int(plan.rows[index])
            req = self.roster.by_row[row]
            stale = self.roster.table.generation.at[row] != plan.generations[index]
            if req is None:
                continue
            self.revoke(req, int(plan.starts[index]))
            if stale or req.is_finished:  # sent back to start or aborted meanwhile
                continue
            self.finish(req)
            self.tally.num_failed += 1
            failed.append((req, message))
        return failed

    def restart(self, row: int) -> None:
        """Back to the queue with nothing computed; results in flight are dropped."""
        req, table = self.roster.by_row[row], self.roster.table
        assert req is not None
        table.generation.at[row] += 1
        table.num_computed.at[row] = table.num_pending.at[row] = 0
        if self.kv.is_loading(req):
            self._to_restart.add(req.row)
        elif req.status is Status.RUNNING or req.row in self.roster.holding:
            self.unseat(req, "restarted")

    def woken(self, req: Request) -> None:
        """The request is back in the queue; what it holds may not be trusted any more."""
        if req.row in self._to_restart:
            self._to_restart.remove(req.row)
            self.unseat(req, "restarted")

    def _to_clients(self, outputs: OutputColumns) -> dict[int, CoreOutputs]:
        ended, self._ended = self._ended, []
        for req, reason, message in ended:
            outputs.end(req, reason, message)
        return outputs.by_client()

    def _retire(self, rows: Rows) -> None:
        """Rows of finished requests whose last step in flight this was."""
        table = self.roster.table
        gone = rows[table.alive.all[rows] + table.in_flight.all[rows] == 0]
        for row in gone.tolist() if gone.size else ():
            if self.roster.by_row[row] is not None:
                self.roster.retire(row)

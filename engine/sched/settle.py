"""What a step's result means for each request: append, publish, stop, retire."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.kv.manager import KVManager
from engine.messages.outputs import CoreOutputs
from engine.messages.step import StepPlan, StepResult
from engine.sched.columns import OutputColumns
from engine.sched.policy import Policy
from engine.sched.request import Request, Status
from engine.sched.resource import Resource
from engine.sched.roster import Roster, Rows
from engine.sched.stop import stopped_by
from engine.sched.view import View


class Settler:
    """The half of the scheduler that runs when a result is there."""

    def __init__(
        self,
        roster: Roster,
        kv: KVManager,
        policy: Policy,
        view: View,
        resources: Sequence[Resource],
    ) -> None:
        self.roster = roster
        self.kv = kv
        self.policy = policy
        self.view = view
        self.resources = resources
        self.num_failed = 0

    def settle(self, plan: StepPlan, result: StepResult) -> dict[int, CoreOutputs]:
        """Outputs of one step by client index."""
        table = self.roster.table
        table.in_flight.all[plan.rows] -= 1
        for resource in self.resources:
            resource.settle(plan, result)
        failed = self._fail(plan, result)
        # A finished request, or one that was revoked, has no use for a late result.
        current = table.alive.all[plan.rows].astype(bool)
        current &= table.generation.all[plan.rows] == plan.generations
        sampled = (result.counts > 0) & current
        outputs = self._append(plan.rows, sampled, result)
        for row, message in failed:
            outputs.fail(row, message)
        self._retire(plan.rows)
        return outputs.by_client()

    def finish(self, req: Request) -> None:
        """The request has ended: blocks, seat and whatever else it held are free."""
        self.kv.forget(req)
        for resource in self.resources:
            resource.release(req)
        self.roster.finish(req)
        self.policy.on_finish(req, self.view)

    def revoke(self, req: Request, start: int) -> None:
        """What the request wrote from this position on cannot be trusted, nor what was made of it.

        Whoever adopted some of it starts again. Whoever read it is in a step in flight or in the
        one being settled, so its row is still there, whether it has ended or not.
        """
        involved = [other for other in self.roster.by_row if other is not None]
        for row in self.kv.revoke(req, start, involved):
            self._restart(row)

    def commit_rows(self, rows: Rows) -> None:
        """Publish the blocks of these rows whose tokens are all known and written."""
        table, kv = self.roster.table, self.kv
        written = np.minimum(table.num_computed.all[rows], table.num_tokens.all[rows])
        full = written // kv.block_size > kv.num_published[rows]
        for row, upto in zip(rows[full].tolist(), written[full].tolist(), strict=True):
            req = self.roster.by_row[row]
            assert req is not None
            kv.commit(req, upto)

    # -- helpers

    def _append(self, rows: Rows, sampled: NDArray[np.bool_], result: StepResult) -> OutputColumns:
        """Tokens become known; who stopped is finished."""
        table, by_row = self.roster.table, self.roster.by_row
        outputs = OutputColumns(self.view.now, result)
        indices = np.flatnonzero(sampled)
        rows = rows[indices]
        firsts = np.cumsum(result.counts)[indices] - result.counts[indices]
        tokens = result.token_ids[firsts]
        reqs: list[Request] = [by_row[row] for row in rows.tolist()]
        for req, token in zip(reqs, tokens.tolist(), strict=True):
            req.tokens.append(token)
        table.num_tokens.all[rows] += 1
        table.num_pending.all[rows] -= 1
        self.commit_rows(rows)
        first = table.num_tokens.all[rows] - table.num_prompt.all[rows] == 1
        outputs.add(reqs, tokens, indices, np.flatnonzero(first))
        stop_ids = table.stop_id.all[rows]
        ended = table.num_tokens.all[rows] >= table.limit.all[rows]
        ended |= (stop_ids == tokens) | (stop_ids == -2)
        for index in np.flatnonzero(ended).tolist():
            stop = stopped_by(reqs[index])
            if stop is not None:
                outputs.finish(index, *stop)
                self.finish(reqs[index])
        return outputs

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
            self.num_failed += 1
            failed.append((req, message))
        return failed

    def _restart(self, row: int) -> None:
        """Back to the queue with nothing computed; results in flight are dropped."""
        req, table = self.roster.by_row[row], self.roster.table
        assert req is not None
        table.generation.at[row] += 1
        table.num_computed.at[row] = table.num_pending.at[row] = 0
        if req.status is not Status.RUNNING:
            return
        self.kv.release(req)
        for resource in self.resources:
            resource.release(req)
        req.num_preempted += 1
        self.view.num_preemptions += 1
        self.roster.unseat(req)

    def _retire(self, rows: Rows) -> None:
        """Rows of finished requests whose last step in flight this was."""
        table = self.roster.table
        gone = (table.alive.all[rows] == 0) & (table.in_flight.all[rows] == 0)
        for row in rows[gone].tolist():
            if self.roster.by_row[row] is not None:
                self.roster.retire(row)

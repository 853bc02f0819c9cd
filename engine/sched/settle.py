"""What a step's result means for each request: append, publish, stop, retire."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.config.sched import SchedulerConfig
from engine.kv.manager import KVManager
from engine.messages.outputs import CoreOutputs, FinishReason
from engine.messages.step import EMPTY, StepPlan, StepResult
from engine.sched.agenda import Errand
from engine.sched.columns import OutputColumns
from engine.sched.policy import Policy
from engine.sched.request import Request, Status
from engine.sched.resources import Resources
from engine.sched.roster import Roster, Rows
from engine.sched.stop import stopped_by
from engine.sched.tally import Tally
from engine.sched.view import View

NO_RESULT = StepResult(0, EMPTY, EMPTY)
_DEADLINES = {Errand.START_BY: "started", Errand.END_BY: "finished"}


class Settler:
    """The half of the scheduler that runs when a result is there."""

    def __init__(
        self,
        config: SchedulerConfig,
        roster: Roster,
        kv: KVManager,
        policy: Policy,
        view: View,
        resources: Resources,
    ) -> None:
        self.config = config
        self.roster = roster
        self.kv = kv
        self.policy = policy
        self.view = view
        self.resources = resources
        self.tally = Tally()
        self.ledger = view.ledger if policy.uses_ledger else None
        self._ended: list[tuple[Request, FinishReason, str]] = []  # outside of any result
        self._finished_ids: dict[int, list[str]] = {}  # by client, since its last outputs

    def settle(self, plan: StepPlan, result: StepResult) -> dict[int, CoreOutputs]:
        """Outputs of one step by client index."""
        table = self.roster.table
        table.in_flight.all[plan.rows] -= 1
        self.resources.settle(plan, result)
        failed = self._fail(plan, result)
        # A finished request, or one that was revoked, has no use for a late result.
        current = table.alive.all[plan.rows].astype(bool)
        current &= table.generation.all[plan.rows] == plan.generations
        sampled = (result.counts > 0) & current
        if plan.draft_counts is not None:
            self._roll_back(plan, result, current)
        outputs = self._append(plan.rows, sampled, result)
        for req, message in failed:
            outputs.end(req, "error", message)
        self._retire(plan.rows)
        return self._to_clients(outputs)

    def take_outputs(self) -> dict[int, CoreOutputs]:
        """Ends that came with no result."""
        if not (self._ended or self._finished_ids):
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
        self.kv.forget(req)
        self.resources.release(req)
        self.roster.finish(req, self.view.now)
        self.view.lengths.add(req.num_output)
        if self.ledger is not None:
            self.ledger.on_finish(req)
        self.policy.on_finish(req, self.view)
        if self.config.include_finished_ids:
            self._finished_ids.setdefault(req.add.client_index, []).append(req.request_id)

    def unseat(self, req: Request, cause: str) -> None:
        """Blocks and seat are taken; the request waits at its rank and will recompute.

        A request that only held blocks while it waited loses those.
        """
        self.kv.release(req)
        self.resources.release(req)
        self.roster.table.num_computed.at[req.row] = 0
        if req.status is not Status.RUNNING:
            self.roster.holding.pop(req.request_id)
            return
        req.story.num_preempted += 1
        self.tally.num_preemptions += 1
        if self.config.log_stats:
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
        reqs: list[Request] = [by_row[row] for row in rows.tolist()]
        is_first = table.num_tokens.all[rows] == table.num_prompt.all[rows]
        outputs.add(reqs, indices, np.flatnonzero(is_first))
        last = self._take_tokens(reqs, rows, indices, outputs)
        table.num_pending.all[rows] -= 1
        self.commit_rows(rows)
        stop_ids = table.stop_id.all[rows]
        ended = table.num_tokens.all[rows] >= table.limit.all[rows]
        ended |= (stop_ids == last) | (stop_ids == -2)
        for index in np.flatnonzero(ended).tolist():
            stop = stopped_by(reqs[index])
            if stop is not None:
                self.finish(reqs[index])
                outputs.finish(index, *stop)
        return outputs

    def _take_tokens(
        self,
        reqs: Sequence[Request],
        rows: Rows,
        indices: NDArray[np.intp],
        outputs: OutputColumns,
    ) -> NDArray[np.int32]:
        """Append what was sampled; the last token of each row."""
        result, table = outputs.result, self.roster.table
        counts = result.counts[indices]
        firsts = np.cumsum(result.counts)[indices] - counts
        tokens = result.token_ids[firsts]
        if (counts == 1).all():
            outputs.tokens = tokens.tolist()
            for req, token in zip(reqs, outputs.tokens, strict=True):
                req.tokens.append(token)
            table.num_tokens.all[rows] += 1
            if self.ledger is not None:
                self.ledger.on_tokens((req.user, 1) for req in reqs)
            return tokens
        for index, (req, first) in enumerate(zip(reqs, firsts.tolist(), strict=True)):
            sampled = result.token_ids[first : first + int(counts[index])].tolist()
            outputs.add_tokens(self._accept(req, sampled))
            tokens[index] = req.tokens[-1]
        return tokens

    def _accept(self, req: Request, tokens: list[int]) -> list[int]:
        """Accepted drafts and the token behind them, up to one that ends the request."""
        table, row = self.roster.table, req.row
        for index, token in enumerate(tokens):
            req.tokens.append(token)
            table.num_tokens.at[row] += 1
            if stopped_by(req) is not None:
                tokens = tokens[: index + 1]
                break
        if self.ledger is not None:
            self.ledger.on_tokens([(req.user, len(tokens))])
        return tokens

    def _roll_back(self, plan: StepPlan, result: StepResult, current: NDArray[np.bool_]) -> None:
        """Rejected drafts were computed in vain: their positions are not."""
        assert plan.draft_counts is not None
        rejected = plan.draft_counts - (result.counts - 1).clip(min=0)
        rejected[~current | (plan.draft_counts == 0)] = 0
        self.roster.table.num_computed.all[plan.rows] -= rejected

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
        if req.status is Status.RUNNING or req.request_id in self.roster.holding:
            self.unseat(req, "restarted")

    def _to_clients(self, outputs: OutputColumns) -> dict[int, CoreOutputs]:
        ended, self._ended = self._ended, []
        for req, reason, message in ended:
            outputs.end(req, reason, message)
        by_client = outputs.by_client()
        finished, self._finished_ids = self._finished_ids, {}
        for client, ids in finished.items():
            empty = CoreOutputs([], [], None, self.view.now)
            by_client.setdefault(client, empty).finished_ids = ids
        return by_client

    def _retire(self, rows: Rows) -> None:
        """Rows of finished requests whose last step in flight this was."""
        table = self.roster.table
        gone = (table.alive.all[rows] == 0) & (table.in_flight.all[rows] == 0)
        for row in rows[gone].tolist():
            if self.roster.by_row[row] is not None:
                self.roster.retire(row)

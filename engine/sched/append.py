"""How the tokens of a result become known: one by one, or in columns when there are many rows.

Both do the same in the same order; the columns only pay for what changed.
"""

from __future__ import annotations

from array import array
from collections import deque

import numpy as np
from numpy.typing import NDArray

from engine.kv.manager import KVManager
from engine.messages.step import StepPlan, StepResult
from engine.sched.columns import Members, OutputColumns
from engine.sched.ledger import Ledger
from engine.sched.request import Request
from engine.sched.roster import NO_ROWS, Roster, Rows
from engine.sched.stop import stopped_by

ONE_BY_ONE_UPTO = 16  # rows of a plan up to which columns cost more than they save


class Appender:
    """Appends tokens to requests and publishes the blocks they fill."""

    def __init__(self, roster: Roster, kv: KVManager, ledger: Ledger | None) -> None:
        self._roster = roster
        self._kv = kv
        self._ledger = ledger
        self._members = Members(NO_ROWS, ())  # of the last result

    def append(self, plan: StepPlan, result: StepResult, outputs: OutputColumns) -> list[int]:
        """Append what was sampled. Indices in ``outputs`` of requests that may have ended.

        A finished request, or one that was revoked, has no use for a late result.
        """
        counts = result.counts
        if len(counts) <= ONE_BY_ONE_UPTO or len(result.token_ids) > np.count_nonzero(counts):
            return self._one_by_one(plan, result, outputs)
        return self._in_columns(plan, result, outputs)

    def commit_rows(self, rows: Rows) -> None:
        """Publish the blocks of these rows whose tokens are all known and written."""
        table, kv = self._roster.table, self._kv
        written = np.minimum(table.num_computed.all[rows], table.num_tokens.all[rows])
        more = written // kv.block_size - kv.num_published[rows]
        full = np.flatnonzero(more > 0)
        if not full.size:
            return
        by_row = self._roster.by_row
        reqs = [req for row in rows[full].tolist() if (req := by_row[row]) is not None]
        if (more[full] == 1).all():
            kv.commit_next(reqs)
            return
        for req, upto in zip(reqs, written[full].tolist(), strict=True):
            kv.commit(req, upto)

    def _one_by_one(self, plan: StepPlan, result: StepResult, outputs: OutputColumns) -> list[int]:
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
            is_first = table.num_tokens.at[row] == table.num_prompt.at[row]
            taken = self._take(req, tokens[first:last])
            table.num_pending.at[row] -= 1
            self._kv.commit(req, min(table.num_computed.at[row], table.num_tokens.at[row]))
            index = outputs.add(req, taken, place, is_first=is_first)
            stop_id = table.stop_id.at[row]
            if (
                table.num_tokens.at[row] >= table.limit.at[row]
                or stop_id == taken[-1]
                or stop_id == -2
            ):
                ended.append(index)
        return ended

    def _in_columns(self, plan: StepPlan, result: StepResult, outputs: OutputColumns) -> list[int]:
        table, rows = self._roster.table, plan.rows
        sampled = (result.counts > 0) & (table.alive.all[rows] == 1)
        sampled &= table.generation.all[rows] == plan.generations
        indices = sampled.nonzero()[0]
        tokens = result.token_ids
        if len(indices) < len(rows):
            rows = rows[indices]
            tokens = tokens[result.counts.cumsum()[indices] - 1]
        members = self._members_of(rows)
        new = tokens.tolist()
        deque(map(array.append, members.tokens, new), maxlen=0)
        num_tokens = table.num_tokens.all[rows]
        is_first = (num_tokens == table.num_prompt.all[rows]).nonzero()[0]
        num_tokens += 1
        table.num_tokens.all[rows] = num_tokens
        table.num_pending.all[rows] -= 1
        outputs.add_members(members, new, indices, is_first)
        self.commit_rows(rows)
        if self._ledger is not None:
            self._ledger.on_tokens((req.user, 1) for req in members.reqs)
        return self._may_have_ended(rows, tokens, num_tokens)

    def _may_have_ended(
        self, rows: Rows, tokens: NDArray[np.int32], num_tokens: NDArray[np.int32]
    ) -> list[int]:
        table = self._roster.table
        stop_ids = table.stop_id.all[rows]
        ended = num_tokens >= table.limit.all[rows]
        ended |= (stop_ids == tokens) | (stop_ids == -2)
        return ended.nonzero()[0].tolist()

    def _members_of(self, rows: Rows) -> Members:
        if rows is not self._members.rows:
            self._members = Members(rows, self._roster.by_row)
        return self._members

    def _take(self, req: Request, tokens: list[int]) -> list[int]:
        """The sampled token; or accepted drafts and the one behind them, up to one that ends the
        request."""
        table, row = self._roster.table, req.row
        if len(tokens) == 1:
            req.tokens.append(tokens[0])
            table.num_tokens.at[row] += 1
        else:
            for index, token in enumerate(tokens):
                req.tokens.append(token)
                table.num_tokens.at[row] += 1
                if stopped_by(req) is not None:
                    tokens = tokens[: index + 1]
                    break
        if self._ledger is not None:
            self._ledger.on_tokens([(req.user, len(tokens))])
        return tokens

"""How the tokens of a result become known: one by one, or in columns when there are many rows.

Both do the same in the same order; the columns only pay for what changed.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

import numpy as np

from engine.kv.manager import KVManager
from engine.messages.step import StepPlan, StepResult
from engine.sched.columns import Members, OutputColumns
from engine.sched.ledger import Ledger
from engine.sched.request import Request
from engine.sched.roster import Roster
from engine.sched.seated import NO_ROWS, Rows
from engine.sched.stop import stopped_by
from engine.sched.table import ONE, Column, Counts

ONE_BY_ONE_UPTO = 16  # rows of a plan up to which columns cost more than they save


class Appender:
    """Appends tokens to requests and publishes the blocks they fill."""

    def __init__(self, roster: Roster, kv: KVManager, ledger: Ledger | None) -> None:
        self._roster = roster
        self._kv = kv
        self._block_size = np.array(kv.block_size, dtype=np.int32)
        self._ledger = ledger
        self._members = Members(NO_ROWS, roster)  # of the last result in columns
        self._version = -1  # of those who run, if these are the members

    def append(self, plan: StepPlan, result: StepResult, outputs: OutputColumns) -> list[int]:
        """Append what was sampled. Indices in ``outputs`` of requests that may have ended.

        A finished request, or one that was revoked, has no use for a late result.
        """
        counts, is_whole = result.counts, self._roster.seated.take_whole(plan.step)
        if len(counts) <= ONE_BY_ONE_UPTO or len(result.token_ids) > np.count_nonzero(counts):
            return self._one_by_one(plan, result, outputs)
        return self._in_columns(plan, result, outputs, is_whole)

    def commit_ends(self, rows: Rows, counts: Counts, other: Column) -> None:
        """Known or computed tokens of these rows have become one more and are ``counts`` now.
        Publish the blocks that end there, if the ``other`` column has come as far."""
        inside = counts % self._block_size
        if np.count_nonzero(inside) == len(rows):
            return
        ends = np.flatnonzero(inside == 0)
        full = rows[ends]
        full = full[other.all[full] >= counts[ends]]
        if full.size:
            self._kv.commit_next(self._roster.requests(full))

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
            is_first, table.told.at[row] = not table.told.at[row], 1
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

    def _in_columns(
        self, plan: StepPlan, result: StepResult, outputs: OutputColumns, is_whole: bool
    ) -> list[int]:
        """``is_whole``: the plan's rows are those who run now."""
        table = self._roster.table
        is_whole = is_whole and len(result.token_ids) == len(plan.rows)
        rows, tokens, places = self._sampled(plan, result, is_whole)
        members = self._members_of(rows, is_whole)
        new = tokens.tolist()
        deque(map(array.append, members.tokens, new), maxlen=0)
        num_tokens = table.num_tokens.all[rows]
        started = members.take_started()
        num_tokens += ONE
        table.num_tokens.all[rows] = num_tokens
        table.num_pending.all[rows] -= ONE
        outputs.add_members(members, new, places, started)
        self.commit_ends(rows, num_tokens, table.num_computed)
        if self._ledger is not None:
            self._ledger.on_tokens((req.user, 1) for req in members.reqs)
        return members.may_have_ended(tokens, num_tokens)

    def _members_of(self, rows: Rows, is_whole: bool) -> Members:
        """Made anew unless they are all who run, and the same as the last time."""
        version = self._roster.seated.version if is_whole else -1
        if not is_whole or version != self._version:
            self._members, self._version = Members(rows, self._roster), version
        return self._members

    def _sampled(
        self, plan: StepPlan, result: StepResult, is_whole: bool
    ) -> tuple[Rows, Counts, Sequence[int]]:
        """Rows that have a use for their token, the tokens, and their places in the plan."""
        table, rows, tokens = self._roster.table, plan.rows, result.token_ids
        if is_whole:
            return rows, tokens, range(len(rows))
        sampled = (result.counts > 0) & (table.alive.all[rows] == 1)
        sampled &= table.generation.all[rows] == plan.generations
        places = sampled.nonzero()[0]
        if len(places) < len(rows):
            rows = rows[places]
            tokens = tokens[result.counts.cumsum()[places] - 1]
        return rows, tokens, places.tolist()

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

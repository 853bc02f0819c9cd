"""Decodes that need nobody's opinion: all at once, or one by one without the long way round.

A row is plain if it is one token behind and no resource watches it. While everybody fits and the
policy does not ask to be asked, plain rows are granted as one block; otherwise each is granted in
its turn, and their counts are written back together. The plans are those that the long way gives;
this only costs what changed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.sched import queues
from engine.sched.builder import Step
from engine.sched.guard import Guard
from engine.sched.request import Request
from engine.sched.roster import Rows
from engine.sched.settle import Settler

# Whoever overrides one of these is asked about every request, one by one.
ASKING_HOOKS = ("order", "chunk", "evict", "on_grant")


class Bulk:
    """Grants plain rows."""

    def __init__(self, settler: Settler, guard: Guard, *, is_open: bool) -> None:
        self.is_open = is_open
        self._roster = settler.roster
        self._kv = settler.kv
        self._appender = settler.appender
        self._view = settler.view
        self._guard = guard
        self._asks = guard.overrides(*ASKING_HOOKS)
        self._asks_chunk = guard.overrides("chunk")
        self._asks_grant = guard.overrides("on_grant")

    def grant_plain(self, step: Step) -> bool:
        """Grant all plain rows if every running decode fits budget and free blocks.

        The order among them does then not matter. If they do not fit, or the policy wants to be
        asked, they are marked instead: ``grant_one`` is enough for a marked row in this step.
        """
        table, kv = self._roster.table, self._kv
        rows = self._roster.running_rows()
        upto = table.num_tokens.all[rows] + table.num_pending.all[rows]
        computed = table.num_computed.all[rows]
        decode = (upto - computed == 1) & (upto < table.limit.all[rows])
        needs_block = decode & (computed >= kv.num_held[rows] * kv.block_size)
        plain = decode & (table.watched.all[rows] == 0)
        num_needed = int(needs_block.sum()) * kv.num_groups
        if self._asks or int(decode.sum()) > step.tokens_left or num_needed > kv.num_free:
            # To take a block or to fill one is the business of ``grant``.
            plain &= ~needs_block & ((computed + 1) % kv.block_size != 0)
            table.plain.all[rows[plain]] = step.index
            return False
        if (growing := rows[plain & needs_block]).size:
            kv.reserve_next([req.row for req in self._by_rank(growing)])
        if not plain.all():
            rows = rows[plain]
        self._advance(rows)
        table.considered.all[rows] = step.index
        step.plain_rows = rows
        step.tokens_left -= len(rows)
        self._appender.commit_rows(rows)
        return True

    def grant_one(self, req: Request, step: Step) -> None:
        """One token for a marked row; its counts are advanced by ``write_back``."""
        if self._asks_chunk and self._guard.chunk(req, 1, self._view) < 1:
            return
        step.tokens_left -= 1
        step.plain.append(req.row)
        if self._asks_grant:
            self._guard.on_grant(req, 1, self._view)

    def write_back(self, step: Step) -> None:
        """Advance the counts of rows granted one by one."""
        if step.plain:
            step.plain_rows = np.array(sorted(step.plain), dtype=np.int32)
            self._advance(step.plain_rows)
            step.plain.clear()

    def _advance(self, rows: NDArray[np.int32]) -> None:
        table = self._roster.table
        table.num_computed.all[rows] += 1
        table.num_pending.all[rows] += 1
        table.in_flight.all[rows] += 1

    def rest(self, step: Step) -> list[Request]:
        """Running requests that were not granted in bulk: decodes first, then by rank."""
        rows = self._roster.running_rows()
        rows = rows[self._roster.table.considered.all[rows] != step.index]
        return sorted(self._by_rank(rows), key=lambda req: req.num_uncomputed != 1)

    def _by_rank(self, rows: Rows) -> list[Request]:
        by_row = self._roster.by_row
        reqs = [req for row in rows.tolist() if (req := by_row[row]) is not None]
        return sorted(reqs, key=queues.by_rank)

"""The uncontended path: everybody decodes and everything fits, so nobody needs to be asked.

Its plans are those that offering the rows one by one would give; it only costs what changed.
"""

from __future__ import annotations

from engine.kv.manager import KVManager
from engine.sched import queues
from engine.sched.append import Appender
from engine.sched.builder import Step
from engine.sched.request import Request
from engine.sched.roster import Roster, Rows


class Bulk:
    """Grants all plain rows at once: one token behind and watched by no resource."""

    def __init__(self, roster: Roster, kv: KVManager, appender: Appender) -> None:
        self._roster = roster
        self._kv = kv
        self._appender = appender

    def grant_plain(self, step: Step) -> bool:
        """Grant them if every running decode fits budget and free blocks.

        The order among them does then not matter. False, and nothing was done, if they do not fit.
        """
        table, kv = self._roster.table, self._kv
        rows = self._roster.running_rows()
        upto = table.num_tokens.all[rows] + table.num_pending.all[rows]
        computed = table.num_computed.all[rows]
        decode = (upto - computed == 1) & (upto < table.limit.all[rows])
        needs_block = decode & (computed >= kv.num_held[rows] * kv.block_size)
        num_decodes = int(decode.sum())
        if num_decodes > step.tokens_left or int(needs_block.sum()) * kv.num_groups > kv.num_free:
            return False
        plain = decode & (table.watched.all[rows] == 0)
        if (growing := rows[plain & needs_block]).size:
            kv.reserve_next([req.row for req in self._by_rank(growing)])
        if not plain.all():
            rows = rows[plain]
        table.num_computed.all[rows] += 1
        table.num_pending.all[rows] += 1
        table.in_flight.all[rows] += 1
        table.considered.all[rows] = step.index
        step.plain_rows = rows
        step.tokens_left -= len(rows)
        self._appender.commit_rows(rows)
        return True

    def rest(self, step: Step) -> list[Request]:
        """Running requests that were not granted in bulk: decodes first, then by rank."""
        rows = self._roster.running_rows()
        rows = rows[self._roster.table.considered.all[rows] != step.index]
        return sorted(self._by_rank(rows), key=lambda req: req.num_uncomputed != 1)

    def _by_rank(self, rows: Rows) -> list[Request]:
        by_row = self._roster.by_row
        reqs = [req for row in rows.tolist() if (req := by_row[row]) is not None]
        return sorted(reqs, key=queues.by_rank)

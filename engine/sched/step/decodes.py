"""Fast path for decodes that need no call of a policy hook or a resource.

A running request is plain if it has one token left to compute and no resource watches it. If the
policy overrides no hook for single requests, and the token budget and the free blocks suffice for
all decodes, all plain requests get their token at once, by numpy operations. Otherwise they get it
one by one in the policy's order, and only their counts are updated at once. A serial request, of
which only one step may be in flight, waits until its last token is known. The plans equal those of
the general path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
from numpy.typing import NDArray

from engine.sched.plugins.hooks import PolicyGuard
from engine.sched.request import Request
from engine.sched.roster import NO_ROWS, Rows, by_rank
from engine.sched.step.settle import Settler
from engine.sched.step_state import Step
from engine.sched.table import ONE, SERIAL, WATCHED, Counts

Mask = NDArray[np.bool_]

FEW = 8  # up to this many running requests a loop is faster (a single one: by a fifth)

# A policy that overrides one of these is called for every request, one by one.
ROW_HOOKS = ("order", "chunk", "evict", "on_grant")


class DecodeFastPath:
    """Gives one token to each running decode for which no hook or resource must be called."""

    def __init__(
        self,
        settler: Settler,
        guard: PolicyGuard,
        secure: Callable[[Request, int, Step], bool],
        *,
        is_open: bool,
        few: int,
    ) -> None:
        self.is_open = is_open
        self._few = few
        self._roster = settler.roster
        self._table = settler.roster.table
        self._kv = settler.kv
        self._resources = settler.resources
        self._block_size = np.array(settler.kv.block_size, dtype=np.int32)
        self._appender = settler.appender
        self._view = settler.view
        self._guard = guard
        self._secure = secure
        self._has_row_hooks = guard.overrides(*ROW_HOOKS)
        self._has_chunk = guard.overrides("chunk")
        self._has_on_grant = guard.overrides("on_grant")

    def grant_plain(self, step: Step) -> bool:
        """Give a token at once to all decodes that no resource watches, and return True.

        If their order matters (a policy hook is called for single requests, or tokens or blocks are
        scarce), return False and, unless they are few, mark these decodes in ``table.plain``: they
        must get their tokens through ``granter``. If they are more than ``step.decode_room``, none
        is marked: each is offered tokens by itself.
        """
        if len(self._roster.running) <= self._few and not self._has_row_hooks:
            return self._grant_few(step)
        table, kv, rows = self._table, self._kv, self._roster.running_rows.columns.rows
        decode, plain, held, computed = self._decodes()
        is_cut = held is not None and step.decode_room < len(rows)
        if is_cut and np.count_nonzero(decode) > step.decode_room:
            return False
        if self._has_row_hooks:
            table.plain.all[rows[plain]] = step.index
            return False
        needs_block = decode & (computed >= kv.num_held[rows] * self._block_size)
        promised = self._view.promised_blocks if self._roster.prompts else 0
        is_short = np.count_nonzero(needs_block) * kv.num_groups + promised > kv.num_free
        num_decodes = num_plain = np.count_nonzero(decode)
        if plain is not decode:
            num_plain = np.count_nonzero(plain)
        is_contested = is_short and (promised or num_plain < num_decodes)
        if num_decodes > step.tokens_left or is_contested:
            table.plain.all[rows[plain]] = step.index
            return False
        held_rows = NO_ROWS if held is None else rows[held]
        if is_short:
            growing = set(rows[needs_block].tolist())
            rows = self._secure_growing(rows[plain], growing, held_rows, step)
        else:
            if (growing_rows := rows[plain & needs_block]).size:
                kv.reserve_next([req.row for req in self._by_rank(growing_rows.tolist())])
            if num_plain < len(rows):
                rows = rows[plain]
        table.considered.all[rows] = table.considered.all[held_rows] = step.index
        step.plain_rows = rows
        step.tokens_left -= len(rows)
        self._appender.commit_ends(rows, table.advance(rows), table.num_tokens)
        return True

    def _decodes(self) -> tuple[Mask, Mask, Mask | None, Counts]:
        """Return three masks over the running requests, and their numbers of computed tokens. The
        masks: decodes that can have a token; those of them that no resource watches; decodes that
        wait for their last token (``None`` without resources)."""
        table, columns = self._table, self._roster.running_rows.columns
        rows = columns.rows
        pending, computed = table.num_pending.all[rows], table.num_computed.all[rows]
        upto = table.num_tokens.all[rows] + pending
        decode = (upto == computed + ONE) & (upto < columns.limits)
        plain, held = decode, None
        if self._resources.members:
            flags = table.flags.all[rows]
            held = decode & (flags & SERIAL != 0) & (pending > 0)
            decode = decode & ~held
            plain = decode & (flags & WATCHED == 0)
        return decode, plain, held, computed

    def _grant_few(self, step: Step) -> bool:
        """Do the work of ``grant_plain`` in a loop, for few requests. Returns False if the token
        budget or the free blocks do not suffice."""
        table, kv = self._table, self._kv
        tokens, pending, computed = table.num_tokens.at, table.num_pending.at, table.num_computed.at
        plain, held, growing, num_decodes, num_growing = [], [], [], 0, 0
        for row in self._roster.running_rows.list:
            upto, start = tokens[row] + pending[row], computed[row]
            if upto - start != 1 or upto >= table.limit.at[row]:
                continue
            if pending[row] and table.flags.at[row] & SERIAL:
                held.append(row)
                continue
            needs_block = start % kv.block_size == 0 and start >= kv.num_held[row] * kv.block_size
            num_decodes += 1
            num_growing += needs_block
            if not table.flags.at[row] & WATCHED:
                plain.append(row)
                if needs_block:
                    growing.append(row)
        needed = num_growing * kv.num_groups
        if self._roster.prompts:
            needed += self._view.promised_blocks
        if num_decodes > step.tokens_left or needed > kv.num_free:
            return False
        if growing:
            kv.reserve_next([req.row for req in self._by_rank(growing)])
        for row in held:
            table.considered.at[row] = step.index
        self._advance_few(plain, step)
        return True

    def _advance_few(self, rows: list[int], step: Step) -> None:
        table, kv = self._table, self._kv
        for row in rows:
            upto = table.num_computed.at[row] + 1
            table.advance_plain(row, upto)
            table.considered.at[row] = step.index
            if upto % kv.block_size == 0 and upto <= table.num_tokens.at[row]:
                kv.commit(self._req(row), upto)
        step.plain_rows = self._roster.running_rows.sorted(rows)
        step.tokens_left -= len(rows)

    def _secure_growing(self, rows: Rows, growing: set[int], held: Rows, step: Step) -> Rows:
        """Get a KV block for each row in ``growing``, preempting other requests if none is free.

        ``rows``: decodes that no resource watches; ``held``: decodes that wait for their last
        token. Blocks are given in rank order; a row cannot be preempted after its turn. Returns
        those of ``rows`` that can have a token.
        """
        considered, index = self._table.considered, step.index
        decodes = {*rows.tolist(), *held.tolist()}
        ranked = np.array(
            [req.row for req in self._roster.running if req.row in decodes], dtype=np.intp
        )
        left = [(place, row) for place, row in enumerate(ranked.tolist()) if row in growing]
        refused, offered = set(held.tolist()), 0
        while left := [(place, row) for place, row in left if considered.at[row] != index]:
            room = self._kv.num_free // self._kv.num_groups
            now = left[: max(1, room)]
            considered.all[ranked[offered : now[-1][0] + 1]] = index
            offered = now[-1][0] + 1
            if room:
                self._kv.reserve_next([row for _, row in now])
            elif not self._secure(self._req(now[0][1]), 1, step):
                refused.add(now[0][1])
        kept = ranked[self._table.slot.all[ranked] >= 0]
        if refused:
            kept = kept[~np.isin(kept, list(refused))]
        kept.sort()
        return kept

    def granter(self, step: Step) -> Callable[[Request], None]:
        """Return a function that gives one token to a request marked by ``grant_plain``, unless it
        was offered a token or preempted in this step already.

        Call ``write_back`` after the last request: it updates the counts.
        """
        table, kv, index, size = self._table, self._kv, step.index, self._kv.block_size
        considered = table.considered.at
        known, computed = table.num_tokens.at, table.num_computed.at
        chunk = self._guard.chunks_of(1, self._view) if self._has_chunk else None
        on_grant = self._guard.grants_of(1, self._view) if self._has_on_grant else None
        granted, advance, last = step.plain.append, table.advance_plain, size - 1
        secure_next = self._secure_next

        def grant_one(req: Request) -> None:
            row = req.row
            if considered[row] == index:
                return
            considered[row] = index
            if chunk is not None and chunk(req) < 1:
                return
            start = computed[row]
            within = start % size
            if within == 0 and not secure_next(req, start, step):
                return
            step.tokens_left -= 1
            granted(row)
            if within == last and start < known[row]:
                kv.commit(req, start + 1)
            if on_grant is not None:  # the hook must see the advanced counts
                advance(row, start + 1)
                on_grant(req)

        return grant_one

    def _secure_next(self, req: Request, position: int, step: Step) -> bool:
        """Make sure that the request has a block for this position; returns whether it has."""
        kv = self._kv
        if position < kv.num_held[req.row] * kv.block_size:
            return True
        if kv.num_free < kv.num_groups:
            return self._secure(req, 1, step)
        kv.reserve_next([req.row])
        return True

    def write_back(self, step: Step) -> None:
        """Update the counts of the requests that got a token from the function of ``granter``."""
        if step.plain:
            step.plain_rows = self._roster.running_rows.sorted(step.plain)
            if not self._has_on_grant:
                self._table.advance(step.plain_rows)
            step.plain.clear()

    def rest(self, step: Step) -> list[Request]:
        """Running requests that this step has not offered a token yet: decodes, then prompts, both
        in rank order."""
        rows = self._roster.running_rows.columns.rows
        if len(step.plain_rows) == len(rows):
            return []
        considered = self._table.considered
        left = rows[considered.all[rows] != step.index]
        if 4 * len(left) > len(rows):  # faster than sorting ``left``
            decodes_first, index = self._view.decodes_first(), step.index
            return [req for req in decodes_first if considered.at[req.row] != index]
        return sorted(self._by_rank(left.tolist()), key=lambda req: req.num_uncomputed != 1)

    def _req(self, row: int) -> Request:
        return cast(Request, self._roster.by_row[row])

    def _by_rank(self, rows: list[int]) -> list[Request]:
        return sorted([self._req(row) for row in rows], key=by_rank)

"""Blocks used by transfers: loads from a KV source, and blocks of ended requests being read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.kv.block_pool import BlockPool, live_blocks
from engine.kv.connector import KVSource, RemoteMatch
from engine.kv.fences import Fences
from engine.kv.tables import Allocation, KVRequest

NOTHING = RemoteMatch()

logger = logging.getLogger("engine.kv")


@dataclass(slots=True)
class Loan:
    """Blocks of ended requests that transfers still use. All these requests had the same id."""

    blocks: list[int] = field(default_factory=list)
    num_transfers: int = 0


class Transfers:
    """Calls the KV source, starts loads, and owns the blocks that outlive their request.

    A loan ends when all transfers of its request id have ended, so a reused id cannot free the
    blocks of another transfer too early.

    If a source cannot start a load, the request keeps the blocks, which hold no valid KV, and the
    source is not called for this request again.
    """

    def __init__(self, pool: BlockPool, source: KVSource) -> None:
        self.source = source
        self.lent: dict[str, Loan] = {}
        self.fences = Fences(pool.num_blocks)
        self._pool = pool
        self._failed: dict[int, KVRequest] = {}  # requests whose load could not start

    def match(self, req: KVRequest, allocation: Allocation, num_local_tokens: int) -> RemoteMatch:
        """What the source can load after the local prefix hit, without the request's last token,
        which must always be computed."""
        if allocation.load_error:
            return NOTHING
        found = self.source.match(req, num_local_tokens)
        room = len(req.tokens) - 1 - num_local_tokens
        return found._replace(num_tokens=min(found.num_tokens, room))

    def load(self, req: KVRequest, allocation: Allocation, blocks: Sequence[int]) -> None:
        """Load KV into these blocks once no step in flight writes them. The request keeps the
        blocks until the end of the load is reported. If the load cannot start, ``take_failed``
        returns the request."""
        allocation.loading = True

        def start() -> None:
            if not self.start(req, allocation, blocks):
                allocation.loading = False
                self._failed[req.arrival] = req

        self.fences.when_written(req.arrival, blocks, start)

    def start(self, req: KVRequest, allocation: Allocation, blocks: Sequence[int]) -> bool:
        """Start the load of these blocks. If the source raises, store the error; return False."""
        try:
            self.source.start_load(req, blocks, allocation.num_remote)
        except Exception as error:  # plug-in code: only this request is affected
            allocation.load_error = f"{type(error).__name__}: {error}"
            logger.warning(
                "%s.start_load raised for request %s: %s; its KV is computed instead",
                type(self.source).__name__,
                req.request_id,
                allocation.load_error,
            )
        return not allocation.load_error

    def take_failed(self) -> list[KVRequest]:
        """Requests whose load could not start since the last call and that have not ended."""
        failed, self._failed = self._failed, {}
        return list(failed.values())

    def give_back(self, blocks: Sequence[int]) -> None:
        """Return blocks to the pool. Loads into them will wait until the steps now in flight have
        finished."""
        self.fences.give_back(blocks)
        self._pool.release(blocks)

    def end(self, req: KVRequest, allocation: Allocation) -> dict[str, Any] | None:
        """Free the blocks of a request that has ended, or lend them to its transfers. Returns the
        KV transfer parameters for its output."""
        blocks = live_blocks(allocation.tables)
        self._failed.pop(req.arrival, None)
        if allocation.loading and self.fences.cancel(req.arrival):
            allocation.loading = False  # it had not started, so its end will not be reported
        farewell = self.source.finished(req, blocks)
        if blocks and (farewell.keep or allocation.loading):  # a load still writes into its blocks
            loan = self.lent.setdefault(req.request_id, Loan())
            loan.blocks.extend(blocks)
            loan.num_transfers += 1
        else:
            self.give_back(blocks)
        return farewell.params

    def sent(self, request_id: str) -> bool:
        """Record the end of a transfer of an ended request. False for an unknown id."""
        loan = self.lent.get(request_id)
        if loan is None:
            return False
        loan.num_transfers -= 1
        if loan.num_transfers == 0:
            del self.lent[request_id]
            self.give_back(loan.blocks)
        return True

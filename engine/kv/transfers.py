"""Blocks used by KV transfers: loads from a KV source, and reads of ended requests' blocks."""

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
    """Blocks of ended requests that KV transfers still use; one loan for each request id."""

    blocks: list[int] = field(default_factory=list)
    num_transfers: int = 0


class Transfers:
    """Starts loads from the KV source, and owns blocks of ended requests until their transfers end.

    If a load cannot start, the request's KV is computed instead.
    """

    def __init__(self, pool: BlockPool, source: KVSource) -> None:
        self.source = source
        self.lent: dict[str, Loan] = {}
        self.fences = Fences(pool.num_blocks)
        self._pool = pool
        self._failed: dict[int, KVRequest] = {}  # requests whose load could not start

    def match(self, req: KVRequest, allocation: Allocation, num_local_tokens: int) -> RemoteMatch:
        """Find the tokens that the KV source can load after the request's ``num_local_tokens``
        cached tokens. The request's last token is never loaded."""
        if allocation.load_error:
            return NOTHING
        found = self.source.match(req, num_local_tokens)
        room = len(req.tokens) - 1 - num_local_tokens
        return found._replace(num_tokens=min(found.num_tokens, room))

    def load(self, req: KVRequest, allocation: Allocation, blocks: Sequence[int]) -> None:
        """Load a request's KV into ``blocks``, once no step in flight writes to these blocks. If
        the load cannot start, ``take_failed`` returns the request."""
        allocation.loading = True

        def start() -> None:
            if not self.start(req, allocation, blocks):
                allocation.loading = False
                self._failed[req.arrival] = req

        self.fences.when_written(req.arrival, blocks, start)

    def start(self, req: KVRequest, allocation: Allocation, blocks: Sequence[int]) -> bool:
        """Start to load KV into the blocks. Returns False, and stores the error, on failure."""
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
        """Take the unfinished requests whose loads could not start since the last call."""
        failed, self._failed = self._failed, {}
        return list(failed.values())

    def give_back(self, blocks: Sequence[int]) -> None:
        """Free blocks. KV is loaded into them only after the steps now in flight have ended."""
        self.fences.give_back(blocks)
        self._pool.release(blocks)

    def end(self, req: KVRequest, allocation: Allocation) -> dict[str, Any] | None:
        """Free the blocks of an ended request, at once or when its KV transfers end. Returns the KV
        transfer parameters for the request's output."""
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
        """Record the end of a KV transfer of an ended request. Returns False for an unknown id."""
        loan = self.lent.get(request_id)
        if loan is None:
            return False
        loan.num_transfers -= 1
        if loan.num_transfers == 0:
            del self.lent[request_id]
            self.give_back(loan.blocks)
        return True

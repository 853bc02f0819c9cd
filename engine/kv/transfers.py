"""Blocks that transfers use: loads from a KV source, and loans to transfers of ended requests."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.kv.block_pool import BlockPool, live_blocks
from engine.kv.connector import KVSource, RemoteMatch
from engine.kv.fences import Fences
from engine.kv.tables import Holder, RequestBlocks

NOTHING = RemoteMatch()

logger = logging.getLogger("engine.kv")


@dataclass(slots=True)
class Loan:
    """Blocks of ended requests of one id that transfers still use."""

    blocks: list[int] = field(default_factory=list)
    num_transfers: int = 0


class Transfers:
    """Asks the source, starts its loads, and owns the blocks that outlive their request.

    A loan ends when as many transfers have ended as were begun under its id, so an id used again
    cannot free the blocks of the wrong transfer.

    If a source cannot start a load, the request keeps the blocks, which hold no valid KV, and the
    source is not called for that request again.
    """

    def __init__(self, pool: BlockPool, source: KVSource) -> None:
        self.source = source
        self.lent: dict[str, Loan] = {}
        self.fences = Fences(pool.num_blocks)
        self._pool = pool
        self._failed: dict[int, Holder] = {}  # requests whose load will not begin

    def match(self, req: Holder, holding: RequestBlocks, num_local_tokens: int) -> RemoteMatch:
        """What the source has after the local hit; the last known token is always computed."""
        if holding.load_error:
            return NOTHING
        found = self.source.match(req, num_local_tokens)
        room = len(req.tokens) - 1 - num_local_tokens
        return found._replace(num_tokens=min(found.num_tokens, room))

    def load(self, req: Holder, holding: RequestBlocks, blocks: Sequence[int]) -> None:
        """Fill these blocks from elsewhere as soon as no step in flight writes them. Until its
        end is reported they cannot be taken from the request. If it cannot start, the request is
        among those of ``take_failed``."""
        holding.loading = True

        def start() -> None:
            if not self.start(req, holding, blocks):
                holding.loading = False
                self._failed[req.arrival] = req

        self.fences.when_written(req.arrival, blocks, start)

    def start(self, req: Holder, holding: RequestBlocks, blocks: Sequence[int]) -> bool:
        """Have the source fill these blocks; False if it raised, which is kept with the holding."""
        try:
            self.source.start_load(req, blocks, holding.num_remote)
        except Exception as error:  # a plug-in's code: the fault is this request's alone
            holding.load_error = f"{type(error).__name__}: {error}"
            logger.warning(
                "%s.start_load, request %s: %s; nothing is loaded",
                type(self.source).__name__,
                req.request_id,
                holding.load_error,
            )
        return not holding.load_error

    def take_failed(self) -> list[Holder]:
        """Requests whose load could not start since the last call, less those that have ended."""
        failed, self._failed = self._failed, {}
        return list(failed.values())

    def give_back(self, blocks: Sequence[int]) -> None:
        """Return blocks to the pool; steps in flight may still write them."""
        self.fences.give_back(blocks)
        self._pool.release(blocks)

    def end(self, req: Holder, holding: RequestBlocks) -> dict[str, Any] | None:
        """The request has ended: its blocks are free, or lent. Returns what its output carries."""
        blocks = live_blocks(holding.tables)
        self._failed.pop(req.arrival, None)
        if holding.loading and self.fences.cancel(req.arrival):
            holding.loading = False  # it had not begun, so no end of it will be reported
        bye = self.source.finished(req, blocks)
        if blocks and (bye.keep or holding.loading):  # what a load writes into is not free either
            loan = self.lent.setdefault(req.request_id, Loan())
            loan.blocks.extend(blocks)
            loan.num_transfers += 1
        else:
            self.give_back(blocks)
        return bye.params

    def sent(self, request_id: str) -> bool:
        """A transfer of an ended request is over; False (and nothing happens) if none is known."""
        loan = self.lent.get(request_id)
        if loan is None:
            return False
        loan.num_transfers -= 1
        if loan.num_transfers == 0:
            del self.lent[request_id]
            self.give_back(loan.blocks)
        return True

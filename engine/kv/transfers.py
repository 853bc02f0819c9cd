"""Blocks that transfers use: what may be loaded from elsewhere, what is lent until it is sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.kv.block_pool import BlockPool
from engine.kv.connector import Farewell, KVSource, RemoteMatch
from engine.kv.holding import Holder, Holding
from engine.kv.tables import live_blocks

NOTHING = RemoteMatch()


@dataclass(slots=True)
class Loan:
    """Blocks of ended requests of one id that transfers still use."""

    blocks: list[int] = field(default_factory=list)
    num_transfers: int = 0


class Transfers:
    """Asks the source, and owns the blocks that outlive their request.

    A loan ends when as many transfers have ended as were begun under its id, so an id used again
    cannot free the blocks of the wrong transfer.
    """

    def __init__(self, pool: BlockPool, source: KVSource | None) -> None:
        self.source = source
        self.lent: dict[str, Loan] = {}
        self._pool = pool

    def match(self, req: Holder, num_local_tokens: int) -> RemoteMatch:
        """What the source has behind the local hit; the last known token is always computed."""
        if self.source is None:
            return NOTHING
        found = self.source.match(req, num_local_tokens)
        room = len(req.tokens) - 1 - num_local_tokens
        return found._replace(num_tokens=min(found.num_tokens, room))

    def end(self, req: Holder, holding: Holding) -> dict[str, Any] | None:
        """The request has ended: its blocks are free, or lent. Returns what its output carries."""
        blocks = live_blocks(holding)
        bye = Farewell() if self.source is None else self.source.finished(req, blocks)
        if blocks and (bye.keep or holding.loading):  # what a load writes into is not free either
            loan = self.lent.setdefault(req.request_id, Loan())
            loan.blocks.extend(blocks)
            loan.num_transfers += 1
        else:
            self._pool.release(blocks)
        return bye.params

    def sent(self, request_id: str) -> bool:
        """A transfer of an ended request is over; False (and nothing happens) if none is known."""
        loan = self.lent.get(request_id)
        if loan is None:
            return False
        loan.num_transfers -= 1
        if loan.num_transfers == 0:
            del self.lent[request_id]
            self._pool.release(loan.blocks)
        return True

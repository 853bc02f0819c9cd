"""Blocks that transfers use: what may be loaded from elsewhere, what is lent until it is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.kv.block_pool import BlockPool
from engine.kv.connector import Farewell, KVSource, RemoteMatch
from engine.kv.fences import Fences
from engine.kv.holding import Holder, Holding
from engine.kv.tables import live_blocks

NOTHING = RemoteMatch()


@dataclass(slots=True)
class Loan:
    """Blocks of ended requests of one id that transfers still use."""

    blocks: list[int] = field(default_factory=list)
    num_transfers: int = 0


class Transfers:
    """Asks the source, starts its loads, and owns the blocks that outlive their request.

    A loan ends when as many transfers have ended as were begun under its id, so an id used again
    cannot free the blocks of the wrong transfer. Without a source there are no ``fences``.
    """

    def __init__(self, pool: BlockPool, source: KVSource | None) -> None:
        self.source = source
        self.lent: dict[str, Loan] = {}
        self.fences = None if source is None else Fences(pool.num_blocks)
        self._pool = pool

    def match(self, req: Holder, num_local_tokens: int) -> RemoteMatch:
        """What the source has behind the local hit; the last known token is always computed."""
        if self.source is None:
            return NOTHING
        found = self.source.match(req, num_local_tokens)
        room = len(req.tokens) - 1 - num_local_tokens
        return found._replace(num_tokens=min(found.num_tokens, room))

    def load(self, req: Holder, holding: Holding, blocks: Sequence[int]) -> None:
        """Fill these blocks from elsewhere as soon as no step in flight writes them. Until it is
        said to be over they cannot be taken from the request."""
        source, fences, num_tokens = self.source, self.fences, holding.num_remote
        assert source is not None and fences is not None
        holding.loading = True
        fences.when_written(req.arrival, blocks, lambda: source.start_load(req, blocks, num_tokens))

    def give_back(self, blocks: Sequence[int]) -> None:
        """The pool has them; steps in flight may still write them."""
        if self.fences is not None:
            self.fences.give_back(blocks)
        self._pool.release(blocks)

    def end(self, req: Holder, holding: Holding) -> dict[str, Any] | None:
        """The request has ended: its blocks are free, or lent. Returns what its output carries."""
        blocks = live_blocks(holding)
        if holding.loading and self.fences is not None and self.fences.cancel(req.arrival):
            holding.loading = False  # it had not begun, so no end of it will be told
        bye = Farewell() if self.source is None else self.source.finished(req, blocks)
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

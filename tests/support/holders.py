"""Requests as the KV manager sees them, without a scheduler."""

from __future__ import annotations

from array import array
from itertools import count
from types import SimpleNamespace

from engine.kv.manager import KVManager

ARRIVALS = count()


def holder(row: int, tokens: list[int], **fields) -> SimpleNamespace:
    """A request in this row of the table, of which nothing is computed."""
    defaults = {
        "request_id": f"r{row}",
        "cache_salt": None,
        "adapter": None,
        "media": [],
        "reads_cache": True,
        "num_computed": 0,
        "arrival": next(ARRIVALS),
    }
    return SimpleNamespace(row=row, tokens=array("i", tokens), **(defaults | fields))


def fill(kv: KVManager, req: SimpleNamespace) -> list[int]:
    """The request's blocks, as after its prefill."""
    kv.ensure_rows(64)
    assert kv.reserve(req, len(req.tokens))
    kv.commit(req, len(req.tokens))
    req.num_computed = len(req.tokens)
    return kv.held(req)

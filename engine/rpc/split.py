"""Splits outputs that cannot be sent as one message; only the request at fault fails.

A connector, a policy or a scheduler of the user's own may put anything into a request's end, and
together the outputs of a step may be too large. The batch is halved until each piece can be encoded
or holds a single request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from msgspec import Struct

from engine.errors import WireError
from engine.ipc.codec import plain_text
from engine.messages.columns import pick_rows
from engine.messages.outputs import CoreOutputs, Finished
from engine.messages.wire import Outputs

Encode = Callable[[Struct], bytes]


class Piece(NamedTuple):
    """Outputs as one message."""

    frame: bytes
    batch: CoreOutputs
    fault: str = ""
    """Why its only request fails, empty if it does not."""


def pieces_of(batch: CoreOutputs, encode: Encode) -> list[Piece]:
    """The batch as messages: one, unless it is too large or cannot be encoded.

    A request whose outputs cannot be encoded even alone ends with an error instead.
    """
    try:
        return [Piece(encode(Outputs(batch)), batch)]
    except WireError as error:
        fault = str(error)
    num_rows = len(batch.request_ids)
    if num_rows == 0:
        return []
    if num_rows == 1:
        end = Finished(0, "error", message=plain_text(fault))
        told = CoreOutputs(batch.request_ids, [], [0], batch.time, finished=[end])
        return [Piece(encode(Outputs(told)), told, fault)]
    middle = num_rows // 2
    halves = (range(middle), range(middle, num_rows))
    return [piece for rows in halves for piece in pieces_of(pick_rows(batch, rows), encode)]

"""KVSource: the scheduler's half of a KV connector, which supplies KV computed elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from engine.kv.tables import KVRequest


class RemoteMatch(NamedTuple):
    """Number of tokens after the local prefix hit whose KV the source can supply.

    ``asynchronous``: the request waits until this KV is loaded, while others run. Otherwise it is
    loaded at the start of the step that computes the request's next tokens.
    """

    num_tokens: int = 0
    asynchronous: bool = False


class Farewell(NamedTuple):
    """What a source returns when a request ends.

    ``keep``: a transfer still reads the request's blocks, which stay reserved until ``sent``.
    ``params``: put into the request's output, for the engine that continues with its KV.
    """

    keep: bool = False
    params: dict[str, Any] | None = None


class KVSource(Protocol):
    """A source of KV: a store, another engine or host memory. This half decides what to load; the
    worker's half moves the bytes."""

    def match(self, req: KVRequest, num_local_tokens: int) -> RemoteMatch:
        """How much KV the source has after the local prefix hit. Must change nothing."""

    def start_load(self, req: KVRequest, blocks: Sequence[int], num_tokens: int) -> None:
        """Start to load the KV of the ``num_tokens`` after the local hit into ``blocks``, in order.

        If this raises, the blocks must not be written, the request computes the tokens itself, and
        the source is not called again for it.
        """

    def metadata(self) -> bytes | None:
        """The message for the worker's half, sent with the next plan; ``None`` for no message."""

    def finished(self, req: KVRequest, blocks: Sequence[int]) -> Farewell:
        """Called when a request ends, with the blocks it holds. A load may still be running."""

    def shutdown(self) -> None:
        """Release files, connections and memory."""

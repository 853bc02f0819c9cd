"""KVSource: the scheduler-side interface of a KV connector, which loads KV computed elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from engine.kv.tables import KVRequest


class RemoteMatch(NamedTuple):
    """How many tokens after the local prefix hit the KV source can supply.

    ``asynchronous``: the request waits in the queue until their KV is loaded. Otherwise the KV is
    loaded within the step that computes the request's next tokens."""

    num_tokens: int = 0
    asynchronous: bool = False


class Farewell(NamedTuple):
    """What a KV source returns when a request ends.

    ``keep``: a transfer still reads the request's blocks, which stay reserved until it has ended.
    ``params``: for the engine that continues with the KV, returned with the request's output."""

    keep: bool = False
    params: dict[str, Any] | None = None


class KVSource(Protocol):
    """A source of KV: a store, another engine or host memory. Runs in the scheduler and decides
    what to load; a counterpart in the worker moves the bytes."""

    def match(self, req: KVRequest, num_local_tokens: int) -> RemoteMatch:
        """Find how many tokens the source can supply after the local prefix hit. Changes
        nothing."""

    def start_load(self, req: KVRequest, blocks: Sequence[int], num_tokens: int) -> None:
        """Start to load the KV of the ``num_tokens`` tokens after the local hit into ``blocks``.

        If this raises, the source must not write the blocks. The request then computes the tokens
        itself, and the source gets no further call for it."""

    def metadata(self) -> bytes | None:
        """Return a message for the source's worker side, to be sent with the next plan, or
        ``None``."""

    def finished(self, req: KVRequest, blocks: Sequence[int]) -> Farewell:
        """Handle the end of a request with these blocks. A load into them may still be running."""

    def shutdown(self) -> None:
        """Release files, connections and memory."""

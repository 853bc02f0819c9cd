"""KVSource: KV that was computed elsewhere; the scheduler's half of a KV connector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from engine.kv.tables import Holder


class RemoteMatch(NamedTuple):
    """Tokens after the local hit whose KV the source has.

    ``asynchronous``: the request waits until they are loaded, and others run meanwhile. Otherwise
    they are loaded at the start of the step that computes the request's next tokens.
    """

    num_tokens: int = 0
    asynchronous: bool = False


class Farewell(NamedTuple):
    """Answer of a source when a request ends.

    ``keep``: a transfer still reads the request's blocks; they are lent to it until ``sent``.
    ``params`` go into the request's output, for the engine that continues with its KV.
    """

    keep: bool = False
    params: dict[str, Any] | None = None


class KVSource(Protocol):
    """A store, another engine or host memory. This half decides, the worker's moves bytes."""

    def match(self, req: Holder, num_local_tokens: int) -> RemoteMatch:
        """Its KV after the local hit. Changes nothing; called again when the hit changes."""

    def start_load(self, req: Holder, blocks: Sequence[int], num_tokens: int) -> None:
        """Fill these blocks, which hold the ``num_tokens`` after the local hit, in order.

        If it raises, nothing may be written into them: the load counts as failed before it began,
        and the source is not called again for this request.
        """

    def metadata(self) -> bytes | None:
        """Message to the worker's half with the next plan, ``None`` if there is none."""

    def finished(self, req: Holder, blocks: Sequence[int]) -> Farewell:
        """The request has ended, held these blocks, and may have been aborted while loading."""

    def shutdown(self) -> None:
        """Close what was opened."""

"""A look at the unfinished requests of an engine for asyncio tasks, and at its cores."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from engine.core.client import CoreClient
from engine.frontend.session import Session
from engine.frontend.streams import Stream

T = TypeVar("T")


class LiveRequest(NamedTuple):
    """An unfinished request. ``core_ids``: the core's ids of its sequences; ``context``: context
    variables of the task that reads it."""

    request_id: str
    core_ids: Sequence[str]
    context: contextvars.Context


class AsyncWatching:
    """The method of ``AsyncLLMEngine`` for those who watch it."""

    _session: Session
    _live: dict[str, Stream]

    async def look(self, read: Callable[[CoreClient, list[LiveRequest]], T]) -> T:
        """Call ``read`` in the engine's thread between two steps, with the client of the cores and
        the unfinished requests, oldest first. Returns its result."""

        def look() -> T:
            outputs = self._session.outputs
            live = [
                LiveRequest(name, outputs.core_ids(name), stream.context)
                for name, stream in self._live.items()
            ]
            return read(self._session.client, live)

        found: T = await self._call(look)
        return found

    async def _call(self, function: Callable[[], Any]) -> Any:
        """Run ``function`` in the engine's thread between two steps. Returns its result."""
        raise NotImplementedError

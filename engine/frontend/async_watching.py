"""A look at the unfinished requests of an engine for asyncio tasks, and at its cores."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from engine.core.client import CoreClient, NumCores
from engine.errors import EngineDeadError
from engine.frontend.session import Session
from engine.frontend.streams import Stream

LOOK_SECONDS = 0.02  # between two looks whether the cores have answered
T = TypeVar("T")


class LiveRequest(NamedTuple):
    """An unfinished request. ``core_ids``: the core's ids of its sequences; ``context``: context
    variables of the task that reads it."""

    request_id: str
    core_ids: Sequence[str]
    context: contextvars.Context


class AsyncWatching:
    """Methods of ``AsyncLLMEngine`` that report what it does now."""

    _session: Session
    _live: dict[str, Stream]
    _death: EngineDeadError | None

    @property
    def num_cores(self) -> NumCores:
        """The numbers of live cores, of all cores and of deaths of cores."""
        cores = self._session.client.num_cores()
        if self._death is None:
            return cores
        # The last one has died, too.
        return cores._replace(alive=0, prefill_alive=0, deaths=cores.deaths + cores.alive)

    async def look(
        self, begin: Callable[[CoreClient, list[LiveRequest]], Callable[[], T | None]]
    ) -> T:
        """Call ``begin`` in the engine's thread between two steps, with the client of the cores and
        the unfinished requests, oldest first. Then call what it returns, also between two steps,
        until that has a result, which is returned."""

        def look() -> Callable[[], T | None]:
            outputs = self._session.outputs
            live = [
                LiveRequest(name, outputs.core_ids(name), stream.context)
                for name, stream in self._live.items()
            ]
            return begin(self._session.client, live)

        take = await self._call(look)
        while (found := await self._call(take)) is None:
            await asyncio.sleep(LOOK_SECONDS)
        result: T = found
        return result

    async def _call(self, function: Callable[[], Any]) -> Any:
        """Run ``function`` in the engine's thread between two steps. Returns its result."""
        raise NotImplementedError

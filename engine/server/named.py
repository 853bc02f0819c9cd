"""Reads bodies that name a model: the served one, or a LoRA adapter."""

from __future__ import annotations

from typing import Protocol, TypeVar

import msgspec
from starlette.requests import Request

from engine.server.adapters import ServedAdapters
from engine.server.blame import KEY as BODY
from engine.server.bodies import read
from engine.server.http.body import Bodies
from engine.server.limits import ServerLimits, check_limits
from engine.server.names import ServedNames

LATEST = ":latest"
"""What clients of Ollama add to names."""
A = TypeVar("A", bound=msgspec.Struct)


class NamesModel(Protocol):
    """The body of a request. Once it is read, ``model`` is the name of an adapter, or empty."""

    model: str


class NamedBodies:
    """Reads bodies of requests and checks which model they name."""

    def __init__(self, names: ServedNames, adapters: ServedAdapters, limits: ServerLimits) -> None:
        self._names = names
        self._adapters = adapters
        self._limits = limits
        self._bodies = Bodies(limits.max_body_bytes)

    async def read(self, request: Request, kind: type[A]) -> A:
        """The body of a request. Raises ``ApiError`` for a wrong one, or an unknown model."""
        body = await self.read_any(request, kind)
        named: NamesModel = body  # type: ignore[assignment]
        named.model = await self.adapter_of(named.model)
        return body

    async def read_any(self, request: Request, kind: type[A]) -> A:
        """The body of a request, whatever model it names. Raises ``ApiError`` for a wrong one."""
        body: A = read(await self._bodies.read(request), kind)
        request.scope[BODY] = body
        check_limits(body, self._limits)
        return body

    async def adapter_of(self, name: str | None) -> str:
        """The adapter that a request names, with the tag ``:latest`` or without, or an empty text
        for the model itself. Raises ``ApiError`` for an unknown name."""
        if name is None:
            return ""
        for spelling in dict.fromkeys((name, name.removesuffix(LATEST), name + LATEST)):
            if self._names.has(spelling):
                return ""
            if await self._adapters.has(spelling):
                return spelling
        raise self._adapters.unknown(name)

    def model_of(self, body: msgspec.Struct) -> str:
        """The name that the answer has: that of the adapter, or the model's first one."""
        named: NamesModel = body  # type: ignore[assignment]
        return named.model or self._names.first

"""Names of models with a tag: ``name:latest`` is ``name``."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.requests import Request

from engine.server.errors import ApiError
from engine.server.limits import check_limits
from engine.server.named import NamedBodies, NamesModel

LATEST = ":latest"
A = TypeVar("A", bound=msgspec.Struct)


def tagged(name: str) -> str:
    """The name with a tag, which all names have in Ollama's lists."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


class TaggedBodies(NamedBodies):
    """Reads bodies that name a model or an adapter with its tag or without."""

    async def read_named(self, request: Request, kind: type[A]) -> tuple[A, str]:
        """The body of a request, and the name in it. Raises ``ApiError``."""
        body = await self.read_any(request, kind)
        values = getattr(body, "values", None)
        if values is not None:
            check_limits(values, self._limits)
        named: NamesModel = body  # type: ignore[assignment]
        name = named.model
        named.model = await self.adapter_of(name)
        return body, name

    async def adapter_of(self, name: str | None) -> str:
        """The adapter that a name means, or an empty text for the model itself. Raises
        ``ApiError`` for an unknown name."""
        given = name or ""
        for spelling in (given.removesuffix(LATEST), tagged(given)):
            if spelling != given:
                try:
                    return await super().adapter_of(spelling)
                except ApiError:
                    continue
        return await super().adapter_of(given)

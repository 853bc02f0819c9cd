"""Names of models as Ollama's clients have them."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.requests import Request

from engine.server.limits import check_limits
from engine.server.named import LATEST, NamedBodies, NamesModel

A = TypeVar("A", bound=msgspec.Struct)


def tagged(name: str) -> str:
    """The name with a tag, which all names have in Ollama's lists."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


class TaggedBodies(NamedBodies):
    """Reads bodies of Ollama's requests."""

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

"""LoRA adapters over HTTP: an adapter is a model name; operators load and unload them."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp

from engine.async_engine import AsyncLLMEngine
from engine.config.near import did_you_mean_of_many
from engine.errors import ConfigError
from engine.messages.adapters import MAX_NAME_CHARS, AdapterInfo
from engine.server.bodies import read
from engine.server.errors import ApiError, field_error
from engine.server.http.body import Bodies
from engine.server.http.openapi import ApiRoute
from engine.server.names import ServedNames
from engine.server.operations import Operations

MAX_LISTED = 20  # names in an error


class ServedAdapters:
    """The adapters that clients may name as models, as far as this server knows. A core knows
    others: in ``adapter_dir``, or loaded by other clients."""

    def __init__(self, engine: AsyncLLMEngine, names: ServedNames) -> None:
        """names: those of the base model, which no adapter may have."""
        self._engine = engine
        self._names = names
        self._known: set[str] = set()

    async def start(self) -> None:
        """Learn which adapters are loaded. Raises ``ConfigError`` if one has a name of the base
        model."""
        for adapter in await self._all():
            if self._names.has(adapter.name):
                raise ConfigError(
                    f"the adapter {adapter.name!r:.80} has the name of the model: choose another "
                    "name in lora_modules, or set served_model_name"
                )

    async def listed(self) -> list[AdapterInfo]:
        """The loaded adapters that clients can name."""
        return [each for each in await self._all() if not self._names.has(each.name)]

    async def find(self, name: str) -> AdapterInfo | None:
        """The adapter with this name, loaded or in ``adapter_dir``; ``None`` if unknown."""
        if not self._engine.has_adapters or len(name) > MAX_NAME_CHARS:
            return None
        return await self._engine.find_adapter(name)

    async def has(self, name: str) -> bool:
        """Whether clients can name this adapter. Only the first look at a name calls the core,
        which refuses requests for an adapter that has been unloaded since."""
        if name in self._known:
            return True
        if await self.find(name) is None:
            return False
        self._known.add(name)
        return True

    def unknown(self, name: str) -> ApiError:
        """The error for a name that neither the model nor an adapter has."""
        listed = [*self._names.listed, *sorted(self._known)]
        near = did_you_mean_of_many(name, listed) if len(listed) > 1 else ""
        shown = ", ".join(listed[:MAX_LISTED]) + (" ..." if len(listed) > MAX_LISTED else "")
        return ApiError(
            404,
            f"model is {name!r:.80}, must be one of: {shown}{near}",
            param="model",
            code="model_not_found",
        )

    async def load(self, name: str, path: str, *, replaces: bool) -> AdapterInfo:
        """Load an adapter on all cores, or on none. Raises ``ApiError``."""
        if self._names.has(name):
            raise field_error("lora_name", f"is {name!r:.80}, which is a name of the base model")
        adapter = await self._engine.load_adapter(name, path, replaces=replaces)
        self._known.add(name)
        return adapter

    async def unload(self, name: str) -> None:
        """Unload an adapter. Raises ``ApiError`` for an unknown one."""
        is_there = await self._engine.remove_lora(name)
        self._known.discard(name)
        if not is_there:
            error = self.unknown(name)
            error.param = "lora_name"
            raise error

    async def _all(self) -> list[AdapterInfo]:
        adapters = await self._engine.lora_adapters() if self._engine.has_adapters else []
        self._known = {adapter.name for adapter in adapters}
        return adapters


class LoadRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/v1/load_lora_adapter``."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/v1/unload_lora_adapter``."""

    lora_name: str
    lora_int_id: int | None = None  # vLLM's; the name says it all


class AdapterRoutes:
    """The routes by which operators load and unload adapters."""

    def __init__(self, adapters: ServedAdapters, max_body_bytes: int) -> None:
        self._adapters = adapters
        self._bodies = Bodies(max_body_bytes)

    def routes(self, operations: Operations) -> list[ApiRoute]:
        admin = operations.for_admin
        return [
            ApiRoute("POST", "/v1/load_lora_adapter", admin(self.load), LoadRequest, None),
            ApiRoute(
                *("POST", "/v1/unload_lora_adapter", admin(self.unload), UnloadRequest, None),
                [404],
            ),
        ]

    async def load(self, request: Request) -> ASGIApp:
        """Load a LoRA adapter, whose name is then a model name."""
        body = read(await self._bodies.read(request), LoadRequest)
        await self._adapters.load(body.lora_name, body.lora_path, replaces=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: Request) -> ASGIApp:
        """Unload a LoRA adapter. Its requests end with it; new ones are refused."""
        body = read(await self._bodies.read(request), UnloadRequest)
        await self._adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

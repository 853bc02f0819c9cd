"""LoRA adapters of an engine for asyncio tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from engine.frontend.adapters import POLL_SECONDS, AdapterLoad
from engine.frontend.session import Session
from engine.messages.adapters import AdapterInfo, LoRARequest


class AsyncAdapters:
    """The methods of ``AsyncLLMEngine`` that load, list and unload adapters."""

    _session: Session

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter, on all cores or on none. Returns False if it is loaded already.

        Raises ``RequestError`` for a name or number that another adapter has, and ``ConfigError``
        with the reason if the adapter cannot be used."""
        make = partial(self._session.adapters.loading, lora_request)
        return await self._load_adapter(make) is not None

    async def load_adapter(self, name: str, path: str, *, replaces: bool = False) -> AdapterInfo:
        """Load a LoRA adapter under a number that the cores choose. The path must be in
        ``adapter_dir``, if that is set. Raises as ``add_lora`` does."""
        self._session.adapters.check_enabled()
        load = AdapterLoad(self._session.client, name, path, replaces=replaces, is_confined=True)
        return await self._run_load(load)

    async def remove_lora(self, lora_id: int | str) -> bool:
        """Unload a LoRA adapter by its ``lora_int_id`` or name. Its requests end with it, new ones
        are refused. Returns False for an unknown one."""
        return await self._call(partial(self._session.adapters.remove, lora_id)) is not None

    async def list_loras(self) -> set[int]:
        """The ``lora_int_id`` of each loaded adapter."""
        return {adapter.number for adapter in await self.lora_adapters()}

    async def lora_adapters(self) -> list[AdapterInfo]:
        """The loaded adapters: names, numbers, paths, digests and sizes."""
        adapters: list[AdapterInfo] = await self._call(self._session.adapters.all)
        return adapters

    async def find_adapter(self, name: str) -> AdapterInfo | None:
        """The adapter with this name, loaded or in ``adapter_dir``; ``None`` if unknown."""
        adapter: AdapterInfo | None = await self._call(partial(self._session.adapters.find, name))
        return adapter

    async def pin_lora(self, lora_id: int | str) -> bool:
        """Keep an adapter in memory and in its slot until it is removed. Returns False for an
        unknown one. Raises ``ConfigError`` for more than ``max_loras`` - 1 of them."""
        return bool(await self._call(partial(self._session.adapters.pin, lora_id)))

    @property
    def has_adapters(self) -> bool:
        """Whether requests may use LoRA adapters (``enable_lora``)."""
        return self._session.adapters.is_enabled

    async def _load_adapter(self, make: Callable[[], AdapterLoad | None]) -> AdapterInfo | None:
        """Load an adapter while other requests go on, and return it; ``None`` if there is nothing
        to load. ``make`` is called in the engine's thread."""
        load: AdapterLoad | None = await self._call(make)
        return None if load is None else await self._run_load(load)

    async def _run_load(self, load: AdapterLoad) -> AdapterInfo:
        try:
            await self._call(load.begin)
            while True:
                loaded: AdapterInfo | None = await self._call(load.poll)
                if loaded is not None:
                    return loaded
                await asyncio.sleep(POLL_SECONDS)
        except asyncio.CancelledError:
            self._post(load.cancel)
            raise

    async def _call(self, function: Callable[[], Any]) -> Any:
        """Run ``function`` in the engine's thread between two steps. Returns its result."""
        raise NotImplementedError

    def _post(self, command: Callable[[], None]) -> None:
        """Run a command in the engine's thread, without waiting for it."""
        raise NotImplementedError

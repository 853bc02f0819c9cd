"""Loads LoRA adapters on the cores of a client, and describes those that are loaded."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from engine.core.client import CoreClient
from engine.errors import ConfigError, EngineDeadError, EngineError, RequestError
from engine.messages.adapters import AdapterInfo, LoRARequest

POLL_SECONDS = 0.003  # between two looks at an adapter that is being read
CALL_PREFIX = "Call to {} method failed: "  # before the reason, in errors of utilities
FEW_BYTES = 4096  # of a call, without the files of an adapter


class AdapterLoad:
    """The loading of one adapter: on all cores, or on none.

    All cores read and check its files first; then all give it its name. Call ``begin``, then
    ``poll`` until it returns the adapter; if you stop before, call ``cancel``."""

    def __init__(
        self,
        client: CoreClient,
        name: str,
        path: str,
        *,
        number: int = 0,
        replaces: bool = False,
        files: dict[str, bytes] | None = None,
        is_confined: bool = False,
    ) -> None:
        """number: the ``lora_int_id``; 0: the cores choose one. is_confined: the path must be in
        ``adapter_dir``, if the cores have one."""
        self._client = client
        self._name = name
        self._number = number
        self._path = path
        self._files = files
        self._ticket = secrets.token_hex(8)
        self._arguments = (name, number, path, replaces, files, is_confined)

    def begin(self) -> None:
        """Start to read the files. Raises ``RequestError`` for a name or number that is taken, and
        ``ConfigError`` for a path that is not allowed."""
        with self._cancelling():
            call(self._client, "read_adapter", self._ticket, *self._arguments)

    def poll(self) -> AdapterInfo | None:
        """The adapter, once it is loaded; ``None`` before. Raises ``ConfigError`` with the reason
        why it cannot be used."""
        with self._cancelling():
            digest = call(self._client, "adapter_state", self._ticket)
            if digest is None:
                return None
            own = (self._name, self._number, self._path, digest, self._files)
            loaded = call(self._client, "put_adapter", self._ticket, *own)
        return msgspec.convert(loaded, AdapterInfo)

    def cancel(self) -> None:
        """Forget what was read."""
        with suppress(EngineError):
            self._client.call("cancel_adapter", self._ticket)

    @contextmanager
    def _cancelling(self) -> Iterator[None]:
        try:
            yield
        except EngineDeadError:
            raise
        except BaseException:
            self.cancel()
            raise


class Adapters:
    """The LoRA adapters of a client's cores. Only the thread of the client may use it."""

    def __init__(self, client: CoreClient) -> None:
        self._client = client
        self._from_memory: dict[str, Mapping[str, Any]] = {}  # tensors by name

    def loading(self, request: LoRARequest) -> AdapterLoad | None:
        """What loads an adapter; ``None`` if exactly this one is loaded. Raises ``RequestError``
        for tensors that are too large to be sent to a core in another process."""
        self.check_enabled()
        if not isinstance(request, LoRARequest):
            raise RequestError(
                f"lora_request is {request!r:.80}, must be a LoRARequest", param="lora_request"
            )
        known = self.find(request.lora_name)
        if known is not None and not known.digest:  # it is in the directory, and not loaded
            known = None
        if known is not None and not request.load_inplace and self._is_same(known, request):
            return None
        files = None if request.tensors is None else self._files_of(request)
        if request.tensors is not None:
            self._from_memory[request.lora_name] = request.tensors
        return AdapterLoad(
            self._client,
            request.lora_name,
            request.lora_path,
            number=request.lora_int_id,
            replaces=request.load_inplace,
            files=files,
        )

    def needed_for(self, request: LoRARequest | None) -> AdapterLoad | None:
        """What must be loaded before a request can name its adapter: one from memory. Others are
        loaded by the cores when requests need them."""
        if not isinstance(request, LoRARequest) or request.tensors is None:
            return None
        return self.loading(request)

    def remove(self, which: int | str) -> AdapterInfo | None:
        """Unload an adapter by number or name. Running requests end with it, new ones are refused.
        Returns it; ``None`` for an unknown one."""
        name = self._name_of(which)
        removed = None if name is None else call(self._client, "remove_adapter", name)
        return None if removed is None else msgspec.convert(removed, AdapterInfo)

    def pin(self, which: int | str) -> bool:
        """Keep an adapter in memory until it is removed. Returns False for an unknown one. Raises
        ``ConfigError`` if too many are pinned."""
        name = self._name_of(which)
        return name is not None and bool(call(self._client, "pin_adapter", name))

    def find(self, name: str) -> AdapterInfo | None:
        """The adapter with this name: loaded, or in ``adapter_dir``."""
        found = call(self._client, "find_adapter", name)
        return None if found is None else msgspec.convert(found, AdapterInfo)

    def all(self) -> list[AdapterInfo]:
        """The loaded adapters, in the order of their numbers."""
        if not self.is_enabled:
            return []
        return msgspec.convert(call(self._client, "adapters"), list[AdapterInfo])

    @property
    def is_enabled(self) -> bool:
        return "adapters" in self._client.decided.capabilities

    def check_enabled(self) -> None:
        """Raise ``ConfigError`` if the cores take no adapters."""
        if not self.is_enabled:
            raise ConfigError("LoRA adapters are off: start the engine with enable_lora=True")

    def _name_of(self, which: int | str) -> str | None:
        """The name of an adapter. Cores may have chosen different numbers for those that they have
        found in ``adapter_dir``."""
        self.check_enabled()
        if isinstance(which, str):
            return which
        return next((each.name for each in self.all() if each.number == which), None)

    def _is_same(self, known: AdapterInfo, request: LoRARequest) -> bool:
        if request.tensors is not None:
            return not known.path and self._from_memory.get(known.name) is request.tensors
        same_path = request.lora_path in ("", known.path)
        return same_path and known.number == request.lora_int_id

    def _files_of(self, request: LoRARequest) -> dict[str, bytes]:
        """The files that an adapter from memory would have."""
        from safetensors.torch import save  # torch is loaded only for adapters from memory

        assert request.tensors is not None and request.config is not None
        try:
            tensors = {
                name: tensor.detach().cpu().contiguous().clone()
                for name, tensor in request.tensors.items()
            }
            files = {
                "adapter_config.json": json.dumps(dict(request.config), default=list).encode(),
                "adapter_model.safetensors": save(tensors),
            }
        except (AttributeError, TypeError, ValueError) as error:
            raise RequestError(
                f"tensors and config of adapter {request.lora_name!r:.80} cannot be used: {error}; "
                "give torch tensors by name, and the contents of adapter_config.json",
                param="tensors",
            ) from error
        num_bytes = sum(map(len, files.values())) + FEW_BYTES
        limit = self._client.max_call_bytes
        if limit is not None and num_bytes > limit:
            raise RequestError(
                f"adapter {request.lora_name!r:.80} has {num_bytes} bytes, but a core in another "
                f"process takes at most {limit} from memory: save it to a directory on the core's "
                "machine and give lora_path, or run the core in this process",
                param="tensors",
            )
        return files


def call(client: CoreClient, name: str, *args: Any) -> Any:
    """Call a utility of the cores. Its errors have the reason only, without the utility's name."""
    try:
        return client.call(name, *args)
    except EngineDeadError:
        raise
    except EngineError as error:
        reason = str(error).removeprefix(CALL_PREFIX.format(name))
        raise type(error)(reason) from error

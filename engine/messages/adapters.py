"""LoRA adapters as users name them, as requests name them, and as a core reports them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.errors import RequestError, RequestTypeError

MAX_NAME_CHARS = 256
MAX_NUMBER = 2**31 - 1


@dataclass(frozen=True, eq=False)
class LoRARequest:
    """A LoRA adapter to run requests with: a directory on the core's machine or a repository on the
    hub, or tensors in memory.

    The adapter is loaded when it is first used, and later requests may give its name only. Raises
    ``RequestError`` or ``RequestTypeError`` for fields that no adapter can have."""

    lora_name: str
    """The name under which the adapter is served."""
    lora_int_id: int
    """A number of at least 1 that no other adapter has."""
    lora_path: str = ""
    """Directory with ``adapter_config.json`` and its weights, in the layout of peft."""
    load_inplace: bool = False
    """Read the files again, even if an adapter with this name is loaded. It then takes the place
    of that one; requests that run go on with the adapter that they began with."""
    tensors: Mapping[str, Any] | None = field(default=None, repr=False)
    """The weights by their names in an adapter's file, in place of ``lora_path``."""
    config: Mapping[str, Any] | None = field(default=None, repr=False)
    """The contents of ``adapter_config.json``, together with ``tensors``."""

    def __post_init__(self) -> None:
        kinds = (
            ("lora_name", str, "a str"),
            ("lora_int_id", int, "a whole number"),
            ("lora_path", str, "a str"),
            ("load_inplace", bool, "True or False"),
        )
        for name, kind, wanted in kinds:
            value = getattr(self, name)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise RequestTypeError(f"{name} is {value!r:.80}, must be {wanted}", param=name)
        check_name(self.lora_name)
        if not 1 <= self.lora_int_id <= MAX_NUMBER:
            raise RequestError(
                f"lora_int_id is {self.lora_int_id}, must be in 1..{MAX_NUMBER}",
                param="lora_int_id",
            )
        if (self.tensors is None) != (self.config is None):
            raise RequestError(
                "tensors and config belong together: give both, or lora_path", param="tensors"
            )
        if self.tensors is not None and self.lora_path:
            raise RequestError(
                f"lora_path is {self.lora_path!r:.200} and tensors are given: give only one",
                param="lora_path",
            )


def check_name(name: str) -> None:
    """Raise ``RequestError`` for a name that no adapter may have."""
    if not name.strip() or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise RequestError(
            f"lora_name is {name!r:.80}, must have 1 to {MAX_NAME_CHARS} printable characters",
            param="lora_name",
        )


class AdapterSource(msgspec.Struct, array_like=True, frozen=True):
    """Where a core finds an adapter that it may not have loaded yet."""

    path: str = ""  # directory on the core's machine, or a repository; "": the name is known there
    number: int = 0  # the user's ``lora_int_id``; 0: the core chooses one
    replaces: bool = False  # read it again, even if an adapter with this name is loaded


class AdapterInfo(msgspec.Struct, frozen=True):
    """An adapter that a core has loaded or, if its digest is empty, would load when it is used."""

    name: str
    number: int
    path: str  # "" for one from memory
    digest: str  # of its content
    rank: int
    num_bytes: int
    is_pinned: bool = False

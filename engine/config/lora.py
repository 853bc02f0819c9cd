"""LoRA options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from engine.config.check import check_range, check_types
from engine.config.option import SEVERAL
from engine.errors import ConfigError

MAX_SLOTS = 4096
EXAMPLE = "sql=adapters/sql"


class LoRAModule(NamedTuple):
    """An adapter that is loaded at the start."""

    name: str
    path: str


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """LoRA adapters: how many, how large, which are served from the start."""

    enable_lora: bool = False
    """Let requests use LoRA adapters of the model."""
    max_loras: int = 8
    """Different adapters among the requests that run at the same time. An adapter takes the memory
    of its own rank; on a GPU there is memory for all if their ranks are at most 32."""
    max_lora_rank: int = 256
    """Largest rank of an adapter. On a CPU it is only a limit; on a GPU memory is kept for one
    adapter of this rank."""
    max_cpu_loras: int | None = None
    """Adapters in the host's memory, at least max_loras; the least recently used is dropped, and
    read again when it is needed. Default: as many as fit into an eighth of the memory."""
    lora_modules: list[Any] | tuple[Any, ...] = field(default=(), metadata=SEVERAL)
    """Adapters to load at the start, each as NAME=PATH or as JSON, {"name": ..., "path": ...}."""
    adapter_dir: str | Path | None = None
    """Directory on the core's machine whose subdirectories are adapters: a request that names one
    loads it. Adapters loaded over HTTP must be there, too."""

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, 1, MAX_SLOTS, "max_loras")
        check_range(self, 1, None, "max_lora_rank")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras is {self.max_cpu_loras}, must be at least {self.max_loras} "
                "(max_loras): adapters in use are in the host's memory, too"
            )
        modules = self.modules
        for name, given in (("lora_modules", bool(modules)), ("adapter_dir", self.adapter_dir)):
            if given and not self.enable_lora:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r:.80} and enable_lora is False: set "
                    f"enable_lora (--enable-lora), or leave {name} out"
                )

    @property
    def modules(self) -> tuple[LoRAModule, ...]:
        """The adapters in ``lora_modules``. Raises ``ConfigError`` for an invalid entry, or a name
        that is given twice."""
        modules = tuple(module for entry in self.lora_modules for module in _modules_in(entry))
        names = [module.name for module in modules]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"lora_modules has {name!r:.80} twice: give each name once")
        return modules


def _modules_in(entry: Any) -> list[LoRAModule]:
    """The adapters that one entry of ``lora_modules`` names."""
    if isinstance(entry, LoRAModule):
        return [entry]
    value = entry
    if isinstance(entry, str) and entry.lstrip().startswith(("{", "[")):
        try:
            value = json.loads(entry)
        except json.JSONDecodeError as error:
            raise ConfigError(f"lora_modules has {entry!r:.200}, which is not JSON: {error}") from (
                error
            )
    elif isinstance(entry, str):
        given = entry.partition("=")
        value = {"name": given[0], "path": given[2]}
    if isinstance(value, list):
        return [module for each in value for module in _modules_in(each)]
    name = value.get("name") if isinstance(value, Mapping) else None
    path = value.get("path") if isinstance(value, Mapping) else None
    if not (isinstance(name, str) and name.strip() and isinstance(path, str | Path) and str(path)):
        raise ConfigError(
            f"lora_modules has {entry!r:.200}, must be NAME=PATH, e.g. {EXAMPLE}, or JSON with "
            '"name" and "path"'
        )
    return [LoRAModule(name.strip(), str(path))]

"""Adds the two halves of LoRA to an engine core that is built."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from engine.config.engine import EngineConfig
from engine.config.lora import LoRAConfig
from engine.lora.decide import AdapterSlots
from engine.lora.library import AdapterLibrary
from engine.lora.loading import ThreadedReader
from engine.lora.store import AdapterStore
from engine.sched.plugins.find import Chosen
from engine.sched.resource import Resource

if TYPE_CHECKING:
    from engine.lora.compute import Adapters
    from engine.worker.feature import Feature

HOST_SHARE = 0.125  # of the machine's memory, for adapters


def adapter_halves(config: EngineConfig) -> tuple[AdapterSlots | None, list[Feature]]:
    """Make the scheduler's and the worker's half of LoRA; ``None`` and [] without
    ``enable_lora``."""
    options = config.lora
    if not options.enable_lora:
        return None, []
    store: AdapterStore[Any] = AdapterStore(options.max_cpu_loras, most_bytes())
    computing, reader = computing_half(config, store, str(config.model.model))
    library = AdapterLibrary(
        reader,
        store,
        most_pinned=options.max_loras - 1,
        directory=None if options.adapter_dir is None else str(options.adapter_dir),
        waits=config.step_log is not None,
    )
    return AdapterSlots(options.max_loras, library, computing.fits), [computing]


def adapters_of_rank(config: EngineConfig) -> list[Feature]:
    """Make the worker's half of LoRA for a further rank, which keeps what rank 0 orders; [] without
    ``enable_lora``."""
    if not config.lora.enable_lora:
        return []
    from engine.lora.kept import KeptAdapters

    store: AdapterStore[Any] = AdapterStore()
    computing, reader = computing_half(config, store)
    return [computing, KeptAdapters(reader, store)]


def computing_half(
    config: EngineConfig, store: AdapterStore[Any], model_name: str = ""
) -> tuple[Adapters, ThreadedReader]:
    """Make the worker's half of LoRA, and what reads adapters for it. model_name: to warn of
    adapters of other models."""
    from engine.lora.compute import Adapters
    from engine.lora.files import Limits
    from engine.lora.reading import read_order

    options, cache = config.lora, config.model.download_dir
    limits = Limits(options.max_lora_rank, most_bytes())
    computing = Adapters(options.max_loras, store, options.max_lora_rank, model_name=model_name)
    return computing, ThreadedReader(
        lambda order: computing.prepared(read_order(order, limits, cache))
    )


def most_bytes() -> int:
    """Bytes of the machine's memory that adapters may take."""
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * HOST_SHARE)


def with_adapters(chosen: Chosen, adapters: AdapterSlots | None) -> Chosen:
    """Add the resource for LoRA adapters, if there is one: as the first, so that no request holds
    KV blocks before the content of its adapter, and with it their hashes, are known."""
    if adapters is None:
        return chosen
    return chosen._replace(resources=(adapters, *chosen.resources))


def with_recorded_adapters(chosen: Chosen, max_loras: int) -> Chosen:
    """Add the resource for LoRA adapters, all of which are there: for a replay of a step log.
    ``max_loras``: 0 if the recorded core took no adapters."""
    has_own = any(isinstance(resource, AdapterSlots) for resource in chosen.resources)
    if has_own or not max_loras:
        return chosen
    return with_adapters(chosen, AdapterSlots(max_loras))


def load_modules(options: LoRAConfig, adapters: AdapterSlots | None) -> None:
    """Load the adapters of ``lora_modules``. Raises ``ConfigError`` if one cannot be used."""
    if adapters is not None and adapters.library is not None:
        for module in options.modules:
            adapters.library.load(module.name, module.path)


def adapter_names(resources: Sequence[Resource]) -> Callable[[str], str]:
    """A function that returns the name of an adapter, given its digest."""
    for each in resources:
        if isinstance(each, AdapterSlots) and each.library is not None:
            return each.library.name_of
    return str

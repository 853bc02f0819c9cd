"""Adapters: the worker's half of LoRA. Loads adapters into slots, and tells the model's layers
which rows of a step use which slot."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial

import numpy as np

from engine.layers.adapted_linear import StepAdapters
from engine.layers.batch import ForwardBatch
from engine.layers.linear import is_cpu
from engine.lora.adapter import Adapter, is_other_model
from engine.lora.device_slots import DeviceSlots, check
from engine.lora.parts import part_of
from engine.lora.placing import HEAD, Places, place
from engine.lora.products import AdapterProducts, products_of
from engine.lora.store import AdapterStore
from engine.messages.step import NO_ADAPTER, StepPlan
from engine.models.decoder import NativeDecoder
from engine.worker.batches import PlanRows, Staged
from engine.worker.feature import Feature, Machine
from engine.worker.platform import Platform
from engine.worker.slots import LiveSeqs
from kernels.cpu.low_rank import prepare
from kernels.cpu.threads import num_threads
from kernels.low_rank import AdaptedRows, DeviceRows

logger = logging.getLogger("engine.lora")

WITH_ADAPTERS = "adapters"
WITH_OUTPUT = "adapters of the output layer"  # on a CPU; recordings of a GPU serve these, too
WITH_TABLES = "adapters of tables"  # which are not recorded


class Adapters(Feature):
    """Adds the products of each row's adapter to the outputs of linear layers.

    The layers read slots and products from fixed memory, so that steps with adapters are recorded
    as others are. Steps without adapters have recordings of their own, which are those of an engine
    without LoRA."""

    part = "adapters"
    waits_for_part = True
    device_attributes = ("_model", "_step", "_device", "_loaded")
    variants = (WITH_ADAPTERS,)  # that can be recorded

    def __init__(
        self,
        max_loras: int,
        store: AdapterStore[AdapterProducts],
        max_rank: int = 64,
        *,
        model_name: str = "",
    ) -> None:
        """store: has the adapters that plans load, by their digests; max_rank: of an adapter;
        model_name: as the user gave it, to warn of adapters that were trained on another model."""
        self._model_name = model_name
        self._max_loras, self._max_rank = max_loras, max_rank
        self._store = store
        self._model: NativeDecoder
        self._platform: Platform
        self._step: StepAdapters
        self._device: DeviceSlots | None = None  # on a GPU
        self._loaded: dict[int, AdapterProducts] = {}  # by adapter slot
        self._slots = np.zeros(0, dtype=np.int32)  # adapter slot by slot of a sequence
        self._with_tables: set[int] = set()  # adapter slots
        self._with_output: set[int] = set()
        self._num_users = 0  # sequences with an adapter

    def attach(self, machine: Machine) -> None:
        model, platform = machine.model, machine.platform
        assert isinstance(model, NativeDecoder), "load_model() refuses other models"
        self._model, self._platform = model, platform
        self._slots = np.full(len(machine.live.num_sent), NO_ADAPTER, dtype=np.int32)
        on_cpu, most_tokens = is_cpu(platform.device), machine.batches.max_num_tokens
        rows = partial(DeviceRows, zeros=platform.zeros, upload=platform.upload)
        self._step = StepAdapters(most_tokens, AdaptedRows if on_cpu else rows)
        model.adapted.attach(self._max_loras, self._step, most_tokens)
        if on_cpu:
            prepare(model.dtype)
        else:
            sizes = (self._max_loras, self._max_rank)
            layers = model.adapted.linears
            self._device = DeviceSlots(layers, model.spec, *sizes, platform, model.dtype.itemsize)

    def prepared(self, adapter: Adapter) -> AdapterProducts:
        """Place an adapter on the model and convert it. Any thread may call this after ``attach``.
        Raises ``AdapterError`` for an adapter that does not fit."""
        model, platform = self._model, self._platform
        placed = part_of(place(adapter, self._places), model.mine)
        if is_other_model(adapter.base, self._model_name):
            logger.warning(
                "Adapter %r names its base model %s, and the model here is named %s: if these are "
                "different models, its answers may be wrong (only the names were compared)",
                *(adapter.name, adapter.base, self._model_name),
            )
        if self._device is None:
            return products_of(placed, model.adapted, model.dtype)
        check(placed, model.adapted.linears)
        with platform.current(), platform.aside():
            found = products_of(placed, model.adapted, model.dtype, platform.device)
            packed = self._device.pack(found.linears)
        num_bytes = packed.num_bytes
        share = num_bytes / self._device.num_bytes
        return replace(
            found, num_bytes=num_bytes, share=share, linears={}, records={}, packed=packed
        )

    def fits(self, digests: Collection[str]) -> bool:
        """True if adapters fit into the memory of each rank's device together. They must be in the
        store, or in slots."""
        if self._device is None:
            return True
        in_slots = {one.digest: one for one in self._loaded.values()}
        copies = (in_slots.get(one) or self._store.copy_of(one) for one in digests)
        return sum(copy.share for copy in copies) <= 1.0

    def begin(self, plan: StepPlan, live: LiveSeqs) -> Mapping[int, str] | None:
        if not (plan.freed_slots and self._num_users) and plan.adapters is None:
            return None
        before = self._in_use()
        self._slots[plan.freed_slots] = NO_ADAPTER
        if self._device is not None:
            for slot in before - self._in_use():
                self._device.rest(slot)
        reasons = None
        if plan.adapters is not None:
            for slot, digest in plan.adapters.load.items():
                self._load(slot, self._store.take(digest))
            for seq, slot in plan.adapters.used_by.items():
                self._slots[seq] = slot
            reasons = self._bring(plan.adapters.used_by)
        self._num_users = int(np.count_nonzero(self._slots != NO_ADAPTER))
        return reasons

    def variant(self, rows: PlanRows) -> str:
        if not self._num_users or (self._slots[rows.slots] == NO_ADAPTER).all():
            return ""
        if self.touches(rows):
            return WITH_TABLES
        return WITH_OUTPUT if self._have(rows, self._with_output) else WITH_ADAPTERS

    def touches(self, rows: PlanRows) -> bool:
        """True if the adapter of a row changes the embedding, or replaces the output layer."""
        return self._have(rows, self._with_tables)

    def pose(self, variant: str) -> None:
        if variant:
            self._step.fill(self._slots[:0], None, 1)
        else:
            self._step.clear()

    def fill(self, staged: Staged) -> None:
        if not staged.variant:
            self._step.clear()
            return
        slots = self._slots[staged.tokens.slots]
        changes_output = self._device is not None or staged.variant != WITH_ADAPTERS
        self._step.fill(slots, staged.wanted, num_threads(), changes_output=changes_output)

    def profile(self, batch: ForwardBatch) -> None:
        if self._device is not None:  # whose kernels are compiled, and need memory for their sums
            self.pose(WITH_ADAPTERS)

    def alone(self, slot: int, num_rows: int) -> AbstractContextManager[None]:
        return self._step.only(int(self._slots[slot]), num_rows)

    # -- helpers

    def _have(self, rows: PlanRows, slots: set[int]) -> bool:
        """True if one of these rows uses one of these adapter slots."""
        return bool(slots) and bool(np.isin(self._slots[rows.slots], list(slots)).any())

    @cached_property
    def _places(self) -> Places:
        return Places(self._model.mine.whole)

    def _in_use(self) -> set[int]:
        """Adapter slots that sequences use."""
        return set(self._slots.tolist()) - {NO_ADAPTER}

    def _bring(self, used_by: Mapping[int, int]) -> dict[int, str]:
        """Copy the adapters of sequences to the GPU. Returns why some cannot be there, by the slots
        of their sequences."""
        if self._device is None:
            return {}
        in_use = self._in_use()
        found = {
            seq: self._device.bring(slot, in_use)
            for seq, slot in used_by.items()
            if slot != NO_ADAPTER
        }
        return {seq: why for seq, why in found.items() if why}

    def _load(self, slot: int, adapter: AdapterProducts) -> None:
        """Write the addresses of an adapter's products into the layers' tables, in place of those
        of the adapter that was in the slot."""
        if self._device is not None:
            assert adapter.packed is not None
            self._device.put(slot, adapter.packed)
            self._loaded[slot] = adapter
            return
        layers, before = self._model.adapted, self._loaded.get(slot)
        for target in () if before is None else before.linears.keys() - adapter.linears.keys():
            layers.linears[target].put(slot, ())
        for rows in layers.experts.values():
            rows.users.discard(slot)
        for target, products in adapter.linears.items():
            layers.linears[target].put(slot, products, adapter.records.get(target))
            if (experts := layers.experts_of(target)) is not None:
                experts.users.add(slot)
        self._load_ends(slot, adapter)
        self._loaded[slot] = adapter

    def _load_ends(self, slot: int, adapter: AdapterProducts) -> None:
        """Load the parts for the embedding and the output layer, as far as a stage has them."""
        layers = self._model.adapted
        if layers.table is not None:
            layers.table.put(slot, adapter.embedding)
        if HEAD in layers.linears:
            layers.linears[HEAD].replace(slot, adapter.head)
        for slots in (self._with_tables, self._with_output):
            slots.discard(slot)
        if HEAD in adapter.linears:
            self._with_output.add(slot)
        if adapter.embedding is not None or adapter.head is not None:
            self._with_tables.add(slot)

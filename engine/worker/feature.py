"""What the worker runs (``Machine``), and how a feature takes part in it (``Feature``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from engine.layers.batch import ForwardBatch, Hidden
from engine.messages.step import StepPlan, StepResult
from engine.models.model import Model
from engine.sample.sampler import Sampler
from engine.worker.batches import Batches, PlanRows
from engine.worker.platform import Platform
from engine.worker.slots import LiveSeqs, Slots
from kernels.cpu.recording import Recorder


class Machine(NamedTuple):
    """A model on a device, and the owners of all state that a step needs."""

    model: Model
    kv: list[torch.Tensor]
    platform: Platform
    live: LiveSeqs  # host table of what the scheduler sent
    slots: Slots  # tokens, lengths, block tables, parameters, on the device
    sampler: Sampler  # what requests do to their logits
    batches: Batches  # the step that is being sent
    features: tuple[Feature, ...] = ()
    recorder: Recorder | None = None  # of steps on a CPU


class Feature:
    """Adapters, media, KV from elsewhere: what they do to a step. Only ``part`` must be
    set, every hook has a default; a step that is run again in halves is extended again."""

    part = ""  # name of the plan's field that it reads (``engine.messages.step.CAPABILITIES``)
    aux_layers: tuple[int, ...] = ()  # layers whose outputs ``drawn`` reads

    @property
    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """Methods that clients may call by name, such as loading an adapter."""
        return {}

    def attach(self, machine: Machine) -> None:
        """The model is loaded, memory for KV not yet measured: load what is yours.

        ``machine.kv`` is empty until it is allocated. Raises ``ConfigError``.
        """

    def block_bytes(self, block_size: int) -> int:
        """Bytes that it keeps of each KV block, next to the model's."""
        return 0

    @property
    def own_bytes(self) -> int:
        """Bytes that it keeps of KV next to the pool."""
        return 0

    def allocate(self, num_blocks: int) -> None:
        """Take memory for what it keeps of this many KV blocks; what it had is forgotten."""

    def profile_run(self, num_tokens: int, num_seqs: int) -> None:
        """A step of this many made-up tokens was computed: compute what would follow it, so that
        its memory is measured."""

    def capture(self, sizes: Sequence[int], mixed_sizes: Sequence[int]) -> None:
        """Steps are being recorded, of this many rows and of this many tokens: record what
        follows."""

    def begin(self, plan: StepPlan, live: LiveSeqs) -> Mapping[int, str] | None:
        """A plan has arrived, maybe without rows: its part is ``getattr(plan, self.part)``.

        Returns the slots whose requests it cannot compute, with the reason: these requests fail
        alone. If it raises, all rows of the step fail.
        """
        return None

    def touches(self, rows: PlanRows) -> bool:
        """True if ``extend`` changes anything for these rows; no graph then computes them."""
        return False

    def extend(self, batch: ForwardBatch, rows: PlanRows) -> None:
        """Add vectors or positions to the forward pass of these rows."""

    def profile(self, batch: ForwardBatch) -> None:
        """Do what ``extend`` does, for the largest possible step of made-up rows, to measure its
        memory."""

    def follow(self, rows: PlanRows) -> None:
        """These rows are drawn, and the slots advanced, in any step. If it raises, that is logged
        and the step goes on."""

    def drawn(self, rows: PlanRows, hidden: Hidden, tokens: torch.Tensor) -> None:
        """These rows are computed and drawn, in a step that no graph computed.

        ``hidden``: what the model gave, with the outputs of all features' ``aux_layers`` in order.
        ``tokens``: [R] int32 on the device, a row for each place where one was drawn; negative
        where none stands. What is queued here is done before the next step is launched, which may
        overwrite ``hidden``.
        """

    def report(self, result: StepResult) -> None:
        """A step is collected: add results for the scheduler's half."""

    def shutdown(self) -> None:
        """Close what was opened."""

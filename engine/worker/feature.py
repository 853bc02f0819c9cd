"""The worker's parts (``Machine``), and the hooks of a feature in a step (``Feature``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from engine.layers.batch import ForwardBatch, Hidden
from engine.messages.step import StepPlan, StepResult
from engine.models.model import LayerCaches, Model
from engine.sample.sampler import Sampler
from engine.worker.batches import Batches, PlanRows, Staged
from engine.worker.platform import Platform
from engine.worker.slots import LiveSeqs, Slots
from engine.worker.states import States
from kernels.cpu.recording import Recorder


class Entering(Protocol):
    """The hidden states with which the layers of a later stage of a pipeline begin."""

    def of(self, rows: PlanRows, num_tokens: int) -> torch.Tensor:
        """Hidden states [num_tokens, H] of rows of the step, then of padding."""
        ...


class Machine(NamedTuple):
    """A loaded model on a device, and the objects that own the state of a step."""

    model: Model
    kv: LayerCaches
    platform: Platform
    live: LiveSeqs  # host table of what the scheduler sent
    slots: Slots  # tokens, lengths, block tables, parameters, on the device
    sampler: Sampler
    batches: Batches  # builds the model's inputs
    features: tuple[Feature, ...] = ()
    recorder: Recorder | None = None  # of steps on a CPU
    states: States = ()  # recurrent states by slot; () for a model without them
    entering: Entering | None = None  # None: the layers begin with embeddings

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The logits [R, W] float32 that the sampler reads, of hidden states [R, H]."""
        return (self.sampler.vocabulary.part_logits or self.model.logits)(hidden, out)

    @property
    def wants_largest_only(self) -> bool:
        """True if the sampler needs only the largest logits, and the model finds them alone."""
        return self.sampler.wants_largest_only and self.model.has_largest


class Feature:
    """Base class of extensions of the model's computation: adapters, media, KV from stores. Only
    ``part`` must be set; every hook has a default. The rows of a failed step are tried again in
    halves, so ``extend`` may be called again for them."""

    part = ""  # field of the plan that it reads (``engine.messages.step.CAPABILITIES``)
    aux_layers: tuple[int, ...] = ()  # layers whose outputs ``drawn`` reads
    waits_for_part = False  # does nothing in a step without its part of the plan and new blocks
    variants: tuple[str, ...] = ()  # all that ``variant`` may return, without ""
    device_attributes: tuple[str, ...] = ()  # that hold the model or memory of the device
    reads_first_group = False  # uses the first KV group's blocks, which must keep all tokens

    @property
    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """Methods that clients may call by name, such as loading an adapter."""
        return {}

    def is_needed_by(self, model: Model) -> bool:
        """False if a model has no use for the feature, which is then left out."""
        return True

    def attach(self, machine: Machine) -> None:
        """Load the feature's own weights. Called after the model is loaded and before memory for KV
        is measured; ``machine.kv`` is still empty. Raises ``ConfigError``."""

    def block_bytes(self, block_size: int) -> int:
        """Bytes that the feature needs per KV block, in addition to the model's."""
        return 0

    @property
    def own_bytes(self) -> int:
        """Bytes of KV that the feature keeps outside the block pool."""
        return 0

    def allocate(self, num_blocks: int) -> None:
        """Allocate the feature's memory for this many KV blocks, in place of what it had."""

    def block_memory(self, num_blocks: int) -> Sequence[torch.Tensor]:
        """What the feature keeps of each of the first ``num_blocks`` KV blocks, as tensors [blocks,
        bytes] uint8. It is stored and loaded together with a block's KV."""
        return ()

    def filled(self, blocks: Sequence[int], is_state: Sequence[bool]) -> None:
        """Called after blocks were loaded from outside the pool, perhaps in another thread.
        ``is_state``: whether a block has a piece of a snapshot of recurrent states, not KV."""

    def profile_run(self, num_tokens: int, num_seqs: int) -> None:
        """Run what the feature does after a step of this many dummy tokens, to measure its
        memory."""

    def capture(self, sizes: Sequence[int], mixed_sizes: Sequence[int]) -> None:
        """Record the feature's own graphs: for decode steps of ``sizes`` rows, and for mixed steps
        of ``mixed_sizes`` tokens."""

    def begin(self, plan: StepPlan, live: LiveSeqs) -> Mapping[int, str] | None:
        """Prepare for the step of a plan. Called for each plan, even if it has no rows. The
        feature's part of the plan is ``getattr(plan, self.part)``.

        Returns the reasons why requests cannot be computed, by slot: only these requests fail. If
        it raises, all requests of the step fail."""
        return None

    def variant(self, rows: PlanRows) -> str:
        """Name the layers' computation of these rows, if the feature changes it; "" if not. Steps
        of each variant have graphs and recordings of their own, which read what ``fill`` writes."""
        return ""

    def pose(self, variant: str) -> None:
        """Prepare the layers for recording graphs of a variant, before any step."""

    def fill(self, staged: Staged) -> None:
        """Write what the layers read for these rows to memory at fixed addresses, before the step
        is computed or replayed. A decode step that only repeats the last one reads it again."""

    def alone(self, slot: int, num_rows: int) -> AbstractContextManager[None]:
        """Context in which the model's output layer computes rows of the sequence in a slot, in
        place of those of the step."""
        return nullcontext()

    def touches(self, rows: PlanRows) -> bool:
        """True if ``extend`` changes how these rows are computed, so that no graph can be used."""
        return False

    def extend(self, batch: ForwardBatch, rows: PlanRows) -> None:
        """Add vectors or positions to the forward pass of these rows."""

    def profile(self, batch: ForwardBatch) -> None:
        """Compute the largest possible step of dummy rows as ``extend`` does, to measure memory."""

    def follow(self, rows: PlanRows) -> None:
        """Called after each step's rows are sampled and their slots advanced. If it raises, the
        error is logged and the step goes on."""

    def drawn(self, rows: PlanRows, hidden: Hidden, tokens: torch.Tensor) -> None:
        """Called after the tokens of a step are sampled, unless the step was a graph.

        ``hidden``: the model's output, with the outputs of all features' ``aux_layers`` in order.
        ``tokens``: the token of each sampled row, [R] int32 on the device; negative if it was
        rejected or sampling failed. GPU work queued here runs before a later step overwrites
        ``hidden``."""

    def report(self, result: StepResult) -> None:
        """Add the feature's results to the result of a finished step, for its part in the
        scheduler."""

    def shutdown(self) -> None:
        """Release what the feature holds open, and the model."""
        for name in self.device_attributes:
            vars(self).pop(name, None)  # none if the start has failed

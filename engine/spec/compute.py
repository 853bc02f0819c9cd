"""A draft model: a smaller model guesses tokens, which the next step verifies beside its own.

    beside   the draft model computes the step's tokens too, so that its cache holds what the
             model's holds, in blocks of the same numbers: a prefix that is found is found for both
    follow   behind what was drawn, a decode of the draft model for each token to propose
    report   the proposals go to the scheduler with the step's result

Its tokens are drawn with the request's own parameters, seed and noise, at the position where the
model's will stand. As both take the largest of the same noise plus their own logits, they agree
more often the nearer their distributions are (at least (1 - d) / (1 + d), for a distance d in total
variation: Daliri, Musco, Suresh 2024, arXiv 2408.07978), and what is drawn in the end is the
model's own token: the same with drafts and without.

Proposals reach beyond the blocks of a sequence. There the draft model's table has blocks that only
it has, a few for each slot; what it writes to them is computed again once it is known to stand.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from engine.config.engine import ResolvedConfig
from engine.config.model import ModelConfig, ModelInfo
from engine.config.speculative import SpeculativeConfig
from engine.errors import ConfigError
from engine.layers.batch import ForwardBatch
from engine.messages.step import DraftPart, StepPlan, StepResult
from engine.models.assemble import compute_dtype
from engine.models.decoder import Decoder
from engine.models.load import load_model
from engine.sample.sampler import Sampler
from engine.worker.batches import Batches, PlanRows, Staging
from engine.worker.feature import Feature, Machine
from engine.worker.memory import choose_kv_dtype, make_kv_cache
from engine.worker.platform import Fetched
from engine.worker.slots import LiveSeqs, Slots
from engine.worker.steps import BySize, GraphedStep, decode, record
from engine.worker.warmup import prepare_kernels
from kernels import slots as on_slots
from kernels.cpu.recording import Recorder

logger = logging.getLogger("engine.spec")


class DraftModel(Feature):
    """Proposes tokens with a model of its own; see ``SpeculativeConfig``."""

    part = "proposals"

    def __init__(self, model: ModelConfig, info: ModelInfo, config: ResolvedConfig) -> None:
        """model, info: the draft model, in a directory; config: of the worker."""
        assert config.scheduler.speculative_config is not None, "it says how many drafts"
        asked = SpeculativeConfig.of(config.scheduler.speculative_config)
        self._num_drafts = asked.num_speculative_tokens
        self._config = config
        self._info = info
        self._model_config = model
        self._graphed: BySize[GraphedStep] = BySize()
        self._plans: deque[_Proposed] = deque()  # launched and not collected

    def attach(self, machine: Machine) -> None:
        """Load the model. Raises ``ConfigError`` for one that cannot draft for the other."""
        config, sched, platform = self._config, self._config.scheduler, machine.platform
        own = self._info.max_position_embeddings
        self._limit = min(own, sched.max_model_len)
        if platform.shares_memory:
            dtype = compute_dtype(self._model_config, self._info, "cpu")
            prepare_kernels(self._info, dtype, config.cache.kv_cache_dtype)
        model = load_model(
            self._model_config,
            self._info,
            device=platform.device.type,
            max_model_len=self._limit,
        )
        if model.vocab_size != machine.model.vocab_size:
            raise ConfigError(
                f"speculative_config: the draft model {self._info.name} has {model.vocab_size} "
                f"tokens and the model {machine.model.vocab_size}; both must have the same: give "
                "one of the same family"
            )
        if isinstance(model, Decoder) and not platform.shares_memory:
            model.group_experts()
        computed_on = "cpu" if platform.shares_memory else "cuda"
        self._kv_dtype = choose_kv_dtype(config.cache.kv_cache_dtype, model.dtype, computed_on)
        self._spec = replace(model.kv_spec, dtype_bytes=self._kv_dtype.itemsize)
        self._target = machine
        slots = machine.slots.twin(platform)
        num_seqs = sched.max_num_seqs
        staging = Staging(platform, num_seqs, num_seqs, sched.num_steps_in_flight)
        live = LiveSeqs(num_seqs, 0)  # no token is the host's: all come from the device
        self._machine = Machine(
            model=model,
            kv=[],
            platform=platform,
            live=live,
            slots=slots,
            sampler=Sampler(platform.upload, slots.tables, model.vocab_size),
            batches=Batches(platform, slots, live, staging),
            recorder=None if machine.recorder is None else Recorder(),
        )
        self._spare = SpareBlocks(num_seqs, self._num_drafts, config.block_size)

    def block_bytes(self, block_size: int) -> int:
        return self._spec.block_bytes(block_size)

    @property
    def own_bytes(self) -> int:
        return self._spare.num_blocks * self._spec.block_bytes(self._config.block_size)

    def allocate(self, num_blocks: int) -> None:
        machine = self._machine
        machine.kv.clear()
        if machine.recorder is not None:
            machine.recorder.forget()
        machine.kv[:] = make_kv_cache(
            self._spec,
            num_blocks + self._spare.num_blocks,
            self._config.block_size,
            dtype=self._kv_dtype,
            zeros=machine.platform.zeros,
        )
        tables = machine.slots.state.block_tables
        width = tables.shape[1]
        self._spare_rows = machine.platform.upload(self._spare.tables(num_blocks, width))
        tables.copy_(self._spare_rows)

    def capture(self, sizes: Sequence[int]) -> None:
        self._graphed = record(self._machine, sizes, self._limit)

    def begin(self, plan: StepPlan, live: LiveSeqs) -> None:
        tables, upload = self._machine.slots.state.block_tables, self._machine.platform.upload
        if plan.new:
            slots = upload(np.array([seq.slot for seq in plan.new], dtype=np.int64))
            tables[slots] = self._spare_rows[slots]
        if len(plan.block_ids):
            deltas = (plan.block_slots, plan.block_indices, plan.block_ids)
            on_slots.grow_block_tables(
                tables, *(upload(column.astype(np.int32, copy=False)) for column in deltas)
            )
        self._plans.append(_Proposed(plan))

    def beside(self, batch: ForwardBatch) -> None:
        machine = self._machine
        own = ForwardBatch(
            batch.input_ids,
            batch.positions,
            replace(batch.attn, scratch={}),
            wanted=batch.wanted,
            recorder=None if batch.recorder is None else machine.recorder,
        )
        if self._limit < self._config.scheduler.max_model_len:
            own.move(batch.positions.clamp(max=self._limit - 1))  # nothing is drafted there
        machine.model.forward(own, machine.kv)

    def follow(self, rows: PlanRows) -> None:
        if not self._plans:  # made-up rows
            return
        wanted = self._plans[-1].wanted(rows)
        # Where fewer drafts stand than were verified, it ends before that.
        ends = rows.starts + rows.counts + self._num_drafts
        wanted = np.where(ends <= self._limit, wanted, 0)
        if not wanted.any():
            return
        drawing = wanted > 0
        ones = np.ones(int(drawing.sum()), dtype=np.int32)
        starts = (rows.starts + rows.counts)[drawing]
        decodes = PlanRows(rows.slots[drawing], starts, ones, ones)
        tokens = self._decode(decodes, int(wanted.max()))
        fetched = self._machine.platform.fetch([tokens])
        self._plans[-1].parts.append((decodes.slots, wanted[drawing], fetched))

    def report(self, result: StepResult) -> None:
        result.drafts = self._plans.popleft().drafts()

    def _decode(self, rows: PlanRows, num_drafts: int) -> torch.Tensor:
        """So many tokens behind the last of each row [drafts, rows] int32; negative: none."""
        machine, target = self._machine, self._target
        for own, known in zip(machine.slots.state[:2], target.slots.state[:2], strict=True):
            own.copy_(known)  # lengths, and the tokens that were drawn last
        graphed = self._graphed.holding(len(rows.slots))
        padded = len(rows.slots) if graphed is None else graphed.num_rows
        staged = machine.batches.stage(rows, padded=padded)
        drawn = []
        for place in range(num_drafts):
            if graphed is not None:
                graphed.forward()
                tokens = graphed.draw()
            else:
                longest = int(rows.starts.max()) + place + 1
                largest_only = target.sampler.wants_largest_only
                tokens = decode(machine, staged.room, longest, largest_only=largest_only)
            drawn.append(tokens[: len(rows.slots)].clone())
        return torch.stack(drawn)

    def shutdown(self) -> None:
        self._plans.clear()


class SpareBlocks:
    """Blocks behind those of the pool, for what lies beyond a sequence's own."""

    def __init__(self, num_slots: int, num_drafts: int, block_size: int) -> None:
        self._num_slots = num_slots
        self._each = -(-(num_drafts - 1) // block_size) + 1  # they may begin anywhere in a block

    @property
    def num_blocks(self) -> int:
        return self._num_slots * self._each

    def tables(self, num_blocks: int, width: int) -> NDArray[np.int32]:
        """Block tables [slots, width] of sequences that have no block of a pool of so many: as many
        neighbours in a table as may be needed at once are different blocks."""
        slots = np.arange(self._num_slots, dtype=np.int32)[:, None]
        turns = np.arange(width, dtype=np.int32) % self._each
        tables: NDArray[np.int32] = num_blocks + slots * self._each + turns
        return tables


class _Proposed:
    """What is proposed in a step."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.parts: list[tuple[NDArray[np.int32], NDArray[np.int32], Fetched]] = []

    def wanted(self, rows: PlanRows) -> NDArray[np.int32]:
        """Drafts wanted behind some rows of the step."""
        if self.plan.proposals is None:
            return np.zeros(len(rows.slots), dtype=np.int32)
        by_slot = dict(zip(self.plan.slots.tolist(), self.plan.proposals.tolist(), strict=True))
        found = [by_slot[slot] for slot in rows.slots.tolist()]
        wanted: NDArray[np.int32] = np.array(found, dtype=np.int32) * rows.samples
        return wanted

    def drafts(self) -> DraftPart | None:
        """Wait for them; by row of the plan."""
        by_slot: dict[int, list[int]] = {}
        for slots, wanted, fetched in self.parts:
            fetched.done.synchronize()
            (tokens,) = fetched.tensors
            columns = tokens.numpy().T.tolist()
            for slot, num, drafts in zip(slots.tolist(), wanted.tolist(), columns, strict=True):
                by_slot[slot] = until_none(drafts[:num])
        if not by_slot:
            return None
        rows = [by_slot.get(slot, []) for slot in self.plan.slots.tolist()]
        return DraftPart(
            np.array([len(row) for row in rows], dtype=np.int32),
            np.array([token for row in rows for token in row], dtype=np.int32),
        )


def until_none(tokens: list[int]) -> list[int]:
    """The tokens before one that could not be drawn."""
    bad = next((place for place, token in enumerate(tokens) if token < 0), len(tokens))
    return tokens[:bad]


"""DraftModel: a smaller model proposes tokens, which the next step of the model verifies.

    begin    register new KV blocks
    follow   after sampling: run the draft model over the tokens of the step, which gives the first
             draft; each further draft takes another decode
    report   send the drafts to the scheduler with the step's result

The KV of the draft model is in blocks with the same numbers as those of the model's first KV group.
The draft model samples with the request's parameters and the noise that the model uses at the same
position. Thus both models sample the same token with a probability of at least (1 - d) / (1 + d),
for a total variation distance d between their distributions (Daliri, Musco, Suresh 2024, arXiv
2408.07978). The final tokens are the same with and without drafts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.config.engine import ResolvedConfig
from engine.config.model import ModelConfig, ModelInfo
from engine.errors import ConfigError
from engine.kv.layout import one_group, state_bytes
from engine.messages.step import Column, DraftPart, StepPlan, StepResult
from engine.models.decoder import NativeDecoder
from engine.models.load import load_model
from engine.models.model import Model
from engine.sample.parts import Vocabulary
from engine.sample.sampler import Sampler
from engine.spec.kept import DraftWork, KeptDrafts, KeptStates, SpareBlocks, first_group
from engine.worker.batches import (
    NO_PADDING,
    Batches,
    Extent,
    Padding,
    PaddingKind,
    PlanRows,
    Room,
    Staging,
    wanted_rows,
)
from engine.worker.feature import Feature, Machine
from engine.worker.memory import apply_kv_dtype, make_kv_cache, pool_bytes, stored_as, tensors_of
from engine.worker.platform import Fetched
from engine.worker.runner import Runner
from engine.worker.slots import LiveSeqs
from engine.worker.states import (
    enter_states,
    groups_of,
    make_states,
    num_bytes,
    with_state_dtype,
)
from engine.worker.steps import BySize, GraphedStep, MixedGraph, advance, record, record_mixed
from engine.worker.warmup import prepare_kernels, run_all_kinds
from kernels import slots as on_slots
from kernels.cpu.recording import Recorder
from kernels.slots import Rows

FEW = 16  # a row with up to this many tokens was in the step before: its pass is a usual one


class DraftModel(Feature):
    """Proposes draft tokens in the worker with a draft model, after each step."""

    part = "proposals"
    device_attributes = ("_passes", "_target", "_proposals")
    reads_first_group = True

    def __init__(
        self, model: ModelConfig, info: ModelInfo, config: ResolvedConfig, num_drafts: int
    ) -> None:
        """model, info: of the draft model; config: of the worker; num_drafts: most drafts per
        sequence."""
        self._config = config
        self._info = info
        self._model_config = model
        sched = config.scheduler
        self._limit = min(info.stated_positions or sched.max_model_len, sched.max_model_len)
        self._num_drafts = num_drafts
        self._spare = SpareBlocks(sched.max_num_seqs, num_drafts, config.block_size)
        self._proposals: deque[_Proposals] = deque()  # of steps whose results are not collected yet
        self._has_met_shapes = False

    def attach(self, machine: Machine) -> None:
        """Load the draft model and prepare its forward passes. Raises ``ConfigError``."""
        config, sched, platform = self._config, self._config.scheduler, machine.platform
        model = self.load(machine)
        requested = config.cache.kv_cache_dtype
        self._kv_dtype = apply_kv_dtype(model, requested, platform.device)
        stored = stored_as(model.cache_spec, self._kv_dtype)
        states = config.cache.mamba_ssm_cache_dtype
        self._layers = with_state_dtype(stored, states, self._info.hf)
        self._layout = one_group(self._layers, config.block_size)
        self._target = machine
        num_seqs, num_tokens = sched.max_num_seqs, sched.max_num_batched_tokens
        # After which of the last tokens the next pass begins is known when drafts are verified.
        self._states = KeptStates(
            num_seqs, self._num_drafts + 2 if state_bytes(self._layers) else 0
        )
        copies = self._states.num_copies
        slots = machine.slots.twin(platform, copies)
        # Each step stages the inputs of two passes.
        staging = Staging(platform, num_seqs, num_tokens, 2 * sched.num_steps_in_flight)
        own = Machine(
            model=model,
            kv=[],
            platform=platform,
            live=machine.live,
            slots=slots,
            sampler=Sampler(platform.upload, slots.tables, Vocabulary(model.vocab_size)),
            batches=Batches(
                platform,
                slots,
                machine.live,
                staging,
                layer_groups=groups_of(self._layers, self._layout),
            ),
            recorder=None if machine.recorder is None else Recorder(),
            states=make_states(self._layers, num_seqs * copies, platform.zeros) if copies else (),
        )
        self._passes = Passes(own, machine, self._limit, self._states)

    def load(self, machine: Machine) -> Model:
        """Load the draft model onto the machine's device. Raises ``ConfigError``."""
        platform, own = machine.platform, self._model_config
        if platform.shares_memory:
            prepare_kernels(self._info, own, self._config.cache.kv_cache_dtype)
        device = platform.device.type
        try:
            model = load_model(own, self._info, device=device, max_model_len=self._limit)
        except ConfigError as error:
            raise type(error)(f"speculative_config: {error}") from error
        if isinstance(model, NativeDecoder) and not platform.shares_memory:
            model.group_experts()
        return model

    def block_bytes(self, block_size: int) -> int:
        return self._layout.block_bytes

    @property
    def own_bytes(self) -> int:
        states = num_bytes(self._passes.machine.states)
        return self._spare.num_blocks * self._layout.block_bytes + states

    def allocate(self, num_blocks: int) -> None:
        block_size, machine = self._config.block_size, self._passes.machine
        machine.kv.clear()
        if machine.recorder is not None:
            machine.recorder.forget()
        machine.kv[:] = make_kv_cache(
            self._layers,
            self._layout,
            num_blocks + self._spare.num_blocks,
            block_size,
            dtype=self._kv_dtype,
            zeros=machine.platform.zeros,
        )
        enter_states(machine.kv, machine.states)
        tables = machine.slots.state.block_tables[0]
        self._no_blocks = machine.platform.upload(self._spare.tables(num_blocks, tables.shape[1]))
        tables.copy_(self._no_blocks)
        width = tables.shape[1]
        self._kept = KeptDrafts(len(tables), num_blocks, block_size, width, self._states)

    def block_memory(self, num_blocks: int) -> Sequence[torch.Tensor]:
        tensors = tensors_of(self._passes.machine.kv)
        num_all = num_blocks + self._spare.num_blocks
        return [one[:num_blocks] for one in pool_bytes(tensors, num_all)]

    def profile_run(self, num_tokens: int, num_seqs: int) -> None:
        Runner(self._passes.machine, self._limit).profile_run(num_tokens, num_seqs)

    def capture(self, sizes: Sequence[int], mixed_sizes: Sequence[int]) -> None:
        machine = self._passes.machine
        if machine.platform.compiles and not self._has_met_shapes:  # steps are recorded as a trial
            self._has_met_shapes = True
            run_all_kinds(Runner(machine, self._limit), machine.batches.max_num_tokens, self._limit)
        self._passes.capture(sizes, mixed_sizes)

    def begin(self, plan: StepPlan, live: LiveSeqs) -> None:
        self._proposals.append(_Proposals(plan))  # first: failed steps are reported, too
        machine = self._passes.machine
        tables, upload = machine.slots.state.block_tables[0], machine.platform.upload
        if plan.new:
            slots = upload(np.array([seq.slot for seq in plan.new], dtype=np.int64))
            tables[slots] = self._no_blocks[slots]
        columns = first_group(plan)
        if len(columns[0]):
            deltas = (upload(column.astype(np.int32, copy=False)) for column in columns)
            on_slots.grow_block_tables(tables, *deltas)
        self._kept.begin(plan)

    def follow(self, rows: PlanRows) -> None:
        if not self._proposals or self._proposals[-1].plan.proposals is None:  # trial, or no drafts
            return
        wanted = self._proposals[-1].wanted(rows)
        num_drafts = wanted * 0 if rows.drafts is None else rows.drafts.counts
        budget = self._passes.machine.batches.max_num_tokens
        final = rows.starts + rows.counts - num_drafts
        step = DraftWork(rows.slots, rows.starts, rows.counts, wanted, final)
        work = self._kept.work(step, self._limit, budget)
        if not len(work.slots):
            return
        drafts = self._passes.run(work)
        self._kept.computed(work)  # only if nothing was raised
        if drafts is not None:
            self._proposals[-1].add(work, self._passes.machine.platform.fetch([drafts]))

    def report(self, result: StepResult) -> None:
        result.drafts = self._proposals.popleft().drafts()


class Passes:
    """The draft model's forward passes, which propose tokens after a step of the main model."""

    def __init__(self, machine: Machine, target: Machine, limit: int, states: KeptStates) -> None:
        """machine: runs the draft model; target: runs the model that verifies drafts; limit: the
        number of positions that the draft model supports; states: those of the draft model."""
        self._states = states
        self.machine = machine
        self._target = target
        self._limit = limit
        self._graphed: BySize[GraphedStep] = BySize()
        self._mixed: BySize[MixedGraph] = BySize()

    def capture(self, sizes: Sequence[int], mixed_sizes: Sequence[int]) -> None:
        """Record graphs for decodes of ``sizes`` sequences and passes of ``mixed_sizes`` tokens."""
        if self.machine.model.can_be_recorded:
            self._graphed = record(self.machine, sizes, self._limit)
            self._mixed = record_mixed(self.machine, mixed_sizes, self._limit)

    def run(self, work: DraftWork) -> torch.Tensor | None:
        """Compute the tokens of ``work``, and propose drafts. Returns int32 [most drafts of a
        sequence, sequences that want drafts] on the device, negative where no token could be
        sampled; ``None`` if no sequence wants drafts."""
        wants = work.wanted > 0
        slots = self.machine.platform.upload(work.slots[wants].astype(np.int32))
        # Positions of the last sampled tokens; the host only knows upper bounds of them.
        last = self._target.slots.state.num_computed[slots.long()]
        hidden = self._first(work, last)
        if not wants.any():
            return None
        drafts = [self._draw(hidden, slots, last + 1)]
        num_more = int(work.wanted.max()) - 1
        if num_more:
            ends, ones = (work.starts + work.counts)[wants], np.ones_like(work.slots[wants])
            rows = PlanRows(work.slots[wants], ends, ones, ones)
            self._continue_after(work, slots.long(), last)
            drafts += self._further(rows, drafts[0], num_more)
        return torch.stack(drafts)

    # -- helpers

    def _first(self, work: DraftWork, last: torch.Tensor) -> torch.Tensor:
        """Run the draft model over the tokens of ``work``. Returns the hidden states [R, H] at
        ``last`` [R]: the last accepted position of each sequence that wants drafts."""
        machine, upload = self.machine, self.machine.platform.upload
        seqs = np.flatnonzero(work.wanted)
        rows = PlanRows(work.slots, work.starts, work.counts, work.wanted * 0)
        graph = self._mixed.smallest(int(work.counts.sum())) if self._mixed.sizes else None
        machine.slots.state.num_computed[upload(work.slots.astype(np.int64))] = upload(work.starts)
        padding = NO_PADDING
        if graph is not None:
            padding = Padding(PaddingKind.MIXED_GRAPH, graph.num_rows)
        kept = self._begin_states(work)
        staged = machine.batches.stage(rows, padding=padding, kept_states=kept)
        starts = staged.tokens.query_start[seqs] - work.starts[seqs]
        places = upload(starts.astype(np.int64)) + last
        is_single = np.append(work.counts == 1, False)
        longest = int((work.starts + work.counts).max())
        extent = Extent(int(is_single.argmin()), int(work.counts.max()), longest)
        batch = machine.batches.build(staged.room, extent)
        if graph is None and len(seqs) and int(work.counts.max()) <= FEW:
            batch.recorder = machine.recorder
            return machine.model.forward(batch, machine.kv).last[places]
        if len(seqs):
            batch.wanted = wanted_rows(
                batch.attention, places, upload(seqs.astype(np.int64)), last + 1
            )
        else:  # the last layer needs at least one row
            token, seq, length = (upload(column) for column in _last_token(work))
            batch.wanted = wanted_rows(batch.attention, token, seq, length)
        if graph is not None:
            stream = graph.replay(len(staged.tokens.slots))
            return machine.model.last_layer(stream, batch, machine.kv)
        return machine.model.forward(batch, machine.kv).last

    def _begin_states(self, work: DraftWork) -> Column | None:
        """Choose the states with which the sequences of ``work`` go on. Returns how many states the
        pass keeps of each; ``None`` if the draft model has none."""
        copy = self.machine.slots.state.copy
        if copy is None:
            return None
        upload = self.machine.platform.upload
        copy[upload(work.slots.astype(np.int64))] = upload(self._states.copies(work))
        return self._states.lengths(work)

    def _continue_after(self, work: DraftWork, slots: torch.Tensor, last: torch.Tensor) -> None:
        """Choose the states after the positions ``last`` [R], after which the sequences in
        ``slots`` [R] draft further. ``advance`` then moves on by one copy."""
        state = self.machine.slots.state
        if state.copy is None:
            return
        wants = work.wanted > 0
        kept = (self._states.copies(work) + self._states.lengths(work))[wants]
        ends = (work.starts + work.counts)[wants]
        shift = self.machine.platform.upload((kept - ends).astype(np.int32))
        state.copy[slots] = ((shift + last) % state.num_copies).int()

    def _further(self, rows: PlanRows, drafts: torch.Tensor, num_more: int) -> list[torch.Tensor]:
        """Draft ``num_more`` further tokens for each of R sequences. Returns ``num_more`` tensors
        [R]. rows: one token for each sequence; drafts [R]: the first draft of each sequence."""
        machine, target = self.machine, self._target
        graph = self._graphed.smallest(len(drafts))
        padded = len(drafts) if graph is None else graph.num_rows
        padding = Padding(PaddingKind.DECODE_GRAPH, padded)
        room = machine.batches.stage(rows, padding=padding).room
        machine.slots.state.num_computed.copy_(target.slots.state.num_computed)
        first = drafts.new_zeros(padded)
        first[: len(drafts)] = drafts
        advance(machine, room, first)
        longest, more = int(rows.starts.max()) + 1, []
        for place in range(num_more):
            if graph is None:
                drawn = self._decode(room, longest + place)
            else:
                graph.forward()
                drawn = graph.draw()
            more.append(drawn[: len(drafts)].clone())
        return more

    def _decode(self, room: Room, longest: int) -> torch.Tensor:
        """Decode one draft for each sequence, without a recorded graph. longest: number of tokens
        in the longest sequence after this decode."""
        machine, num = self.machine, room.num_seqs
        batch = machine.batches.build(room, Extent(num, max_query_len=1, max_seq_len=longest))
        batch.recorder = machine.recorder
        hidden = machine.model.forward(batch, machine.kv).last
        drawn = self._draw(hidden, room.step.draw_slots, machine.batches.seq_lens(num))
        advance(machine, room, drawn)
        return drawn

    def _draw(
        self, hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Sample the tokens at ``positions`` [R] from hidden states [R, H]. Returns int32 [R]."""
        machine, drawn = self.machine, None
        if self._target.sampler.wants_largest_only:
            drawn = machine.model.largest(hidden)
        if drawn is None:
            drawn = machine.sampler.draw(Rows(machine.model.logits(hidden), slots, positions))
        return drawn


def _last_token(work: DraftWork) -> tuple[NDArray[np.int64], NDArray[np.int64], Column]:
    """Index of the batch's last token, its sequence's index and its sequence's length; each [1]."""
    rows = np.array([int(work.counts.sum()) - 1])
    return rows, np.array([len(work.slots) - 1]), (work.starts + work.counts)[-1:]


class _Proposals:
    """The drafts that are proposed after one step."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self._parts: list[tuple[DraftWork, Fetched]] = []  # a step may be computed in several parts

    def wanted(self, rows: PlanRows) -> Column:
        """The number of drafts that each of these rows wants; 0 if the row samples no token."""
        assert self.plan.proposals is not None
        by_slot: Column = np.zeros(int(self.plan.slots.max()) + 1, dtype=np.int32)
        by_slot[self.plan.slots] = self.plan.proposals
        return by_slot[rows.slots] * rows.samples

    def add(self, work: DraftWork, fetched: Fetched) -> None:
        """Add drafts that are still being copied from the device."""
        self._parts.append((work, fetched))

    def drafts(self) -> DraftPart | None:
        """Wait until the drafts are copied from the device. Returns the drafts for the plan's rows;
        ``None`` if no row wants drafts."""
        by_slot: dict[int, list[int]] = {}
        for work, fetched in self._parts:
            fetched.done.synchronize()
            wants = work.wanted > 0
            columns = (work.slots[wants], work.wanted[wants], fetched.tensors[0].numpy().T)
            for slot, num, tokens in zip(*(c.tolist() for c in columns), strict=True):
                by_slot[slot] = until_none(tokens[:num])
        if not by_slot:
            return None
        rows = [by_slot.get(slot, []) for slot in self.plan.slots.tolist()]
        return DraftPart(
            np.array([len(row) for row in rows], dtype=np.int32),
            np.array([token for row in rows for token in row], dtype=np.int32),
        )


def until_none(tokens: list[int]) -> list[int]:
    """The tokens before the first negative one, which means that no token could be sampled."""
    bad = next((place for place, token in enumerate(tokens) if token < 0), len(tokens))
    return tokens[:bad]

"""Copies a ``StepPlan`` to the device in one buffer, and makes a forward pass's inputs from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from engine.layers.batch import ForwardBatch, Wanted
from engine.messages.step import EMPTY, PADDING, Column, DraftPart, NewSeq, StepPlan
from engine.sample.edits import SamplingSpec
from engine.sample.sampler import DraftRows, Draws
from engine.worker.platform import Platform
from engine.worker.slots import LiveSeqs, NewSlots, Slots
from engine.worker.states import inputs_of, state_meta
from kernels import AttentionMeta
from kernels import slots as on_slots
from kernels.meta import LayerMeta
from kernels.slots import UNKNOWN, Inputs, SamplingColumns

MAX_ROOMS = 256  # step sizes whose tensor views are cached
ASCENDING: Column = np.arange(1 << 14, dtype=np.int32)
ASCENDING.flags.writeable = False


class PlanRows(NamedTuple):
    """Rows of a plan, one per request: slot, first position, number of tokens (drafts included),
    whether it samples; and all draft tokens. Read-only, as it shares the plan's arrays."""

    slots: Column
    starts: Column
    counts: Column
    samples: Column
    drafts: DraftPart | None = None

    @classmethod
    def of(cls, plan: StepPlan, vocab_size: int) -> PlanRows:
        """Make all rows of a plan. Draft tokens outside the vocabulary are replaced by padding."""
        drafts = plan.drafts
        if drafts is not None and int(drafts.tokens.max(initial=0)) >= vocab_size:
            known = np.where(drafts.tokens < vocab_size, drafts.tokens, PADDING).astype(np.int32)
            drafts = DraftPart(drafts.counts, known)
        return cls(plan.slots, plan.starts, plan.counts, plan.samples, drafts)

    def part(self, first: int, last: int) -> PlanRows:
        """Rows [first, last)."""
        drafts = self.drafts
        if drafts is not None:
            begin, end = int(drafts.counts[:first].sum()), int(drafts.counts[:last].sum())
            drafts = DraftPart(drafts.counts[first:last], drafts.tokens[begin:end])
        slots, starts, counts, samples = (column[first:last] for column in self[:4])
        return PlanRows(slots, starts, counts, samples, drafts)


@dataclass(slots=True)
class StepTokens:
    """Slot and position of each token of a step, and the index of each row's first token."""

    slots: NDArray[np.intp]  # [N]
    positions: NDArray[np.int64]  # [N]
    query_start: NDArray[np.int32]  # [S + 1]


class Extent(NamedTuple):
    """Sizes of a step's attention, known to the host. A CUDA graph is recorded with the largest
    possible sizes."""

    num_decodes: int
    max_query_len: int
    max_seq_len: int
    is_mixed: bool = False  # see ``AttentionMeta.is_mixed``


class ReadTokens(NamedTuple):
    """Device tensors that select the tokens whose hidden states are needed for logits."""

    tokens: torch.Tensor  # [R] int64, index among the step's tokens
    seqs: torch.Tensor  # [R] int64, sequence of each
    seq_lens: torch.Tensor  # [R] int32, number of keys that each attends to


ReadColumns = tuple[NDArray[np.int64], NDArray[np.int64], Column]  # the same arrays on the host


class Picked(NamedTuple):
    """The batch rows to sample in a step that does not replay a decode graph, as device tensors."""

    slots: torch.Tensor  # [R] int32
    positions: torch.Tensor  # [R] int32, position of the token to sample
    drafts: torch.Tensor | None  # [R] int32, see ``DraftRows.judged``
    read: ReadTokens | None  # None: every token of the step is sampled after


class Room(NamedTuple):
    """The device tensors of a step with S sequences and N tokens: columns that the host sends, and
    model inputs computed from them."""

    num_seqs: int
    num_tokens: int
    step: DeviceColumns
    inputs: Inputs
    prepare: Callable[[], None]  # computes ``inputs`` from ``step`` and the slots
    tables: list[tuple[torch.Tensor, torch.Tensor]]  # block tables and cache slots of each group
    decodes: Picked  # for steps in which each sequence has one token and samples the next


class PaddingKind(Enum):
    """What a step is padded for."""

    NONE = "none"
    DECODE_GRAPH = "decode graph"  # rows of one token each, padded to ``size`` rows
    MIXED_GRAPH = "mixed graph"  # padded with empty sequences for a graph of ``size`` tokens
    CPU_REPLAY = "cpu replay"  # padded to ``size`` tokens; the added ones have no sequence


class Padding(NamedTuple):
    """The kind of padding of a step, and the size to which it is padded."""

    kind: PaddingKind = PaddingKind.NONE
    size: int = 0


NO_PADDING = Padding()


class Staged(NamedTuple):
    """A step whose input data is on the device."""

    rows: PlanRows
    tokens: StepTokens
    room: Room
    draws: Draws
    picked: Picked | None  # None: padded for a decode graph
    changes: Changes | None
    padding: Padding
    variant: str = ""  # of graphs and recordings, see ``Feature.variant``
    wanted: NDArray[np.int64] | None = None  # tokens that give logits; None: all of them

    @property
    def step(self) -> DeviceColumns:
        return self.room.step


class Batches:
    """Copies steps to the device and builds the model's inputs there, at fixed addresses."""

    def __init__(
        self,
        platform: Platform,
        slots: Slots,
        live: LiveSeqs,
        staging: Staging,
        *,
        layer_groups: Sequence[int] = (0,),
        batch_invariant: bool = False,
    ) -> None:
        """layer_groups: the index of each layer's KV group, ``OF_STATES`` for layers with a
        recurrent state."""
        self._slots = slots
        self._layer_groups = tuple(layer_groups)
        self._batch_invariant = batch_invariant
        self._live = live
        self._staging = staging
        num_seqs, num_tokens = len(staging.device.slots), len(staging.device.host_ids)
        num_groups, _, width = slots.state.block_tables.shape
        self.max_num_tokens = num_tokens  # per step
        self._inputs = Inputs(
            input_ids=platform.zeros((num_tokens,), torch.int32),
            positions=platform.zeros((num_tokens,), torch.int64),
            cache_slots=platform.zeros((num_groups, num_tokens), torch.int64),
            seq_lens=platform.zeros((num_seqs,), torch.int32),
            block_tables=platform.zeros((num_groups, num_seqs, width), torch.int32),
        )
        if slots.state.copy is not None:
            shape = (num_seqs, slots.state.num_copies - 1)
            self._inputs = self._inputs._replace(
                state_reads=platform.zeros((num_seqs,), torch.int32),
                state_writes=platform.zeros(shape, torch.int32),
                num_seqs=platform.zeros((1,), torch.int32),
            )
        self._rooms: dict[tuple[int, int], Room] = {}
        self.last: Staged | None = None
        """The last staged step, if its data is right for the next decode of its sequences, too."""

    def stage(
        self,
        rows: PlanRows,
        plan: StepPlan | None = None,
        specs: Sequence[SamplingSpec] = (),
        padding: Padding = NO_PADDING,
        kept_states: Column | None = None,
        variant: str = "",
    ) -> Staged:
        """Copy a step's rows to the device in one buffer, together with the changes that ``plan``,
        if given, makes to slots. ``specs``: sampling options of the plan's new sequences;
        ``kept_states``: for each row that samples nothing, after how many of its last tokens to
        keep recurrent states."""
        tokens, (kind, size) = locate(rows), padding
        num_seqs, num_tokens = len(rows.counts), max(len(tokens.slots), size)
        host, self.last = self._staging.open(num_tokens), None
        self._fill(host, rows, tokens, padding)
        if kind is PaddingKind.DECODE_GRAPH:
            num_seqs = max(num_seqs, size)
            draws, picked, read = _padded_draws(host, rows, size), None, None
        else:
            draws, starts, read = draws_of(rows, tokens)
            host.draw_starts[: len(starts)] = starts
            if kept_states is not None:
                np.cumsum(kept_states, out=host.draw_starts[1 : len(starts)])
            if read is None and rows.drafts is None:
                picked = self._room(num_seqs, num_tokens).decodes
            else:
                picked = self._pick(draws, read)
        changes = None if plan is None else stage_changes(plan, specs, self._staging, self._slots)
        self._staging.send()
        if kind is PaddingKind.MIXED_GRAPH:
            num_tokens = len(tokens.slots)
        room = self._room(num_seqs, num_tokens)
        wanted = None if read is None else read[0]
        staged = Staged(rows, tokens, room, draws, picked, changes, padding, variant, wanted)
        self.last = staged if self._may_repeat(host, staged) else None
        return staged

    def _may_repeat(self, host: HostColumns, staged: Staged) -> bool:
        """True if the data of a staged step is right for its sequences' next decodes, too: it stays
        in place, and the ids of all tokens are on the device."""
        if not self._staging.shares_memory or staged.picked is not staged.room.decodes:
            return False
        ids = host.host_ids[: len(staged.tokens.slots)]
        return bool(np.count_nonzero(ids == UNKNOWN) == len(ids))

    def mixed_room(self, num_tokens: int) -> Room:
        """Device tensors for a step that mixes prompts and decodes, with ``num_tokens`` tokens and
        the largest possible number of sequences."""
        return self._room(self._most_seqs(num_tokens), num_tokens)

    def build(self, room: Room, extent: Extent) -> ForwardBatch:
        """Prepare the forward pass of a step; it returns the hidden states of all tokens."""
        room.prepare()
        inputs = room.inputs
        scratch: dict[Any, Any] = {}
        metas: list[LayerMeta] = [
            AttentionMeta(
                query_start=room.step.query_start,
                seq_lens=inputs.seq_lens,
                block_tables=tables,
                positions=inputs.positions,
                slots=cache_slots,
                block_size=self._slots.block_size,
                num_decodes=extent.num_decodes,
                max_query_len=extent.max_query_len,
                max_seq_len=extent.max_seq_len,
                scratch=scratch,
                batch_invariant=self._batch_invariant,
                is_mixed=extent.is_mixed,
                group=group,
            )
            for group, (tables, cache_slots) in enumerate(room.tables)
        ]
        if inputs.state_reads is not None:  # at index ``OF_STATES``
            metas.append(
                state_meta(inputs, room.step.query_start, extent[:2], self._batch_invariant)
            )
        attn = tuple(metas[group] for group in self._layer_groups)
        return ForwardBatch(inputs.input_ids, inputs.positions, attn)

    def build_picked(self, staged: Staged, read: ReadTokens | None) -> ForwardBatch:
        """Prepare the forward pass of a staged step. It returns the hidden states of the tokens in
        ``read``; ``None``: of all tokens."""
        rows, room = staged.rows, staged.room
        num_decodes, longest = room.num_seqs, 1
        if room.num_tokens > room.num_seqs:
            num_decodes, longest = int((rows.counts != 1).argmax()), int(rows.counts.max())
        lens = rows.starts + rows.counts
        batch = self.build(room, Extent(num_decodes, longest, int(lens.max())))
        if read is not None:
            batch.wanted = wanted_rows(batch.attention, read.tokens, read.seqs, read.seq_lens)
        return batch

    def seq_lens(self, num_seqs: int) -> torch.Tensor:
        """Length of each sequence after the step, [num_seqs] int32, as computed by ``build``."""
        return self._inputs.seq_lens[:num_seqs]

    def _most_seqs(self, num_tokens: int) -> int:
        return min(num_tokens, len(self._staging.device.slots))

    def _room(self, num_seqs: int, num_tokens: int) -> Room:
        """Device tensors for a step of this size. The same views are returned for the same size."""
        room = self._rooms.get((num_seqs, num_tokens))
        if room is None:
            if len(self._rooms) >= MAX_ROOMS:
                self._rooms.clear()
            inputs = inputs_of(self._inputs, num_seqs, num_tokens)
            step = self._staging.device.of(num_seqs, num_tokens)
            described = (step.slots, step.query_start, step.host_ids)
            prepare = on_slots.preparation(
                self._slots.state, *described, inputs, self._slots.block_size, step.draw_starts
            )
            tables = list(zip(inputs.block_tables, inputs.cache_slots, strict=True))
            decodes = Picked(step.slots, inputs.seq_lens, None, None)
            room = Room(num_seqs, num_tokens, step, inputs, prepare, tables, decodes)
            self._rooms[num_seqs, num_tokens] = room
        return room

    def _fill(
        self, host: HostColumns, rows: PlanRows, tokens: StepTokens, padding: Padding
    ) -> None:
        """Fill the step's host columns; those for sampling only for a decode graph."""
        num, (kind, size) = len(rows.counts), padding
        host.slots[:num] = rows.slots
        self._fill_ids(host.host_ids[: len(tokens.slots)], rows, tokens)
        host.query_start[: num + 1] = tokens.query_start
        if kind is PaddingKind.DECODE_GRAPH:
            host.slots[num:size] = -1
            host.host_ids[num:size] = UNKNOWN
            host.query_start[num : size + 1] = np.arange(num, size + 1)
            host.draw_slots[:num] = np.where(rows.samples, rows.slots, -1)
            host.draw_slots[num:size] = -1
            host.draw_starts[: size + 1] = np.arange(size + 1)
        elif kind is PaddingKind.MIXED_GRAPH:
            end = self._most_seqs(size)
            host.slots[num:end] = -1
            host.query_start[num + 1 : end + 1] = len(tokens.slots)

    def _fill_ids(self, ids: Column, rows: PlanRows, tokens: StepTokens) -> None:
        """Fill in each token's id, or ``UNKNOWN`` if it was sampled on the device and the host does
        not have it."""
        slots, positions = tokens.slots, tokens.positions
        is_sent = positions < self._live.num_sent[slots]
        if np.count_nonzero(is_sent):
            ids[:] = np.where(is_sent, self._live.tokens[slots, positions], UNKNOWN)
        else:
            ids[:] = UNKNOWN
        if rows.drafts is not None:
            places = draft_tokens(rows.drafts, tokens.query_start)
            ids[places] = rows.drafts.inputs

    def _pick(self, draws: Draws, read: ReadColumns | None) -> Picked:
        add = self._staging.add
        return Picked(
            slots=add(draws.slots),
            positions=add(draws.positions),
            drafts=None if draws.drafts is None else add(draws.drafts.judged),
            read=None if read is None else ReadTokens(*(add(column) for column in read)),
        )


def wanted_rows(
    attn: AttentionMeta, rows: torch.Tensor, sequences: torch.Tensor, seq_lens: torch.Tensor
) -> Wanted:
    """Restrict the last layer to R tokens of the step. attn: the layer's attention; rows: indices
    of the tokens, sequences: indices of their sequences, both [R] int64; seq_lens: number of keys
    to which each token attends, itself included, [R] int32."""
    count = len(rows)
    return Wanted(
        rows,
        AttentionMeta(
            query_start=torch.arange(count + 1, dtype=torch.int32, device=rows.device),
            seq_lens=seq_lens,
            block_tables=attn.block_tables[sequences],  # full width: kernels are compiled for it
            positions=attn.positions[rows],
            slots=attn.slots[rows],
            block_size=attn.block_size,
            num_decodes=count,
            max_query_len=1,
            max_seq_len=attn.max_seq_len,
            batch_invariant=attn.batch_invariant,
            group=attn.group,
        ),
    )


def locate(rows: PlanRows) -> StepTokens:
    """Slot and position of each token of these rows."""
    counts = rows.counts
    if np.count_nonzero(counts == 1) == len(counts):  # one token each
        query_start = _ascending(len(counts) + 1)
        return StepTokens(rows.slots.astype(np.intp), rows.starts.astype(np.int64), query_start)
    query_start = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start[1:])
    slots = np.repeat(rows.slots, counts).astype(np.intp)
    offsets = np.arange(query_start[-1]) - np.repeat(query_start[:-1], counts)
    return StepTokens(slots, np.repeat(rows.starts, counts) + offsets, query_start)


def draft_tokens(drafts: DraftPart, query_start: NDArray[np.int32]) -> NDArray[np.int64]:
    """Indices of draft tokens among the tokens of a step. Drafts are the last tokens of a row."""
    counts = drafts.counts
    starts = np.cumsum(counts) - counts
    within = np.arange(int(counts.sum())) - np.repeat(starts, counts)
    places: NDArray[np.int64] = np.repeat(query_start[1:] - counts, counts) + within
    return places


def draws_of(rows: PlanRows, tokens: StepTokens) -> tuple[Draws, Column, ReadColumns | None]:
    """Find where a step samples: after the last known token of a sequence, and after each draft.

    Returns the draws, the index of each sequence's first draw [S + 1], and the tokens whose hidden
    states are needed (``None``: all tokens)."""
    num_seqs, ends, lengths = len(rows.counts), tokens.query_start[1:], rows.starts + rows.counts
    num_drawing = int(np.count_nonzero(rows.samples))
    if num_drawing == len(tokens.slots):  # one token each, and all sample
        return Draws(_ascending(num_seqs), rows.slots, lengths), tokens.query_start, None
    num_drafts = None if rows.drafts is None else rows.drafts.counts
    each = rows.samples if num_drafts is None else rows.samples * (1 + num_drafts)
    starts = np.zeros(num_seqs + 1, dtype=np.int32)
    np.cumsum(each, out=starts[1:])
    if not num_drawing:  # the last layer must have something to compute
        last = np.array([num_seqs - 1])
        read = (ends[-1:].astype(np.int64) - 1, last, lengths[-1:])
        return Draws(EMPTY, EMPTY, EMPTY), starts, read
    seqs = np.repeat(_ascending(num_seqs), each)
    ends, lengths, draft_rows = ends[seqs], lengths[seqs], None
    if rows.drafts is not None:
        # Counts down from (number of drafts + 1) to 1 within each sequence.
        remaining = (rows.drafts.counts[seqs] + 1) - (_ascending(len(seqs)) - starts[seqs])
        ends, lengths = ends - remaining + 1, (lengths - remaining + 1).astype(np.int32)
        draft_rows = _draft_rows(rows.drafts, rows.samples, starts, seqs)
    draws = Draws(seqs, rows.slots[seqs], lengths, draft_rows)
    if len(seqs) == len(tokens.slots):
        return draws, starts, None
    return draws, starts, (ends.astype(np.int64) - 1, seqs.astype(np.int64), lengths)


def _ascending(count: int) -> Column:
    """0, 1, 2, ... as a read-only array."""
    return ASCENDING[:count] if count <= len(ASCENDING) else np.arange(count, dtype=np.int32)


def _draft_rows(
    drafts: DraftPart, samples: Column, starts: Column, seqs: NDArray[np.integer]
) -> DraftRows:
    most = int(drafts.counts.max(initial=0))
    table = np.full((len(samples), most), PADDING, dtype=np.int32)
    for row, own in enumerate(drafts.by_row()):
        table[row, : len(own)] = own
    index = np.arange(len(seqs)) - starts[seqs]  # of the sampled row within its sequence
    judged = np.full(len(seqs), PADDING, dtype=np.int32)
    has_draft = index < drafts.counts[seqs]
    judged[has_draft] = table[seqs[has_draft], index[has_draft]]
    before = np.where(np.arange(most) < index[:, None], table[seqs], PADDING).astype(np.int32)
    return DraftRows(judged, before)


def _padded_draws(host: HostColumns, rows: PlanRows, padded: int) -> Draws:
    """The batch rows to sample in a decode graph: every row, padding rows included."""
    positions = np.zeros(padded, dtype=np.int32)
    positions[: len(rows.counts)] = rows.starts + rows.counts
    slots = host.draw_slots[:padded].copy()
    return Draws(_ascending(padded), slots, positions, is_padded=True)


class Changes(NamedTuple):
    """What a plan changes in the slots, as device tensors."""

    new: NewSlots | None
    blocks: list[torch.Tensor]  # block tables, places in them, blocks; [] for none


def stage_changes(
    plan: StepPlan, specs: Sequence[SamplingSpec], staging: Staging, slots: Slots
) -> Changes:
    """Stage what a plan changes in the slots: new sequences and block table entries. ``specs``:
    sampling options of the new sequences."""
    new, blocks = None, []
    if plan.new:
        starts = dict(zip(plan.slots.tolist(), plan.starts.tolist(), strict=True))
        new = _new_slots(plan.new, specs, starts, staging)
    if len(plan.block_ids):
        deltas = (slots.table_rows(plan), plan.block_indices, slots.table_entries(plan))
        blocks = [staging.add(column.astype(np.int32, copy=False)) for column in deltas]
    return Changes(new, blocks)


def _new_slots(
    new: Sequence[NewSeq], specs: Sequence[SamplingSpec], starts: dict[int, int], staging: Staging
) -> NewSlots:
    def add(values: Iterable[float], dtype: DTypeLike) -> torch.Tensor:
        return staging.add(np.fromiter(values, dtype, len(new)))

    seeds = np.fromiter((spec.seed for spec in specs), np.uint64, len(new))
    return NewSlots(
        slots=add((seq.slot for seq in new), np.int64),
        num_computed=add((starts[seq.slot] for seq in new), np.int32),
        num_prompt=add((seq.num_prompt for seq in new), np.int32),
        requested=SamplingColumns(
            temperature=add((spec.temperature for spec in specs), np.float64),
            top_k=add((spec.top_k for spec in specs), np.int32),
            top_p=add((spec.top_p for spec in specs), np.float64),
            min_p=add((spec.min_p for spec in specs), np.float64),
            seeds=staging.add(seeds.view(np.int64)),
        ),
    )


ALIGNMENT = 16  # bytes; Triton compiles a kernel again for an unaligned pointer
EXTRA_BYTES = 1 << 20  # room in a buffer after the fixed columns


class HostColumns(NamedTuple):
    """The arrays of a step with S sequences and N tokens that the host fills in."""

    slots: Column  # [S], -1: padding
    draw_slots: Column  # [S]: the slot if the sequence samples one token, else -1
    draw_starts: Column  # [S + 1]: index of each sequence's first sampled row
    query_start: Column  # [S + 1]
    host_ids: Column  # [N]: input ids, UNKNOWN where only the device knows them


class DeviceColumns(NamedTuple):
    """The columns of ``HostColumns`` on the device, at fixed addresses."""

    slots: torch.Tensor
    draw_slots: torch.Tensor
    draw_starts: torch.Tensor
    query_start: torch.Tensor
    host_ids: torch.Tensor

    def of(self, num_seqs: int, num_tokens: int) -> DeviceColumns:
        """The first entries of these tensors, for a step with this many sequences and tokens."""
        ends = (num_seqs, num_seqs, num_seqs + 1, num_seqs + 1, num_tokens)
        return DeviceColumns(*(column[:end] for column, end in zip(self, ends, strict=True)))


class Staging:
    """Copies the data of steps to the device, through a pinned host buffer for each step in flight.

    A host buffer is reused only when its last copy is done. If host and device share memory, there
    is one buffer and nothing is copied. Order of the data: columns of fixed size, token ids, other
    data."""

    def __init__(
        self, platform: Platform, max_num_seqs: int, max_num_tokens: int, num_buffers: int
    ) -> None:
        self._platform = platform
        self.shares_memory = platform.shares_memory
        counts = (max_num_seqs, max_num_seqs, max_num_seqs + 1, max_num_seqs + 1, max_num_tokens)
        begins, end = [], 0
        for count in counts:
            begins.append(end)
            end = _aligned(end + 4 * count)
        self._ids_begin = begins[-1]
        self._room = end + EXTRA_BYTES
        num_buffers = 1 if self.shares_memory else num_buffers
        self._pinned = [platform.pinned(self._room) for _ in range(num_buffers)]
        self._place = (
            self._pinned[0] if self.shares_memory else platform.zeros((self._room,), torch.uint8)
        )
        spans = [slice(begin, begin + 4 * n) for begin, n in zip(begins, counts, strict=True)]
        self.device = DeviceColumns(*(self._place[span].view(torch.int32) for span in spans))
        self._host = [
            HostColumns(*(pinned.numpy()[span].view(np.int32) for span in spans))
            for pinned in self._pinned
        ]
        self._copied = [platform.mark() for _ in range(num_buffers)]
        self._turn = 0
        self._end = 0

    def open(self, num_tokens: int) -> HostColumns:
        """The columns of the next step, for the host to fill. Blocks until their buffer is free."""
        self._turn = (self._turn + 1) % len(self._pinned)
        self._copied[self._turn].synchronize()
        self._end = _aligned(self._ids_begin + 4 * num_tokens)
        return self._host[self._turn]

    def add(self, values: NDArray[np.generic]) -> torch.Tensor:
        """Add an array to the data that the next ``send`` copies. Returns its device tensor, valid
        from that ``send`` until the following one."""
        if self.shares_memory:  # a plan's arrays may be read-only, about which torch warns
            return torch.from_numpy(values if values.flags.writeable else values.copy())
        begin, end = self._end, self._end + values.nbytes
        if end > self._room:  # for example hundreds of prefix-cached prompts in one step
            return self._platform.upload(values)
        self._end = _aligned(end)
        buffer = self._pinned[self._turn].numpy()
        buffer[begin:end] = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        place = self._place[begin:end].view(torch.from_numpy(np.empty(0, values.dtype)).dtype)
        return place.view(values.shape)

    def send(self) -> None:
        """Start the copy of the whole buffer to the device."""
        if self.shares_memory:
            return
        end = min(self._end, self._room)
        pinned = self._pinned[self._turn]
        self._place[:end].copy_(pinned[:end], non_blocking=True)
        self._copied[self._turn].record()


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT

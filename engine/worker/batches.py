"""From a StepPlan to a staged buffer to the tensors of a forward pass, built on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.layers.batch import ForwardBatch, Wanted
from engine.messages.step import EMPTY, PADDING, Column, DraftPart, NewSeq, StepPlan
from engine.sample.edits import SamplingSpec
from engine.sample.sampler import DraftRows, Draws
from engine.worker.platform import Platform
from engine.worker.slots import LiveSeqs, Slots
from kernels import AttentionMeta
from kernels import slots as on_slots
from kernels.slots import UNKNOWN, Inputs

MAX_ROOMS = 256  # sizes of steps that are remembered
ASCENDING: Column = np.arange(1 << 14, dtype=np.int32)
ASCENDING.flags.writeable = False


class PlanRows(NamedTuple):
    """The rows of a plan, or some of them: slots, first positions, token counts, which sample,
    and the drafts among the counted tokens. Read-only: they share the plan's columns."""

    slots: Column
    starts: Column
    counts: Column
    samples: Column
    drafts: DraftPart | None = None

    @classmethod
    def of(cls, plan: StepPlan, vocab_size: int) -> PlanRows:
        """All rows of a plan. A draft that is no token of the vocabulary is padding."""
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
    """Where each token of the step is: slot, position, and where its row begins."""

    slots: NDArray[np.intp]  # [N]
    positions: NDArray[np.int64]  # [N]
    query_start: NDArray[np.int32]  # [S + 1]


class Extent(NamedTuple):
    """Bounds of a step's attention, as the host knows them; a graph takes the largest possible."""

    num_decodes: int
    max_query_len: int
    max_seq_len: int
    is_mixed: bool = False  # whatever sequences fit; see ``AttentionMeta``


class Read(NamedTuple):
    """Tokens whose hidden states are read, on the device."""

    tokens: torch.Tensor  # [R] int64, rows of the batch
    seqs: torch.Tensor  # [R] int64, the sequence of each
    seq_lens: torch.Tensor  # [R] int32: keys that each sees


ReadColumns = tuple[NDArray[np.int64], NDArray[np.int64], Column]  # as the host has them


class Picked(NamedTuple):
    """What a step that is launched call by call reads and draws, on the device."""

    slots: torch.Tensor  # [R] int32, of the rows that draw
    positions: torch.Tensor  # [R] int32: where each token will stand
    drafts: torch.Tensor | None  # [R] int32, see ``DraftRows.judged``
    read: Read | None  # None: every token draws one


class Room(NamedTuple):
    """Device memory of a step of S sequences and N tokens: the columns that the host sends, and the
    inputs made from them."""

    num_seqs: int
    num_tokens: int
    step: DeviceColumns
    inputs: Inputs
    prepare: Callable[[], None]  # makes the inputs


class Staged(NamedTuple):
    """A step that was sent to the device."""

    rows: PlanRows
    tokens: StepTokens
    room: Room
    draws: Draws
    picked: Picked | None  # None: rows have one token each, as many as a graph holds
    changes: Changes | None
    mixed: int  # tokens of the graph that it is for, 0: none
    filled: bool  # it is made up with padding to be recorded, see ``Recorder.mixed_size``

    @property
    def step(self) -> DeviceColumns:
        return self.room.step


class Batches:
    """Sends steps to the device and builds their inputs there, at addresses that never change."""

    def __init__(
        self,
        platform: Platform,
        slots: Slots,
        live: LiveSeqs,
        staging: Staging,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self._slots = slots
        self._batch_invariant = batch_invariant
        self._live = live
        self._staging = staging
        num_seqs, num_tokens = len(staging.device.slots), len(staging.device.host_ids)
        self.max_num_tokens = num_tokens  # of a step
        self._inputs = Inputs(
            input_ids=platform.zeros((num_tokens,), torch.int32),
            positions=platform.zeros((num_tokens,), torch.int64),
            cache_slots=platform.zeros((num_tokens,), torch.int64),
            seq_lens=platform.zeros((num_seqs,), torch.int32),
            block_tables=platform.zeros((num_seqs, slots.state.block_tables.shape[1]), torch.int32),
        )
        self._rooms: dict[tuple[int, int], Room] = {}

    def stage(
        self,
        rows: PlanRows,
        plan: StepPlan | None = None,
        specs: Sequence[SamplingSpec] = (),
        *,
        padded: int = 0,
        mixed: int = 0,
        filled: int = 0,
    ) -> Staged:
        """Send these rows, and with a plan all that it changes: one copy.

        ``specs``: those of the plan's new sequences. padded: these rows have one token each, and
        are padded to this many. mixed: they are for a graph of this many tokens; see
        ``mixed_room``. filled: they are padded to this many tokens; those after the last belong to
        no sequence.
        """
        tokens = locate(rows)
        num_tokens = max(len(tokens.slots), padded, filled)
        host = self._staging.open(max(num_tokens, mixed))
        self._fill(host, rows, tokens, padded)
        if mixed:  # sequences of no tokens; the tokens after the last belong to none
            num, end = len(rows.counts), self._most_seqs(mixed)
            host.slots[num:end] = -1
            host.query_start[num + 1 : end + 1] = len(tokens.slots)
        if padded:
            draws, picked = _padded_draws(host, rows, padded), None
        else:
            draws, starts, read = draws_of(rows, tokens)
            host.draw_starts[: len(starts)] = starts
            picked = self._pick(draws, read)
        changes = None if plan is None else stage_changes(plan, specs, self._staging)
        self._staging.send()
        room = self._room(max(len(rows.counts), padded), num_tokens)
        return Staged(rows, tokens, room, draws, picked, changes, mixed, filled > 0)

    def mixed_room(self, num_tokens: int) -> Room:
        """The room of any step of this many tokens at most: as many sequences as there can be
        then."""
        return self._room(self._most_seqs(num_tokens), num_tokens)

    def build(self, room: Room, extent: Extent) -> ForwardBatch:
        """The forward pass of a step; every hidden state is wanted."""
        room.prepare()
        inputs = room.inputs
        meta = AttentionMeta(
            query_start=room.step.query_start,
            seq_lens=inputs.seq_lens,
            block_tables=inputs.block_tables,
            positions=inputs.positions,
            slots=inputs.cache_slots,
            block_size=self._slots.block_size,
            num_decodes=extent.num_decodes,
            max_query_len=extent.max_query_len,
            max_seq_len=extent.max_seq_len,
            batch_invariant=self._batch_invariant,
            is_mixed=extent.is_mixed,
        )
        return ForwardBatch(inputs.input_ids, inputs.positions, meta)

    def build_picked(self, staged: Staged, read: Read | None) -> ForwardBatch:
        """The forward pass of a staged step, of the hidden states that are read."""
        rows, room = staged.rows, staged.room
        num_decodes, longest = room.num_seqs, 1
        if room.num_tokens > room.num_seqs:
            num_decodes, longest = int((rows.counts != 1).argmax()), int(rows.counts.max())
        lens = rows.starts + rows.counts
        batch = self.build(room, Extent(num_decodes, longest, int(lens.max())))
        if read is not None:
            batch.wanted = wanted_rows(batch.attn, read.tokens, read.seqs, read.seq_lens)
        return batch

    def seq_lens(self, num_seqs: int) -> torch.Tensor:
        """Position of the next token of each sequence, as computed by `build`."""
        return self._inputs.seq_lens[:num_seqs]

    def _most_seqs(self, num_tokens: int) -> int:
        return min(num_tokens, len(self._staging.device.slots))

    def _room(self, num_seqs: int, num_tokens: int) -> Room:
        """Made once for each size: while the same requests decode, steps have the same."""
        room = self._rooms.get((num_seqs, num_tokens))
        if room is None:
            if len(self._rooms) >= MAX_ROOMS:
                self._rooms.clear()
            ends = (num_tokens, num_tokens, num_tokens, num_seqs, num_seqs)
            columns = zip(self._inputs, ends, strict=True)
            inputs = Inputs(*(column[:end] for column, end in columns))
            step = self._staging.device.of(num_seqs, num_tokens)
            described = (step.slots, step.query_start, step.host_ids)
            prepare = on_slots.preparation(
                self._slots.state, *described, inputs, self._slots.block_size
            )
            room = Room(num_seqs, num_tokens, step, inputs, prepare)
            self._rooms[num_seqs, num_tokens] = room
        return room

    def _fill(self, host: HostColumns, rows: PlanRows, tokens: StepTokens, padded: int) -> None:
        """Fill the fixed columns of the buffer, less those of the draw."""
        num = len(rows.counts)
        host.slots[:num] = rows.slots
        self._fill_ids(host.host_ids[: len(tokens.slots)], rows, tokens)
        host.query_start[: num + 1] = tokens.query_start
        if padded:
            host.slots[num:padded] = -1
            host.host_ids[num:padded] = UNKNOWN
            host.query_start[num : padded + 1] = np.arange(num, padded + 1)
            host.draw_slots[:num] = np.where(rows.samples, rows.slots, -1)
            host.draw_slots[num:padded] = -1
            host.draw_starts[: padded + 1] = np.arange(padded + 1)

    def _fill_ids(self, ids: Column, rows: PlanRows, tokens: StepTokens) -> None:
        """Fill in the token ids that the scheduler sent; only the device knows the others."""
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
            read=None if read is None else Read(*(add(column) for column in read)),
        )


def wanted_rows(
    attn: AttentionMeta, rows: torch.Tensor, sequences: torch.Tensor, seq_lens: torch.Tensor
) -> Wanted:
    """Want these tokens. rows [R] int64, the sequence of each [R] int64, and how many keys it sees,
    itself included, [R] int32."""
    count = len(rows)
    return Wanted(
        rows,
        AttentionMeta(
            query_start=torch.arange(count + 1, dtype=torch.int32, device=rows.device),
            seq_lens=seq_lens,
            block_tables=attn.block_tables[sequences],  # whole: kernels are compiled for the width
            positions=attn.positions[rows],
            slots=attn.slots[rows],
            block_size=attn.block_size,
            num_decodes=count,
            max_query_len=1,
            max_seq_len=attn.max_seq_len,
            batch_invariant=attn.batch_invariant,
        ),
    )


def locate(rows: PlanRows) -> StepTokens:
    """Flatten the rows to tokens."""
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
    """Which tokens of a step are drafts: the last of each row that has some."""
    counts = drafts.counts
    starts = np.cumsum(counts) - counts
    within = np.arange(int(counts.sum())) - np.repeat(starts, counts)
    places: NDArray[np.int64] = np.repeat(query_start[1:] - counts, counts) + within
    return places


def draws_of(rows: PlanRows, tokens: StepTokens) -> tuple[Draws, Column, ReadColumns | None]:
    """The draws of a step, where those of each row start [S + 1], and the tokens that are read for
    them; ``None``: each token is.

    A row draws after its last known token and after each of its drafts.
    """
    num_seqs, ends, lengths = len(rows.counts), tokens.query_start[1:], rows.starts + rows.counts
    num_drawing = int(np.count_nonzero(rows.samples))
    if num_drawing == len(tokens.slots):  # one token each, and all draw
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
        # From k + 1 drafts and a token of its own down to 1.
        remaining = (rows.drafts.counts[seqs] + 1) - (_ascending(len(seqs)) - starts[seqs])
        ends, lengths = ends - remaining + 1, (lengths - remaining + 1).astype(np.int32)
        draft_rows = _draft_rows(rows.drafts, rows.samples, starts, seqs)
    draws = Draws(seqs, rows.slots[seqs], lengths, draft_rows)
    if len(seqs) == len(tokens.slots):
        return draws, starts, None
    return draws, starts, (ends.astype(np.int64) - 1, seqs.astype(np.int64), lengths)


def _ascending(count: int) -> Column:
    """0, 1, ..., only to be read."""
    return ASCENDING[:count] if count <= len(ASCENDING) else np.arange(count, dtype=np.int32)


def _draft_rows(
    drafts: DraftPart, samples: Column, starts: Column, seqs: NDArray[np.integer]
) -> DraftRows:
    most = int(drafts.counts.max(initial=0))
    table = np.full((len(samples), most), PADDING, dtype=np.int32)
    for row, own in enumerate(drafts.by_row()):
        table[row, : len(own)] = own
    index = np.arange(len(seqs)) - starts[seqs]  # of the row among those of its sequence
    judged = np.full(len(seqs), PADDING, dtype=np.int32)
    has_draft = index < drafts.counts[seqs]
    judged[has_draft] = table[seqs[has_draft], index[has_draft]]
    before = np.where(np.arange(most) < index[:, None], table[seqs], PADDING).astype(np.int32)
    return DraftRows(judged, before)


def _padded_draws(host: HostColumns, rows: PlanRows, padded: int) -> Draws:
    """A row of logits for every row, padding included."""
    positions = np.zeros(padded, dtype=np.int32)
    positions[: len(rows.counts)] = rows.starts + rows.counts
    slots = host.draw_slots[:padded].copy()
    return Draws(_ascending(padded), slots, positions, is_padded=True)


class Changes(NamedTuple):
    """Changes of a plan to the table, on their way to the device."""

    newcomers: list[torch.Tensor]  # slots, then a value for each column of a slot; []: no sequence
    blocks: list[torch.Tensor]  # slots, places in block tables, blocks; [] for none


def stage_changes(plan: StepPlan, specs: Sequence[SamplingSpec], staging: Staging) -> Changes:
    """Pack what a plan changes; a new sequence begins where its first row does. ``specs``: those of
    the new sequences."""
    newcomers, blocks = [], []
    if plan.new:
        starts = dict(zip(plan.slots.tolist(), plan.starts.tolist(), strict=True))
        newcomers = [staging.add(column) for column in _columns_of(plan.new, specs, starts)]
    if len(plan.block_ids):
        deltas = (plan.block_slots, plan.block_indices, plan.block_ids)
        blocks = [staging.add(column.astype(np.int32, copy=False)) for column in deltas]
    return Changes(newcomers, blocks)


def _columns_of(
    new: Sequence[NewSeq], specs: Sequence[SamplingSpec], starts: dict[int, int]
) -> tuple[NDArray[np.generic], ...]:
    """Slots, and in the order of ``Slots.apply`` what is new of them."""
    temperature, top_p, min_p = (
        np.array(column, dtype=np.float64)
        for column in zip(*((s.temperature, s.top_p, s.min_p) for s in specs), strict=True)
    )
    top_k: Column = np.array([spec.top_k for spec in specs], dtype=np.int32)
    seeds = np.array([spec.seed for spec in specs], dtype=np.uint64).view(np.int64)
    return (
        np.array([seq.slot for seq in new], dtype=np.int64),
        np.array([starts[seq.slot] for seq in new], dtype=np.int32),
        np.array([seq.num_prompt for seq in new], dtype=np.int32),
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
    )


ALIGNMENT = 16  # of what a kernel reads, or it is compiled a second time
EXTRA_BYTES = 1 << 20  # next to the fixed columns


class HostColumns(NamedTuple):
    """A step's columns as the host fills them. S sequences, N tokens."""

    slots: Column  # [S], -1: padding
    draw_slots: Column  # [S]: the slot again where one token is drawn, else -1
    draw_starts: Column  # [S + 1]: rows of the draw of each sequence
    query_start: Column  # [S + 1]
    host_ids: Column  # [N]: input ids, UNKNOWN where only the device knows them


class DeviceColumns(NamedTuple):
    """Columns on the device, at addresses that never change."""

    slots: torch.Tensor
    draw_slots: torch.Tensor
    draw_starts: torch.Tensor
    query_start: torch.Tensor
    host_ids: torch.Tensor

    def of(self, num_seqs: int, num_tokens: int) -> DeviceColumns:
        """The columns of a step of this size."""
        ends = (num_seqs, num_seqs, num_seqs + 1, num_seqs + 1, num_tokens)
        return DeviceColumns(*(column[:end] for column, end in zip(self, ends, strict=True)))


class Staging:
    """One pinned buffer for each step in flight, and its place on the device.

    Fixed columns come first, the token ids last of them; any other data of a step follows
    right after the ids in use. A buffer is filled again only when its last copy is done. Where
    host and device are one, the buffer is the place, and nothing is copied.
    """

    def __init__(
        self, platform: Platform, max_num_seqs: int, max_num_tokens: int, num_buffers: int
    ) -> None:
        self._platform = platform
        self._shares = platform.shares_memory
        counts = (max_num_seqs, max_num_seqs, max_num_seqs + 1, max_num_seqs + 1, max_num_tokens)
        begins, end = [], 0
        for count in counts:
            begins.append(end)
            end = _aligned(end + 4 * count)
        self._ids_begin = begins[-1]
        self._room = end + EXTRA_BYTES
        num_buffers = 1 if self._shares else num_buffers
        self._pinned = [platform.pinned(self._room) for _ in range(num_buffers)]
        self._place = (
            self._pinned[0] if self._shares else platform.zeros((self._room,), torch.uint8)
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
        """The columns of the next step, for the host to fill."""
        self._turn = (self._turn + 1) % len(self._pinned)
        self._copied[self._turn].synchronize()
        self._end = _aligned(self._ids_begin + 4 * num_tokens)
        return self._host[self._turn]

    def add(self, values: NDArray[np.generic]) -> torch.Tensor:
        """Add values to the copy; returns where they lie from ``send`` to the next ``send``."""
        if self._shares:  # a plan's columns may be read-only, and torch warns of such
            return torch.from_numpy(values if values.flags.writeable else values.copy())
        begin, end = self._end, self._end + values.nbytes
        if end > self._room:  # hundreds of long prompts found in the cache at once
            return self._platform.upload(values)
        self._end = _aligned(end)
        buffer = self._pinned[self._turn].numpy()
        buffer[begin:end] = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        place = self._place[begin:end].view(torch.from_numpy(np.empty(0, values.dtype)).dtype)
        return place.view(values.shape)

    def send(self) -> None:
        """Send everything with one copy."""
        if self._shares:
            return
        end = min(self._end, self._room)
        pinned = self._pinned[self._turn]
        self._place[:end].copy_(pinned[:end], non_blocking=True)
        self._copied[self._turn].record()


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT

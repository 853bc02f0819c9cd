"""StateCopies: copies recurrent states between the slots of sequences and blocks of the KV pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.kv.layout import RecurrentState
from engine.messages.step import SnapshotPart, StepPlan, StepResult
from engine.models.model import Model
from engine.worker.batches import PlanRows
from engine.worker.feature import Feature, Machine
from engine.worker.memory import pool_bytes, tensors_of
from engine.worker.slots import LiveSeqs
from kernels.bodies import triton_for


class Piece(NamedTuple):
    """Bytes of a state, and the bytes of a snapshot's block that hold them."""

    states: torch.Tensor  # [rows, n], the same bytes of all rows
    pool: torch.Tensor  # [blocks, n], the same bytes of all blocks
    block: int  # index of the block in the snapshot

    def place(self) -> tuple[int, ...]:
        """Its address in the states and bytes between their rows, the same in the pool, its number
        of bytes, and its block."""
        ends = (self.states.data_ptr(), self.states.stride(0), self.pool.data_ptr())
        return (*ends, self.pool.stride(0), self.states.shape[1], self.block)


class StateCopies(Feature):
    """Loads snapshots of recurrent states into slots before a step, and saves others after it.

    A block that has held a snapshot is zeroed before KV is written to it: attention multiplies
    values of positions that are not written yet, so they must not be NaN."""

    part = "snapshots"
    waits_for_part = True
    device_attributes = ("_machine", "_pieces", "_pool")

    def __init__(self) -> None:
        self._pieces: Pieces
        self._pool: list[torch.Tensor] = []
        self._is_used = np.zeros(0, dtype=np.bool_)  # by block: held a snapshot since it held KV
        self._part: SnapshotPart | None = None  # of the newest step
        self._is_saved: dict[int, np.ndarray] = {}  # by step, for each of its snapshots
        self._step = 0  # number of the newest step

    def is_needed_by(self, model: Model) -> bool:
        return any(isinstance(layer, RecurrentState) for layer in model.cache_spec)

    def attach(self, machine: Machine) -> None:
        self._machine = machine

    def allocate(self, num_blocks: int) -> None:
        machine = self._machine
        self._is_used = np.zeros(num_blocks, dtype=np.bool_)
        self._pool = list(pool_bytes(tensors_of(machine.kv), num_blocks))
        states = [rows_of_bytes(one) for layer in machine.states for one in layer]
        self._pieces = Pieces(divide(states, self._pool), machine.platform.upload)

    def begin(self, plan: StepPlan, live: LiveSeqs) -> Mapping[int, str] | None:
        part = self._part = plan.snapshots
        self._step = plan.step
        if part is not None and part.load_slots.size:
            self._load(part)
        if part is not None and part.save_slots.size:
            self._is_saved[plan.step] = np.zeros(len(part.save_slots), dtype=np.bool_)
        self._clean(plan)
        return None

    def follow(self, rows: PlanRows) -> None:
        part = self._part
        if part is None or not part.save_slots.size:
            return
        places = np.isin(part.save_slots, rows.slots).nonzero()[0]
        if places.size:
            self._save(part, places)
            self._is_saved[self._step][places] = True

    def report(self, result: StepResult) -> None:
        is_saved = self._is_saved.pop(result.step, None)
        if is_saved is not None and not is_saved.all():
            result.lost_snapshots = (~is_saved).nonzero()[0].astype(np.int32)

    def filled(self, blocks: Sequence[int], is_state: Sequence[bool]) -> None:
        self._is_used[blocks] = is_state

    # -- helpers

    def _load(self, part: SnapshotPart) -> None:
        """Copy snapshots into the first copy of their slots' states."""
        slots = self._upload(part.load_slots)
        blocks = self._upload(part.load_blocks).view(-1, part.num_blocks)
        state = self._machine.slots.state
        self._pieces.load(slots * state.num_copies, blocks)
        assert state.copy is not None
        state.copy[slots] = 0

    def _save(self, part: SnapshotPart, places: np.ndarray) -> None:
        """Copy the states of slots into snapshots. ``places``: which of the plan's snapshots. If
        the last tokens of one are rejected drafts, its content is arbitrary."""
        blocks_of = part.save_blocks.reshape(-1, part.num_blocks)[places]
        slots, lengths = map(self._upload, (part.save_slots[places], part.save_lengths[places]))
        blocks = self._upload(blocks_of.reshape(-1)).view(-1, part.num_blocks)
        state = self._machine.slots.state
        assert state.copy is not None
        num_back = state.num_computed[slots] - lengths
        copies = (state.copy[slots] - num_back).remainder(state.num_copies)
        self._pieces.save(slots * state.num_copies + copies, blocks)
        self._is_used[blocks_of] = True

    def _clean(self, plan: StepPlan) -> None:
        """Zero the blocks that the plan gives to sequences, if they have held a snapshot."""
        blocks = plan.block_ids
        if not blocks.size or not (is_used := self._is_used[blocks]).any():
            return
        blocks = blocks[is_used]
        self._is_used[blocks] = False
        indices = self._upload(blocks)
        for pool in self._pool:
            pool.index_fill_(0, indices, 0)

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        return self._machine.platform.upload(values.astype(np.int64))


class Pieces:
    """All pieces of a snapshot, and copies of them. ``upload``: copies an array to the device."""

    def __init__(
        self, pieces: Iterable[Piece], upload: Callable[[np.ndarray], torch.Tensor]
    ) -> None:
        self._all = list(pieces)
        # [pieces, 6], as `kernels.triton.copies` reads them: addresses, and numbers of bytes
        table = np.array([piece.place() for piece in self._all], dtype=np.int64).reshape(-1, 6)
        common = int(np.gcd.reduce(table[:, :5], axis=None)) if len(table) else 1
        self._word = next(size for size in (8, 4, 2, 1) if common % size == 0)
        table[:, 4] //= self._word
        self._table = upload(table)

    def load(self, rows: torch.Tensor, blocks: torch.Tensor) -> None:
        """Copy snapshots into rows [n] of the state tensors. blocks [n, blocks of a snapshot]."""
        self._copy(rows, blocks, to_blocks=False)

    def save(self, rows: torch.Tensor, blocks: torch.Tensor) -> None:
        """Copy rows [n] of the state tensors into snapshots. blocks [n, blocks of a snapshot]."""
        self._copy(rows, blocks, to_blocks=True)

    def _copy(self, rows: torch.Tensor, blocks: torch.Tensor, *, to_blocks: bool) -> None:
        if (triton := triton_for(rows)) is not None:
            triton.copy_pieces(self._table, self._word, rows, blocks, to_blocks=to_blocks)
            return
        for own, of_states in on_host(self._all, rows, blocks):
            source, target = (of_states, own) if to_blocks else (own, of_states)
            target[:] = source


def on_host(
    pieces: Sequence[Piece], rows: torch.Tensor, blocks: torch.Tensor
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Views of the same bytes of a snapshot and of a state, for all pieces and rows. Copying one to
    the other takes a tenth of the time of torch's indexed copies."""
    arrays = [(piece.states.numpy(), piece.pool.numpy(), piece.block) for piece in pieces]
    for row, own in zip(rows.tolist(), blocks.tolist(), strict=True):
        for states, pool, block in arrays:
            yield pool[own[block]], states[row]


def rows_of_bytes(states: torch.Tensor) -> torch.Tensor:
    """A state tensor as [rows, bytes] uint8."""
    return states.view(len(states), -1).view(torch.uint8)


def divide(states: Sequence[torch.Tensor], pool: Sequence[torch.Tensor]) -> Iterator[Piece]:
    """Divide the bytes of a request's states among the blocks of a snapshot, in order."""
    block, places = 0, [(one, 0) for one in pool]
    for state in states:
        begin, size = 0, state.shape[1]
        while begin < size:
            if not places:
                block, places = block + 1, [(one, 0) for one in pool]
            memory, first = places.pop(0)
            num = min(size - begin, memory.shape[1] - first)
            yield Piece(state[:, begin : begin + num], memory[:, first : first + num], block)
            begin += num
            if first + num < memory.shape[1]:
                places.insert(0, (memory, first + num))

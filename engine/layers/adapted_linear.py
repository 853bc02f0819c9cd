"""A linear layer whose outputs are changed by the adapters of a step's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

import kernels
from engine.layers.interface import Linear
from kernels.cpu.low_rank import change_of
from kernels.cpu.matmul.outputs import Scores
from kernels.cpu.threads import num_threads
from kernels.low_rank import NO_SLOT, AdaptedRows, DeviceTable, LowRankProduct, ProductTable


class StepAdapters:
    """The adapter slots of the tokens of a step, in memory at fixed addresses. All layers of a
    model share it."""

    def __init__(
        self, most_tokens: int, make_rows: Callable[[int], AdaptedRows] = AdaptedRows
    ) -> None:
        """make_rows: makes rows, of at most this many, that the layers' device can read."""
        self.is_active = False
        """True while a step is computed or recorded in which rows may have adapters."""
        self.changes_output = False
        """True if adapters of such a step may change the output layer."""
        self._make_rows = make_rows
        self._all, self._wanted = make_rows(most_tokens), make_rows(most_tokens)
        self._most_ranks = 0
        self._num_tokens = self._num_wanted = 0

    def clear(self) -> None:
        """Prepare for a step without adapters."""
        self.is_active = False

    def fill(
        self,
        slots: NDArray[np.integer],
        wanted: NDArray[np.integer] | None,
        num_threads: int,
        *,
        changes_output: bool = True,
    ) -> None:
        """Prepare for a step with adapters. slots: the adapter slot of each token [N], -1 for none;
        wanted: the tokens that the end of the model computes [R], ``None`` for all;
        changes_output: False if none of these adapters changes the output layer."""
        self.is_active, self.changes_output = True, changes_output
        self._all.fill(slots, num_threads, self._most_ranks)
        self._num_tokens, self._num_wanted = len(slots), -1
        if wanted is not None:
            self._wanted.fill(slots[wanted], num_threads, self._most_ranks)
            self._num_wanted = len(wanted)

    def make_room(self, num_ranks: int) -> None:
        """Provide later steps with memory for this many ranks of a row."""
        self._most_ranks = max(self._most_ranks, num_ranks)

    @contextmanager
    def only(self, slot: int, num_rows: int) -> Iterator[None]:
        """Context in which layers compute this many rows of one adapter slot, -1 for none."""
        before = self._wanted, self._num_wanted
        if self.is_active:
            self._wanted, self._num_wanted = self._make_rows(num_rows), num_rows
            self._wanted.fill(np.full(num_rows, slot), num_threads(), self._most_ranks)
        try:
            yield
        finally:
            self._wanted, self._num_wanted = before

    def slots(self, num_rows: int) -> NDArray[np.int64]:
        """The adapter slot of each row of a layer's inputs, -1 for none."""
        found = np.full(num_rows, NO_SLOT, dtype=np.int64)
        for slot, rows in self.of(num_rows).blocks():
            found[rows] = slot
        return found

    def of(self, num_rows: int) -> AdaptedRows:
        """The adapter slot of each row of a layer's inputs. The rows are the wanted tokens, or all
        tokens and perhaps padding. Raises ``RuntimeError`` for another number of rows."""
        if num_rows == self._num_wanted:
            return self._wanted
        if num_rows < self._num_tokens:
            raise RuntimeError(
                f"a layer with adapters has {num_rows} rows in a step of {self._num_tokens} tokens"
            )
        return self._all


class OutputRows:
    """The adapter slots of the rows of the output layer."""

    def __init__(self, step: StepAdapters) -> None:
        self._step = step

    @property
    def is_active(self) -> bool:
        """True while rows may have adapters that change the output layer."""
        return self._step.is_active and self._step.changes_output

    def of(self, num_rows: int) -> AdaptedRows:
        """The slots of the rows of the layer's inputs."""
        return self._step.of(num_rows)

    def make_room(self, num_ranks: int) -> None:
        """Do nothing: the output layer has no gates."""


class ExpertRows:
    """The adapter slots of the rows that one expert of a mixture computes. All experts of a layer
    share it, since they compute one after the other."""

    def __init__(self) -> None:
        self.users: set[int] = set()
        """Slots whose adapters change experts of this layer."""
        self._step: StepAdapters | None = None
        self._slots = np.zeros(0, dtype=np.int64)
        self._rows = AdaptedRows(0)
        self._most_ranks = 0

    def attach(self, step: StepAdapters, most_tokens: int) -> None:
        """Use the slots in ``step``, for at most this many tokens."""
        self._step, self._rows = step, AdaptedRows(most_tokens)

    @property
    def is_active(self) -> bool:
        """True while rows may have adapters that change experts of this layer."""
        return bool(self.users) and self._step is not None and self._step.is_active

    def begin(self, num_rows: int) -> None:
        """Prepare for a mixture of this many rows."""
        if self.is_active and self._step is not None:
            self._slots = self._step.slots(num_rows)

    def choose(self, rows: torch.Tensor) -> None:
        """Prepare for an expert that computes these rows [T] of the mixture."""
        if self.is_active:
            self._rows.fill(self._slots[rows.numpy()], num_threads(), self._most_ranks)

    def of(self, num_rows: int) -> AdaptedRows:
        """The slots of the rows of an expert's inputs."""
        return self._rows

    def make_room(self, num_ranks: int) -> None:
        """Provide later steps with memory for this many ranks of a row."""
        self._most_ranks = max(self._most_ranks, num_ranks)


class Slots(Protocol):
    """The adapter slots of the rows of a layer's inputs, while ``is_active``."""

    @property
    def is_active(self) -> bool: ...
    def of(self, num_rows: int) -> AdaptedRows: ...
    def make_room(self, num_ranks: int) -> None: ...


class AdaptedLinear:
    """Adds the low-rank products of adapters to the outputs of another linear layer.

    Functions of that layer that compute more than its outputs are used only in steps without
    adapters."""

    largest: Callable[..., torch.Tensor | None]  # if the other layer has it

    def __init__(self, base: Linear) -> None:
        self.base = base
        self.in_features, self.out_features = base.in_features, base.out_features
        self._step: Slots | None = None
        self._table = ProductTable(0)
        self._wholes: dict[int, Linear] = {}  # by adapter slot
        if hasattr(base, "largest"):
            self.largest = self._largest

    def attach(self, num_slots: int, step: Slots) -> None:
        """Make a table for the products of this many adapters, and use the slots in ``step``."""
        self._table, self._step = ProductTable(num_slots), step

    def attach_device(self, table: DeviceTable) -> None:
        """Use a table in the memory of a GPU, which its owner fills."""
        self._table.on_device = table

    def put(
        self,
        slot: int,
        products: Sequence[LowRankProduct],
        records: NDArray[np.int64] | None = None,
    ) -> None:
        """Set the products of an adapter slot, () for none. records: those of the products, if they
        were made before."""
        for one in products:
            assert one.a.shape[1] == self.in_features
            assert 0 <= one.first <= self.out_features - one.num_outputs
        self._table.put(slot, products, records)
        if self._step is not None:
            self._step.make_room(sum(one.rank for one in products))

    def replace(self, slot: int, whole: Linear | None) -> None:
        """Set the layer that takes the place of the other one for rows of an adapter slot. Steps
        with such rows cannot be recorded."""
        self._wholes.pop(slot, None)
        if whole is not None:
            self._wholes[slot] = whole

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, in] -> [N, out]."""
        return self._changed(self.base(x), x)

    def gated(self, x: torch.Tensor, activation: str) -> torch.Tensor | None:
        """act(a) * b [N, out / 2], for the two halves a and b of the outputs; ``None`` if the other
        layer does not support it. Rows without an adapter have the bits of the other layer."""
        base: Any = self.base
        if not hasattr(base, "gated"):
            return None
        step, found = self._step, None
        if step is None or not step.is_active:
            found = base.gated(x, activation)
        elif base.has_gates(x, activation):
            change = change_of(x.contiguous(), self._table, step.of(len(x)))
            found = base.gated(x, activation, change)
        return found

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` [N] of the other layer's weight, [N, in]."""
        return self.base.rows(ids)

    def _changed(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add what adapters change to the outputs y [N, out] for inputs x [N, in], in place."""
        step = self._step
        if step is None or not step.is_active:
            return y
        rows = step.of(len(x))
        for slot, indices in rows.blocks() if self._wholes else ():
            if (whole := self._wholes.get(slot)) is not None:
                mine = torch.from_numpy(indices)
                y[mine] = whole(x[mine])
        return kernels.add_low_rank(y, x.contiguous(), self._table, rows)

    @property
    def _is_active(self) -> bool:
        return self._step is not None and self._step.is_active

    def _largest(self, x: torch.Tensor, *scores: Scores | None) -> torch.Tensor | None:
        """Index of the largest output of each row of x, [N] int32; ``None`` if adapters may change
        them, or if the other layer does not support it."""
        largest: Callable[..., torch.Tensor | None] = getattr(self.base, "largest")  # noqa: B009
        return None if self._is_active else largest(x, *scores)

"""Low-rank products of rows with different adapters, held to float64, on a CPU or a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kernels import reference
from kernels.low_rank import (
    AdaptedRows,
    DeviceRows,
    DeviceTable,
    LowRankProduct,
    ProductTable,
    in_panels,
)
from kernels.triton import low_rank

# Inputs, outputs of each product, ranks of each adapter's products.
CASES = (
    (96, (128, 64, 64), ((8, 8, 8), (16, 3, 0), (1, 64, 5))),
    (70, (200,), ((4,), (13,), (2,))),
    (33, (7, 70), ((1, 2), (5, 0), (0, 9))),
    (576, (1100,), ((8,), (32,), (16,))),
)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def table_of(case: tuple, dtype: torch.dtype, rng: torch.Generator) -> ProductTable:
    """Products of adapters in slots 0 to 2; those of the last one also scale and add."""
    num_in, widths, adapters = case
    table = ProductTable(len(adapters) + 1)
    for slot, ranks in enumerate(adapters):
        products, first = [], 0
        for rank, width in zip(ranks, widths, strict=True):
            if rank:
                a = torch.randn(rank, num_in, generator=rng) / num_in**0.5
                b = in_panels(torch.randn(width, rank, generator=rng).to(dtype))
                product = LowRankProduct(first, width, a.to(dtype), b, 1.5)
                if slot == 2:
                    ends = torch.randn(2, width, generator=rng)
                    product = product._replace(factors=ends[0], added=ends[1])
                products.append(product)
            first += width
        table.put(slot, products)
    return table


def rows_of(slots: torch.Tensor, num_threads: int = 1, num_ranks: int = 0) -> AdaptedRows:
    rows = AdaptedRows(len(slots))
    rows.fill(slots.numpy(), num_threads, num_ranks)
    return rows


def in_float64(
    y: torch.Tensor, x: torch.Tensor, table: ProductTable, slots: torch.Tensor
) -> torch.Tensor:
    exact = ProductTable(len(table.entries))
    for slot in range(len(table.entries)):
        wide = [
            one._replace(a=one.a.double(), panels=one.panels.double()) for one in table.of(slot)
        ]
        exact.put(slot, wide)
    return reference.add_low_rank(y.double(), x.double(), exact, rows_of(slots))


class OnDevice:
    """A table and rows in the memory of a device."""

    def __init__(self, table: ProductTable, most_rows: int, device: str) -> None:
        self.device, self._kept, entries = device, [], []
        for slot in range(len(table.entries)):
            mine = [self._moved(one) for one in table.of(slot)]
            records = torch.tensor([one.record() for one in mine], dtype=torch.int64, device=device)
            self._kept.append((mine, records))
            entries.append((len(mine), records.data_ptr()))
        sizes = [[one.rank for one in table.of(slot)] for slot in range(len(table.entries))]
        most = max(map(len, sizes)), max(rank for ranks in sizes for rank in ranks)
        self.table = ProductTable(0)
        self.table.on_device = DeviceTable(torch.tensor(entries, device=device), *most)
        self.rows = DeviceRows(most_rows, self._zeros, self._upload)

    def add(self, y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """y [N, out] with the products of the adapters in these slots [N] added."""
        self.rows.fill(slots.numpy())
        got = y.to(self.device, copy=True)
        return low_rank.add_low_rank(got, x.to(self.device), self.table, self.rows).cpu()

    def _moved(self, one: LowRankProduct) -> LowRankProduct:
        made: list[Any] = [
            part.to(self.device) if isinstance(part, torch.Tensor) else part for part in one
        ]
        return LowRankProduct(*made)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.copy()).to(self.device)


def check_products(
    case: tuple,
    dtype: torch.dtype,
    wide: torch.dtype,
    nums: tuple[int, ...],
    rng: torch.Generator,
    device: str = "cpu",
) -> None:
    """Triton adds the products of each row's adapter, whose bits are those of the row alone. wide:
    dtype of the outputs; nums: numbers of rows."""
    table, num_out = table_of(case, dtype, rng), sum(case[1])
    there = OnDevice(table, max(nums) + 3, device)
    for num in nums:
        x = torch.randn(num, case[0], generator=rng).to(dtype)
        y = torch.randn(num, num_out, generator=rng).to(wide)
        slots = torch.randint(-1, 4, (num,), generator=rng)
        got = there.add(y, x, slots)
        assert torch.equal(got[slots == -1], y[slots == -1])
        assert torch.equal(got[slots == 3], y[slots == 3])  # an adapter without such products
        error, wanted = TOLERANCE[wide], in_float64(y, x, table, slots)
        torch.testing.assert_close(got.double(), wanted, rtol=error, atol=4 * error)
        for n in {0, num - 1, num // 2}:
            alone = there.add(y[n : n + 1], x[n : n + 1], slots[n : n + 1])
            assert torch.equal(alone[0], got[n])

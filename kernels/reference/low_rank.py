"""Low-rank products in plain torch; see `kernels.low_rank`."""

from __future__ import annotations

import torch

from kernels.low_rank import AdaptedRows, ProductTable


def add_low_rank(
    y: torch.Tensor, x: torch.Tensor, table: ProductTable, rows: AdaptedRows
) -> torch.Tensor:
    """Add products to y in place; see `kernels.ops.add_low_rank`."""
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    for slot, indices in rows.blocks():
        mine = torch.from_numpy(indices).to(y.device)
        given = x[mine].to(wide)
        for product in table.of(slot):
            outputs = slice(product.first, product.first + product.num_outputs)
            total = y[mine, outputs].to(wide)
            if product.factors is not None:
                total *= product.factors.to(wide)
            if product.added is not None:
                total += product.added.to(wide)
            total += product.scale * (given @ product.a.to(wide).T) @ product.b.to(wide).T
            y[mine, outputs] = total.to(y.dtype)
    return y

"""Launch settings of batch-invariant products: a table, as kernels.tuning is for attention.

A row's sums must not depend on how many rows there are. So columns and inputs of a tile are chosen
by the weight alone, and tiles of other numbers of rows multiply by the same instruction, over the
inputs in the same order. Speed is not measured yet."""

from __future__ import annotations

from typing import NamedTuple

from kernels.tuning import PROCESSORS

ALIGNED = 16  # what sizes are multiples of where loads are as wide as they can be


class ProductTile(NamedTuple):
    """A program's share: rows of x, outputs, inputs a step; warps, loads in flight."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


# Bytes of x -> outputs a program -> inputs a step, and by rows (warps, stages). Wide tiles are for
# weights that have enough outputs to give each processor one. Per entry the instruction is one:
# sm_90's multiplies 64 rows by all columns of the tile, whichever group of four warps has them.
_Rows = dict[int, tuple[int, int]]
_TILES: dict[str, dict[int, dict[int, tuple[int, _Rows]]]] = {
    "sm_90": {
        2: {64: (64, {64: (4, 5), 128: (8, 4)}), 128: (64, {64: (4, 4), 128: (8, 4)})},
        4: {32: (32, {32: (8, 3)})},
    },
    "sm_80": {
        2: {64: (64, {64: (4, 4), 128: (8, 3)}), 128: (64, {64: (4, 3), 128: (8, 3)})},
        4: {32: (32, {32: (8, 3)})},
    },
    "gfx942": {
        2: {64: (64, {64: (4, 2)}), 128: (64, {64: (4, 2)})},
        4: {32: (32, {32: (8, 1)})},
    },
}


def invariant_tile(arch: str, num_rows: int, weight: tuple[int, int], itemsize: int) -> ProductTile:
    """For this many rows of numbers of `itemsize` bytes. weight: its outputs and inputs."""
    num_outputs, num_inputs = weight
    table = _TILES[arch][itemsize]
    fills = [outputs for outputs in table if num_outputs >= outputs * PROCESSORS[arch]]
    outputs = max(fills, default=min(table))
    inputs, by_rows = table[outputs]
    rows = next((rows for rows in by_rows if num_rows <= rows), max(by_rows))
    if num_inputs % ALIGNED:  # loaded number by number: more warps share what that takes
        rows = max(by_rows)
    return ProductTile(rows, outputs, inputs, *by_rows[rows])

"""Launch settings of products with quantised weights, in a table by architecture and dtype.

They are chosen so that compiled kernels do not spill registers; speed has not been measured yet.
"""

from __future__ import annotations

from typing import NamedTuple

from kernels.tuning import PROCESSORS

MAX_SPLITS = 16
# Fewer steps over the inputs do not justify a split of the sums.
LEAST_STEPS = 4

# With more rows of 16-bit numbers, a weight is dequantised once and torch's library multiplies.
# This writes and reads 2 more bytes per weight: 4 / 3.05e12 s on an H100. A row costs the library 2
# / 783e12 s per weight, and about twice as much in the product that unpacks, which waits for tensor
# cores at each group. Both are equal at 510 rows (at 260 on an A100 with 1.9e12 bytes and 250e12
# operations per second; the limit is the same there, since it saves scratch memory).
_MOST_FUSED_ROWS = 512
# For float32, which tensor cores do not support: few rows are already compute-bound.
_MOST_FUSED_ROWS_OF_FLOAT32 = 64


class QuantTile(NamedTuple):
    """The tile that one program computes (rows of x, outputs), and its warps and pipeline
    stages."""

    rows: int
    outputs: int
    warps: int
    stages: int


# Bytes of an element of x -> rows -> (outputs, warps, stages); the first entry with enough rows is
# used, otherwise the last. Unpacking a weight takes about as many instructions as multiplying it by
# 64 rows, where programs of many rows pay off. Float32 is for comparison; more rows would spill.
_TILES = {
    "sm_90": {
        2: {16: (64, 4, 4), 32: (64, 4, 4), 64: (64, 4, 4), 128: (128, 8, 3)},
        4: {16: (32, 8, 1)},
    },
    "sm_80": {
        2: {16: (64, 4, 4), 32: (64, 4, 3), 64: (64, 4, 3)},
        4: {16: (32, 8, 1)},
    },
    "gfx942": {
        2: {16: (64, 4, 2), 32: (64, 4, 2), 64: (64, 4, 2)},
        4: {16: (32, 8, 1)},
    },
}
# Replacements if each element of x is gathered by its own address (experts with sorted inputs),
# which takes registers.
_GATHERED_TILES = {"sm_90": {2: {16: (64, 4, 4), 32: (64, 4, 4), 64: (64, 8, 4)}}}


def most_fused_rows(itemsize: int) -> int:
    """Returns the largest number of rows for which a product unpacks weights in registers. For more
    rows, the weight is dequantised to memory first. itemsize: bytes of an element of x."""
    return _MOST_FUSED_ROWS if itemsize == 2 else _MOST_FUSED_ROWS_OF_FLOAT32


def product_tile(
    arch: str, num_rows: int, itemsize: int, *, is_gathered: bool = False
) -> QuantTile:
    """Returns the tile for a product with `num_rows` rows of x. itemsize: bytes of an element of x;
    is_gathered: True if x's columns are read in another order, one element at a time."""
    table = _TILES[arch][itemsize]
    if is_gathered:
        table = _GATHERED_TILES.get(arch, {}).get(itemsize, table)
    rows = next((rows for rows in table if num_rows <= rows), max(table))
    return QuantTile(rows, *table[rows])


def num_splits(arch: str, tile: QuantTile, num_programs: int, num_steps: int) -> int:
    """Returns into how many parts the `num_steps` steps over the inputs are split, so that the
    programs fill the device. num_programs: number of programs without a split."""
    # A processor runs one program of eight warps, or two of four. Partial sums of many rows are as
    # large as the weights, so there are no more parts.
    wanted = -(-(8 // tile.warps) * PROCESSORS[arch] // max(num_programs, 1))
    return max(1, min(wanted, num_steps // LEAST_STEPS, MAX_SPLITS))

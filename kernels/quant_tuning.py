"""Launch settings of weight-only products: a table, as kernels.tuning is for attention.

Chosen so that the compiled kernels do not spill registers; speed is not measured yet.
"""

from __future__ import annotations

from typing import NamedTuple

from kernels.tuning import PROCESSORS

MAX_SPLITS = 16
# Steps over the inputs that a split should have, to be worth its part of the sums.
LEAST_STEPS = 4

# Above this many rows of 16-bit numbers a weight is dequantised once and the library multiplies.
# That writes and reads 2 bytes a weight more: 4 / 3.05e12 s on an H100. A row costs the library 2 /
# 783e12 s a weight, and about twice that a product that unpacks: it waits for tensor cores at each
# group, where the library does not. They are even at 510 rows (on an A100, of 1.9e12 bytes and
# 250e12 operations a second, at 260, but there, too, steps of this many rows get by without
# scratch).
_MOST_FUSED_ROWS = 512
# Of float32, which tensor cores do not take: arithmetic is the bound from few rows on.
_MOST_FUSED_ROWS_OF_FLOAT32 = 64


class QuantTile(NamedTuple):
    """A program's share: rows of x, outputs, warps, loads in flight."""

    rows: int
    outputs: int
    warps: int
    stages: int


# Bytes of x -> rows -> (outputs, warps, stages); the first entry that holds the rows is taken, or
# the last. Unpacking a weight takes about as many instructions as multiplying it by 64 rows: more
# rows a program are worth their registers. Float32 is for comparing: more rows would spill.
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
# Instead, where each element of x is looked up by itself, as experts with sorted inputs do: the
# addresses take registers.
_GATHERED_TILES = {"sm_90": {2: {16: (64, 4, 4), 32: (64, 4, 4), 64: (64, 8, 4)}}}


def most_fused_rows(itemsize: int) -> int:
    """Rows of such numbers up to which packed weights are read by the product itself."""
    return _MOST_FUSED_ROWS if itemsize == 2 else _MOST_FUSED_ROWS_OF_FLOAT32


def product_tile(
    arch: str, num_rows: int, itemsize: int, *, is_gathered: bool = False
) -> QuantTile:
    """For this many rows of numbers of `itemsize` bytes; is_gathered: each looked up by itself."""
    table = _TILES[arch][itemsize]
    if is_gathered:
        table = _GATHERED_TILES.get(arch, {}).get(itemsize, table)
    rows = next((rows for rows in table if num_rows <= rows), max(table))
    return QuantTile(rows, *table[rows])


def num_splits(arch: str, tile: QuantTile, num_programs: int, num_steps: int) -> int:
    """Parts of the inputs, so that programs fill the device; `num_steps` are there to share.

    A processor holds one program of eight warps, or two of four. Parts of many rows are as many
    bytes as the weights: there are no more than fill it once.
    """
    wanted = -(-(8 // tile.warps) * PROCESSORS[arch] // max(num_programs, 1))
    return max(1, min(wanted, num_steps // LEAST_STEPS, MAX_SPLITS))

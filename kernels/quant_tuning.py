"""Launch settings of weight-only products: a table, as kernels.tuning is for attention.

Chosen so that the compiled kernels do not spill registers; speed is not measured yet.
"""

from __future__ import annotations

from typing import NamedTuple

from kernels.tuning import PROCESSORS

# Above so many rows a weight is dequantised once and multiplied by the library: arithmetic on the
# weights, which every block of rows repeats, would cost more than a pass over them.
MOST_FUSED_ROWS = 64
MAX_SPLITS = 16
# Steps over the inputs that a split should have, to be worth its part of the sums.
LEAST_STEPS = 4


class Tile(NamedTuple):
    """A program's share: rows of x, outputs, warps, loads in flight."""

    rows: int
    outputs: int
    warps: int
    stages: int


# Bytes of x -> rows -> (outputs, warps, stages); the first entry that holds the rows is taken, or
# the last. Float32 is for comparing: it takes no tensor core, and more rows would spill.
_TILES = {
    2: {16: (64, 4, 4), 32: (64, 4, 3), 64: (64, 4, 2)},
    4: {16: (32, 8, 1)},
}


def product_tile(num_rows: int, itemsize: int) -> Tile:
    """For so many rows of numbers of `itemsize` bytes."""
    table = _TILES[itemsize]
    rows = next((rows for rows in table if num_rows <= rows), max(table))
    return Tile(rows, *table[rows])


def num_splits(arch: str, num_programs: int, num_steps: int) -> int:
    """Parts of the inputs, so that programs fill the device; `num_steps` are there to share."""
    wanted = -(-2 * PROCESSORS[arch] // max(num_programs, 1))
    return max(1, min(wanted, num_steps // LEAST_STEPS, MAX_SPLITS))

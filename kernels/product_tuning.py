"""Launch settings of batch-invariant products, in a table by architecture, dtype and sizes.

A row's sums must not depend on the number of rows. So the outputs and inputs of a tile depend only
on the weight, and tiles of any number of rows use the same instruction and order of inputs. Speed
has not been measured yet."""

from __future__ import annotations

from typing import NamedTuple

from kernels.tuning import PROCESSORS

ALIGNED = 16  # sizes that are multiples of this allow the widest loads


class ProductTile(NamedTuple):
    """The tile that one program computes (rows of x, outputs, inputs per step), and the program's
    warps and pipeline stages."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


# Bytes of an element of x -> outputs per program -> (inputs per step, rows -> (warps, stages)).
# Wide tiles are for weights with at least one such tile per processor. All rows of an entry use one
# instruction: sm_90's multiplies 64 rows by all columns of the tile.
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
    """Returns the tile for a batch-invariant product with `num_rows` rows. weight: (outputs,
    inputs); itemsize: bytes of an element of x."""
    num_outputs, num_inputs = weight
    table = _TILES[arch][itemsize]
    fills = [outputs for outputs in table if num_outputs >= outputs * PROCESSORS[arch]]
    outputs = max(fills, default=min(table))
    inputs, by_rows = table[outputs]
    rows = next((rows for rows in by_rows if num_rows <= rows), max(by_rows))
    if num_inputs % ALIGNED:  # elements are loaded one by one, which needs more warps
        rows = max(by_rows)
    return ProductTile(rows, outputs, inputs, *by_rows[rows])

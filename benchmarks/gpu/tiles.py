"""Times every tile that may be worth writing into kernels/tuning.py."""

from __future__ import annotations

from itertools import product

import torch
from shapes import Shape, Step
from triton.runtime.errors import OutOfResources

from gpu.attention import BLOCK, calls_of, layers_of
from gpu.box import Box, Row, Rows
from kernels import tuning
from kernels.triton.launch import arch_of
from kernels.triton.tiles import kind_of

DECODE_TILES = [tuning.Tile(16, *rest) for rest in product((32, 64, 128), (2, 4, 8), (2, 3, 4, 5))]
PREFILL_TILES = [
    tuning.Tile(*sizes)
    for sizes in [
        (128, 64, 8, 3),
        (128, 64, 8, 2),
        (128, 64, 8, 4),
        (128, 64, 4, 2),
        (128, 64, 4, 3),
        (128, 128, 8, 2),
        (128, 128, 8, 3),
        (128, 32, 8, 3),
        (128, 32, 8, 5),
        (128, 32, 4, 3),
        (128, 32, 4, 4),
        (128, 16, 4, 4),
        (64, 64, 4, 3),
        (64, 64, 4, 2),
        (64, 128, 4, 2),
        (64, 128, 8, 2),
    ]
]
DECODES = [[(1, 1023)] * 64, [(1, 8191)] * 8]
PROMPTS = [[(1024, 0)] * 4, [(8192, 0)]]


def tiles(box: Box) -> Rows:
    """Microseconds of each tile on two steps, decodes then prompts; the first is what is set."""
    for model, shape in box.shapes().items():
        yield from _tried(box, model, shape, "decode")
        yield from _tried(box, model, shape, "prefill")


def _tried(box: Box, model: str, shape: Shape, kernel: str) -> Rows:
    sequences = DECODES if kernel == "decode" else PROMPTS
    if box.is_dry:
        sequences = [[(1, 20)] if kernel == "decode" else [(20, 0)]]
    steps = [Step(those, BLOCK, box.device) for those in sequences]
    all_tiles = DECODE_TILES if kernel == "decode" else PREFILL_TILES
    yield _row(model, kernel, None, [_seconds(box, shape, step) for step in steps])
    cache = steps[0].cache(shape.kv_heads, shape.head_dim, box.dtype)
    kind = kind_of(torch.empty(0, dtype=box.dtype), cache)
    for tile in all_tiles[:1] if box.is_dry else all_tiles:
        with tuning.trying(kernel, arch_of(cache), kind, tile):
            try:
                found = [_seconds(box, shape, step) for step in steps]
            except OutOfResources as error:  # does not fit a processor
                yield _row(model, kernel, tile, [str(error)[:40]] * len(steps))
                continue
        yield _row(model, kernel, tile, found)


def _seconds(box: Box, shape: Shape, step: Step) -> float:
    kept = layers_of(box, shape, step, box.dtype)
    return box.time(calls_of(box, shape, step, box.dtype, kept)).least


def _row(model: str, kernel: str, tile: tuning.Tile | None, found: list) -> Row:
    row: Row = {"model": model, "kernel": kernel, "tile": "as set" if tile is None else list(tile)}
    for number, value in enumerate(found):
        row[f"step {number}, us"] = 1e6 * value if isinstance(value, float) else value
    return row

"""What a GPU would take that is not here, from compiled kernels: python -m tools.gpu_estimate

An estimate, never a measurement. Kernels are compiled for sm_90 and taken apart (``compiled.py``);
how a launch is cut into programs follows from its arguments. Then programs are put on processors:

    a program = its tiles, one behind the other; each takes at least its own length in cycles
    a processor = as many programs as registers and shared memory hold, sharing its units
    the device  = all that are under way share the memory's bandwidth

A tile of a program is as long as its tensor-core work, its other instructions and its barriers
together, since Triton on sm_90 does not overlap them within a program; programs that share a
processor overlap. Where nothing is fetched ahead, each tile waits for memory besides.
Constants: what an H100 was measured to do (`device-h100-*.json`); an H200 has faster memory.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.shapes import SHAPES, Shape, Step
from kernels import tuning
from kernels.reference import Variant
from kernels.triton.attention_decode import decode_launches
from kernels.triton.attention_prefill import prefill_launches
from kernels.triton.launch import Launch
from tools.device_gate import DEVICES, Resources, compiling_for, resources

BLOCK = 64
PRODUCTS_A_CYCLE = 4096  # operations of a processor's tensor cores, dense, 16 bits
SCHEDULERS, LANES_A_SPECIAL = 4, 16
CACHE_BYTES = 6.5e12  # a second, of the cache that all processors share
# Fitted to what an H100 took (MEASURED, below), in cycles:
BARRIERS = 200  # of a tile: hand-overs to and from tensor cores, waits of warps for each other
FROM_CACHE, FROM_MEMORY = 500, 2600  # that a tile waits where nothing is fetched ahead
BEGIN_PROMPT, BEGIN_DECODE = 13_000, 4000  # until a program's first tile has come, and its writing
EMPTY = 800  # of a program that has nothing to do
NODE = 2e-6  # seconds from one kernel of a graph to the next, its own beginning and end included
SMALL_NODES = 4  # a layer, beside products and attention: two norms, the write, the activation
PRODUCT_OF_FLOOR = 0.85  # what a product reads of its weights' bytes, of the bandwidth
PROMPT_OF_FLOOR = 0.92  # of the speed of a large square product


class Card(NamedTuple):
    """A device. Bytes a second are those that attention has read, or would read."""

    name: str
    processors: int
    hertz: float
    bytes: float
    operations: float  # of a large product


CARDS = {
    "h100": Card("H100 SXM", 132, 1.755e9, 3.05e12, 783e12),
    "h200": Card("H200", 132, 1.755e9, 4.3e12, 790e12),
}


@dataclass(frozen=True)
class Programs:
    """A launch as a device sees it."""

    facts: Resources
    num_warps: int
    tiles: list[int]  # of each program, in the order of the grid
    tile_operations: float
    tile_bytes: float  # that a program reads
    num_readers: float  # of the same bytes at about the same time: memory gives them once

    @property
    def resident(self) -> int:
        """Programs that a processor holds."""
        return self.facts.programs(self.num_warps)

    @property
    def begin(self) -> float:
        """Cycles of a program beside its tiles."""
        assert self.facts.loop is not None, "attention multiplies in a loop"
        return BEGIN_PROMPT if self.facts.loop.warpgroup_products else BEGIN_DECODE

    def cycles(self) -> tuple[float, float]:
        """Of a tile: its length, and what it takes of a processor that others use as well."""
        loop = self.facts.loop
        assert loop is not None
        issued = loop.instructions * max(1.0, self.num_warps / SCHEDULERS)
        special = 32 * loop.special * self.num_warps / LANES_A_SPECIAL
        products = self.tile_operations / PRODUCTS_A_CYCLE
        length = max(issued, special) + BARRIERS
        if loop.warpgroup_products:
            length += products  # else they are among the instructions
        wait = FROM_CACHE if self.num_readers > 1 else FROM_MEMORY
        if self.facts.is_ahead:  # a buffer is in use, the others are on their way
            ahead = min(min(one.buffers) for one in self.facts.pipelines) - 1
            length = max(length, wait / ahead)
        else:
            length += wait
        share = loop.instructions * self.num_warps / SCHEDULERS
        return length, max(share, special, products)


def seconds(programs: Programs, card: Card) -> float:
    """From the first program to the end of the last. All under way go on at one pace."""
    length, share = programs.cycles()
    begin = programs.begin / length
    waiting = [tiles + begin if tiles else EMPTY / length for tiles in reversed(programs.tiles)]
    room, active = card.processors * programs.resident, list[float]()
    done, time = 0.0, 0.0  # tiles that one which ran all the time would have done
    while waiting or active:
        while waiting and len(active) < room:
            heapq.heappush(active, done + waiting.pop())
        num = len(active)
        pace = min(
            card.hertz / length,
            card.hertz / (share * max(1.0, num / card.processors)),
            CACHE_BYTES / (num * programs.tile_bytes),
            card.bytes * programs.num_readers / (num * programs.tile_bytes),
        )
        until = heapq.heappop(active)
        time += (until - done) / pace
        done = until
    return time


def programs_of(launch: Launch, facts: Resources, shares_cache: bool) -> Programs:
    """How this launch of attention is cut. shares_cache: programs of one head read the same keys at
    about the same time, so that memory gives them once."""
    shape, num_readers = launch.args["S"], 1.0
    if shares_cache:
        num_readers = max(1.0, launch.grid[0] / len(launch.args["seq_lens"]))
    tile_bytes = 2 * shape.KEYS * shape.D * launch.args["kv"].element_size()
    operations = 4 * shape.ROWS * shape.KEYS * shape.PAD_D
    tiles = tiles_of(launch).tolist()
    return Programs(facts, launch.num_warps, tiles, operations, tile_bytes, num_readers)


def tiles_of(launch: Launch) -> NDArray[np.int64]:
    """That each program of this launch of attention goes through, in the order of the grid."""
    shape = launch.args["S"]
    lens = launch.args["seq_lens"].numpy().astype(np.int64)
    counts = np.diff(launch.args["query_start"].numpy().astype(np.int64))
    if "work" in launch.args:
        work = launch.args["work"].numpy()
        seqs, first = work[:, 0], work[:, 1]
        new = np.minimum(counts[seqs] - first, shape.ROWS // shape.HEADS)
        ends = np.where(seqs < 0, 0, lens[seqs] - counts[seqs] + first + new)
        tiles, num_splits = -(-ends // shape.KEYS), launch.args["num_splits"]
        share = np.maximum(-(-tiles // num_splits), launch.args["min_tiles"])
        parts = [np.clip(tiles - split * share, 0, share) for split in range(num_splits)]
        return np.repeat(np.stack(parts)[:, None], launch.grid[1], axis=1).ravel()
    each = -(-lens // shape.KEYS)
    if launch.args["items"] is not None:
        items = planned(launch, each)
        each = np.concatenate([items, np.zeros(launch.grid[0] - len(items), np.int64)])
    return np.repeat(each[None], launch.grid[1], axis=0).ravel()


def planned(launch: Launch, tiles: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tiles of each item that the plan's kernel would make (``kernels/triton/shares.py``)."""
    shape, num_blocks = launch.args["S"], launch.grid[1]
    most = len(launch.args["seq_lens"]) * num_blocks
    shares = tuning.decode_shares("sm_90", most, num_blocks, 1 << 30)
    assert shares is not None
    share = max(-(-int(tiles.sum()) // shares.num), shares.least_keys // shape.KEYS)
    found = []
    for num in tiles.tolist():
        even = -(-num // max(1, -(-num // share)))
        found += [min(even, num - begin) for begin in range(0, num, max(1, even))] or [0]
    return np.array(found)


def beside(launch: Launch, card: Card) -> float:
    """Seconds of what puts parts together; a plan is made once for all layers."""
    parts: torch.Tensor | None = launch.args.get("parts")
    if parts is None:
        return 0.0
    return NODE + parts.numel() * parts.element_size() / card.bytes


class Estimator:
    """Of steps on one card; kernels are compiled once."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self._facts: dict[str, Resources] = {}

    def attention(self, shape: Shape, sequences: Sequence[tuple[int, int]]) -> float:
        """Seconds of one layer; sequences: new tokens and context of each, single tokens first."""
        step = Step(sequences, BLOCK)
        q = torch.empty(step.num_tokens, shape.heads, shape.head_dim, dtype=torch.bfloat16)
        kv = torch.empty(2, 2, shape.kv_heads, BLOCK, shape.head_dim, dtype=torch.bfloat16)
        variant, meta = Variant(scale=shape.head_dim**-0.5), step.meta()
        singles, out = meta.num_decodes, torch.empty_like(q)
        total = 0.0
        if singles:
            args = (q[:singles], kv, meta, variant, singles, out[:singles])
            total += self._seconds(lambda: decode_launches(*args), shares_cache=False)
        if singles < len(sequences):
            rest = (q, kv, meta, variant, out)
            total += self._seconds(lambda: prefill_launches(*rest), shares_cache=True)
        return total

    def _seconds(self, build: Callable[[], list[Launch]], shares_cache: bool) -> float:
        with compiling_for(DEVICES["sm_90"]):
            launches = build()
        (attend,) = (one for one in launches if "S" in one.args)
        whole = attend.args["lse"] is None
        key = str((attend.kernel.fn.__name__, attend.args["S"], attend.options(), whole))
        if key not in self._facts:
            self._facts[key] = resources(lambda: attend, DEVICES["sm_90"])[1]
        programs = programs_of(attend, self._facts[key], shares_cache)
        others = sum(beside(one, self.card) for one in launches if one is not attend)
        return seconds(programs, self.card) + others

    def step(self, shape: Shape, sequences: Sequence[tuple[int, int]]) -> float:
        """Seconds of a recorded step: layers, output layer, the choice of tokens."""
        num_tokens = sum(new for new, _ in sequences)
        layer = self.attention(shape, sequences) + self._elementwise(shape, num_tokens)
        layer += sum(self._product(num_tokens, *sizes) for sizes in shape.linears.values())
        num_rows = len(sequences)
        logits = 3 * 4 * num_rows * shape.vocab / self.card.bytes  # written, cast, read once more
        head = self._product(num_rows, shape.vocab, shape.hidden) + logits + 3 * NODE
        return shape.layers * layer + head

    def floor(self, shape: Shape, sequences: Sequence[tuple[int, int]]) -> float:
        """Seconds that bytes or operations alone take."""
        num_tokens = sum(new for new, _ in sequences)
        num_keys = sum(new + context for new, context in sequences)
        pairs = sum(new * context + new * (new + 1) // 2 for new, context in sequences)
        num_bytes = 2 * shape.num_read + shape.kv_bytes(2) * num_keys
        in_layers = shape.num_read - shape.vocab * shape.hidden
        products = 2 * num_tokens * in_layers + 2 * len(sequences) * shape.vocab * shape.hidden
        attention = 4 * shape.layers * pairs * shape.heads * shape.head_dim
        return max(num_bytes / self.card.bytes, (products + attention) / self.card.operations)

    def headline(self, shape: Shape, ideal: bool = False) -> float:
        """Seconds of 256 requests of 100 to 1,024 tokens in and out, that all come at once."""
        time = self.floor if ideal else self.step
        middle, most, num = 562, 1024, 256
        prompts = num * middle / 8192 * time(shape, [(middle, 0)] * (8192 // middle))
        decodes = 0.0
        for first in range(0, most, 128):
            running = min(num, round(num * (most - first - 64) / (most - 100)))
            decodes += 128 * time(shape, [(1, middle + first + 64)] * running)
        return prompts + decodes

    def _product(self, rows: int, out: int, inner: int) -> float:
        read = 2 * out * inner / (self.card.bytes * PRODUCT_OF_FLOOR)
        return NODE + max(read, 2 * rows * out * inner / (self.card.operations * PROMPT_OF_FLOOR))

    def _elementwise(self, shape: Shape, num_tokens: int) -> float:
        widths = 8 * shape.hidden + 3 * shape.ff + 4 * shape.heads * shape.head_dim
        return SMALL_NODES * NODE + 2 * num_tokens * widths / self.card.bytes


# What an H100 took (`device-h100-*.json`): layers of Llama-3.1-8B's attention, us; whole steps, ms.
MEASURED = {
    "decode of 1 behind 1,024": ([(1, 1023)], 8.9),
    "decode of 64 behind 1,024": ([(1, 1023)] * 64, 95),
    "decode of 256 behind 1,024": ([(1, 1023)] * 256, 360),
    "decode of 8 behind 8,192": ([(1, 8191)] * 8, 105),
    "decode of 64, one behind 100,000": ([(1, 99_999)] + [(1, 1023)] * 63, 425),
    "prompt of 1,024": ([(1024, 0)], 46),
    "prompt of 4,096": ([(4096, 0)], 359),
    "prompt of 16,384": ([(16384, 0)], 4776),
    "8 prompts of 1,024": ([(1024, 0)] * 8, 269),
    "2,048 behind 8,192": ([(2048, 8192)], 722),
    "64 behind 100,000": ([(64, 100_000)], 261),
}
STEPS = {
    "decode of 1": ([(1, 1023)], {}),
    "decode of 64": ([(1, 1023)] * 64, {"qwen3-0.6b": 3.98, "llama-3.1-8b": 9.47}),
    "decode of 256": ([(1, 1023)] * 256, {"qwen3-0.6b": 11.75, "llama-3.1-8b": 19.71}),
    "decode of 64, one behind 100,000": ([(1, 99_999)] + [(1, 1023)] * 63, {}),
    "prompt of 8,192": ([(8192, 0)], {}),
    "64 behind 100,000": ([(64, 100_000)], {}),
}
HEADLINE = {"qwen3-0.6b": 18_961, "llama-3.1-8b": 8_297}  # tokens a second
PROMPTS: dict[str, list[tuple[int, int]]] = {
    "1 x 1k": [(1024, 0)],
    "1 x 4k": [(4096, 0)],
    "1 x 16k": [(16384, 0)],
    "8 x 1k": [(1024, 0)] * 8,
    "2k after 8k": [(2048, 8192)],
    "64 after 100k": [(64, 100_000)],
    "64 decodes + 2k": [(1, 1023)] * 64 + [(2048, 0)],
}
PLACE = Path("benchmarks/gpu/expected.json")
MODELS = ("qwen3-0.6b", "llama-3.1-8b")


def layers(estimators: dict[str, Estimator]) -> str:
    """A layer of attention on each card, beside what was measured, as markdown."""
    lines = ["| attention of Llama-3.1-8B, one layer, us | H100 took | H100 | H200 |"]
    lines.append("|---|---|---|---|")
    for label, (sequences, measured) in MEASURED.items():
        found = [1e6 * e.attention(SHAPES["llama-3.1-8b"], sequences) for e in estimators.values()]
        lines.append(f"| {label} | {measured:,} | {found[0]:,.0f} | {found[1]:,.0f} |")
    return "\n".join(lines)


def steps(estimators: dict[str, Estimator]) -> str:
    """Whole steps, and the headline, as markdown."""
    lines = [
        "| step, ms | model | H100 took | H100 | H200 | of its floor |",
        "|---|---|---|---|---|---|",
    ]
    for label, (sequences, measured) in STEPS.items():
        for model in MODELS:
            shape = SHAPES[model]
            found = [1e3 * one.step(shape, sequences) for one in estimators.values()]
            floor = 1e3 * estimators["h200"].floor(shape, sequences)
            took = measured.get(model, "")
            lines.append(
                f"| {label} | {model} | {took} | {found[0]:.2f} | {found[1]:.2f} "
                f"| {100 * floor / found[1]:.0f} % |"
            )
    for model in MODELS:
        shape, num = SHAPES[model], 256 * 562
        found = [num / one.headline(shape) for one in estimators.values()]
        ideal = num / estimators["h200"].headline(shape, ideal=True)
        lines.append(
            f"| 256 requests, tokens/s | {model} | {HEADLINE[model]:,} | {found[0]:,.0f} "
            f"| {found[1]:,.0f} | {100 * found[1] / ideal:.0f} % |"
        )
    return "\n".join(lines)


def rows(estimator: Estimator) -> dict[str, dict[str, float]]:
    """What ``benchmarks/device.py`` measures, by its names for it (``benchmarks/gpu/expected.py``):
    us of a layer of attention, ms of a step and of the headline."""
    found: dict[str, dict[str, float]] = {"decode": {}, "prefill": {}}
    for model in MODELS:
        shape = SHAPES[model]
        batches = [[context] * num for context in (1024, 8192) for num in (1, 8, 64, 256)]
        for contexts in [*batches, [100_000] + [1024] * 63]:
            us = 1e6 * estimator.attention(shape, [(1, one - 1) for one in contexts])
            found["decode"][f"{model}, {len(contexts)}, {contexts[0]}"] = round(us, 1)
        for label, sequences in PROMPTS.items():
            us = 1e6 * estimator.attention(shape, sequences)
            found["prefill"][f"{model}, {label}"] = round(us, 1)
        own = found[model] = {}
        for num in (1, 64, 256):
            own[f"step, graphs, {num}"] = round(1e3 * estimator.step(shape, [(1, 1047)] * num), 2)
        own["one request alone, 1"] = round(1e3 * estimator.step(shape, [(1, 255)]), 2)
        own["256 of 100 to 1024, seed 0, 256"] = round(1e3 * estimator.headline(shape))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="what a device's run is put beside")
    options = parser.parse_args()
    estimators = {name: Estimator(card) for name, card in CARDS.items()}
    if options.write:
        found = {name: rows(estimator) for name, estimator in estimators.items()}
        PLACE.write_text(json.dumps(found, indent=1) + "\n")
        return
    print(layers(estimators), steps(estimators), sep="\n\n")


if __name__ == "__main__":
    main()

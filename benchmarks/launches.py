"""What Python spends on the Triton launches of a layer, where a step is launched call by call.

    python benchmarks/launches.py [--old CHECKOUT] [--rounds 10] [--json FILE]

No GPU is needed: kernels are compiled for an H100, and a stand-in for the driver launches nothing,
so what is measured is what comes before it: tiles chosen, arguments bound, the compiled kernel
found. Linear layers are left out. A layer is that of Qwen3 0.6B (16 query and 8 key heads of 128):
two norms with their sums, the write of keys and values, attention, the activation; a step has 28
layers, which share what is worked out once a step.

    decodes     64 sequences of 1,000 tokens: attention in one launch
    one decode  of 8,000 tokens: keys are split, and their parts merged
    a chunk     of 100 tokens beside 8 decodes: both kernels of attention

--old: another checkout is measured in the same run, in turn with this one, which is first
alternating. Figures are microseconds a layer, the least of all rounds, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LAYERS, HIDDEN, FF = 28, 1024, 3072
NUM_HEADS, KV_HEADS, DIM, PAGE = 16, 8, 128, 64
STEPS_A_TURN = 12
STEPS = {
    "decodes": [(1, 999)] * 64,
    "one decode": [(1, 7999)],
    "a chunk": [(1, 999)] * 8 + [(100, 0)],
}


def measure() -> None:
    """In a process of one checkout: a turn for each line that comes."""
    import torch

    stand_in_for_the_driver()
    torch.set_num_threads(1)
    with torch.inference_mode():
        layers = {name: layer_of(sequences) for name, sequences in STEPS.items()}
        for step in layers.values():
            step()  # compiles
        print("@ready", flush=True)
        take_turns(layers)


def take_turns(layers: dict[str, Callable[[], None]]) -> None:
    for _ in sys.stdin:
        told = {}
        for name, step in layers.items():
            best = float("inf")
            for _ in range(STEPS_A_TURN):
                began = time.perf_counter()
                step()
                best = min(best, time.perf_counter() - began)
            told[name] = best / LAYERS * 1e6
        print("@" + json.dumps(told), flush=True)


def stand_in_for_the_driver() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import CompiledKernel

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int = 0) -> int:
            return 0

    def loaded(kernel: Any) -> None:
        kernel.module = kernel.function = 1
        kernel._run = lambda *arguments: None

    triton.runtime.driver.set_active(Driver())
    CompiledKernel._init_handles = loaded


def layer_of(sequences: Sequence[tuple[int, int]]) -> Callable[[], None]:
    """A step of LAYERS layers over sequences of so many tokens behind so many."""
    import torch

    import kernels.triton as bodies
    from kernels import AttentionMeta
    from kernels.reference import HeadNorm, Rope, Variant

    counts = [new for new, _ in sequences]
    lengths = [new + context for new, context in sequences]
    num_tokens = sum(counts)
    half = {"dtype": torch.bfloat16}
    x, weight = torch.empty(num_tokens, HIDDEN, **half), torch.empty(HIDDEN, **half)
    residual = torch.empty_like(x)
    qkv = torch.empty(num_tokens, (NUM_HEADS + 2 * KV_HEADS) * DIM, **half)
    kv = torch.empty(2, 2, KV_HEADS, PAGE, DIM, **half)
    gate_up = torch.empty(num_tokens, 2 * FF, **half)
    rope = Rope(torch.empty(8192, DIM), False)
    norm = HeadNorm(torch.empty(DIM, **half), torch.empty(DIM, **half), 1e-6, False)
    variant, heads = Variant(DIM**-0.5), (NUM_HEADS, KV_HEADS, DIM)
    columns = {
        "query_start": torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "block_tables": torch.zeros(len(counts), 128, dtype=torch.int32),
        "positions": torch.zeros(num_tokens, dtype=torch.int64),
        "slots": torch.zeros(num_tokens, dtype=torch.int64),
    }
    sizes = {"block_size": PAGE, "num_decodes": sum(new == 1 for new in counts)}
    sizes |= {"max_query_len": max(counts), "max_seq_len": max(lengths)}

    def step() -> None:
        meta = AttentionMeta(**columns, **sizes)
        for _ in range(LAYERS):
            bodies.add_rms_norm(x, residual, weight, 1e-6)
            q = bodies.qkv_rope_write(qkv, kv, meta, heads, rope, norm)
            bodies.paged_attention(q, kv, meta, variant)
            bodies.add_rms_norm(x, residual, weight, 1e-6)
            bodies.act_mul(gate_up, "silu")

    return step


class Child:
    """A process of one checkout."""

    def __init__(self, checkout: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child"],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def turn(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        told: dict[str, float] = json.loads(self._read())
        return told

    def _read(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                return line[1:]
        raise SystemExit("a process that measures has ended")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--old", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measure()
        return
    import machine

    checkouts = {"this": ROOT} | ({"old": args.old.resolve()} if args.old else {})
    children = {side: Child(checkout) for side, checkout in checkouts.items()}
    best: dict[str, dict[str, float]] = {side: {} for side in children}
    for number in range(args.rounds):
        for side in sorted(children, reverse=bool(number % 2)):
            for name, micros in children[side].turn().items():
                best[side][name] = min(micros, best[side].get(name, micros))
    for child in children.values():
        child.close()
    rows = []
    for name in STEPS:
        row = {"step": name} | {side: round(found[name], 1) for side, found in best.items()}
        if args.old:
            row["ratio"] = round(best["this"][name] / best["old"][name], 3)
        rows.append(row)
        print(row)
    if args.json:
        about = {"machine": machine.describe(), "unit": "us of Python a layer", "rows": rows}
        args.json.write_text(json.dumps(about | {"rounds": args.rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()

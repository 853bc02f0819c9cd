"""Measures the KV cache that models with windows hold while a request decodes, without weights.

    python benchmarks/kv_memory.py [MODEL ...] [--context 32768] [--block-size 16] [--json FILE]

The engine's scheduler and KV manager serve one request. The worker has no model, but reports KV
blocks that were freed too early. *Needed* are the keys and values that the layers still read, to
the byte; *one group* is the cache of all layers for all tokens. Models are known by their published
sizes.
"""

from __future__ import annotations

import argparse
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

from figures import keep, print_table

from engine.config.sched import SchedulerConfig
from engine.kv.layout import KVLayout, LayerCache, PagedKV, SharedKV, make_layout, one_group
from engine.kv.manager import KVManager
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest
from engine.sched.policies import POLICIES
from engine.sched.scheduler import Scheduler
from policylab.verify.fake import DigestWorker, token_after

NUM_IN_FLIGHT = 2  # steps, as on a GPU
TOKEN_BUDGET = 2048


def paged(num_kv_heads: int, head_dim: int, window: int = 0, **more: int) -> PagedKV:
    """A layer with 16-bit keys and values."""
    sizes = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "dtype_bytes": 2}
    return PagedKV(**sizes, window=window, **more)


def mixed(num: int, local: PagedKV, period: int, full: PagedKV | None = None) -> list[LayerCache]:
    """``num`` layers like ``local``; every ``period``-th has full attention."""
    full = full or paged(local.num_kv_heads, local.head_dim)
    return [local if (index + 1) % period else full for index in range(num)]


MIMO_FULL = paged(4, 192, value_dim=128)
GEMMA_3N = mixed(20, paged(2, 256, 512), 5)
GEOMETRIES: dict[str, list[LayerCache]] = {
    "Gemma-3-27B": mixed(62, paged(16, 128, 1024), 6),
    "gpt-oss-20b": mixed(24, paged(8, 64, 128), 2),
    "Mistral-7B-v0.1": [paged(8, 128, 4096)] * 32,
    "Gemma-3-270M": mixed(18, paged(1, 256, 512), 6),
    "Gemma-3-4B": mixed(34, paged(4, 256, 1024), 6),
    "Gemma-2-9B": mixed(42, paged(8, 256, 4096), 2),
    "Gemma-3n-E4B": [
        *GEMMA_3N,
        *(SharedKV(source=18 if (index + 1) % 5 else 19) for index in range(20, 35)),
    ],
    "Ministral-8B": mixed(36, paged(8, 128, 32768), 4),
    "Phi-3-mini-4k": [paged(32, 96, 2047)] * 32,
    "Command-R7B": mixed(32, paged(8, 128, 4096), 4),
    "OLMo-3-7B": mixed(32, paged(32, 128, 4096), 4),
    "OLMo-3-32B": mixed(64, paged(8, 128, 4096), 4),
    "MiMo-V2-Flash": [MIMO_FULL, *mixed(48, paged(8, 192, 128, value_dim=128), 6, MIMO_FULL)[1:]],
    "Llama-4-Scout": mixed(48, paged(8, 128, 8192, is_chunked=True), 4),
}


@dataclass(frozen=True)
class Held:
    """Bytes of the KV cache of one request, in the decode step in which it wastes most."""

    model: str
    context: int
    block_size: int
    num_groups: int
    held: int
    needed: int
    one_group: int

    @property
    def waste(self) -> float:
        """Held bytes that are not needed, as a share of the needed ones."""
        return self.held / self.needed - 1


def measure(model: str, context: int, block_size: int = 16) -> Held:
    """Decode two blocks of tokens after ``context`` tokens. Raises ``RuntimeError`` if a block was
    freed while a layer still needed it."""
    layers = GEOMETRIES[model]
    max_model_len = context + 2 * block_size + 1
    layout = make_layout(
        layers,
        block_size=block_size,
        max_num_batched_tokens=TOKEN_BUDGET,
        max_model_len=max_model_len,
    )
    one_block = one_group(layers, block_size).block_bytes

    def at(num_tokens: int, num_blocks: int) -> Held:
        return Held(
            model,
            context,
            block_size,
            len(layout.groups),
            num_blocks * layout.block_bytes,
            sum(needed(layer, num_tokens) for layer in layers),
            -(-num_tokens // block_size) * one_block,
        )

    used = decode(layout, block_size, context, max_model_len)
    return max((at(*each) for each in used), key=lambda held: held.waste)


def needed(layer: LayerCache, num_tokens: int) -> int:
    """Bytes of the keys and values that the last of these tokens reads in a layer."""
    if not isinstance(layer, PagedKV):
        return 0
    if layer.is_chunked:
        num_tokens = (num_tokens - 1) % layer.window + 1
    return layer.needed_bytes * min(num_tokens, layer.window or num_tokens)


def decode(
    layout: KVLayout, block_size: int, context: int, max_model_len: int
) -> list[tuple[int, int]]:
    """The tokens and the KV blocks of a request in each decode step after ``context`` tokens, from
    its first token on."""
    num_blocks = (-(-max_model_len // block_size) + 1) * len(layout.groups) + 1
    kv = KVManager(num_blocks, block_size, groups=layout.groups)
    config = SchedulerConfig(
        max_num_batched_tokens=TOKEN_BUDGET, max_num_seqs=1, max_model_len=max_model_len
    )
    scheduler = Scheduler(config, kv, POLICIES["fcfs"](), clock=float)
    windows = [-group.window if group.is_chunked else group.window for group in layout.groups]
    worker = DigestWorker(num_blocks, block_size, windows=windows)
    known, num_new = list(range(context)), 2 * block_size
    params = SamplingParams(max_tokens=num_new)
    scheduler.add_request(
        AddRequest("0", known, params, max_tokens=num_new, seed=0, arrival_time=0.0)
    )
    used: list[tuple[int, int]] = []
    in_flight: deque = deque()
    while scheduler.has_unfinished_requests():
        plan = scheduler.schedule()
        if plan.num_tokens == 1 and len(known) > context:
            used.append((int(plan.starts[0]) + 1, sum(kv.num_used)))
        in_flight.append((plan, worker.launch(plan)))
        if len(in_flight) < NUM_IN_FLIGHT and not plan.is_empty:
            continue
        for outputs in scheduler.update_from_output(*in_flight.popleft()).values():
            for token in outputs.token_ids:
                if token != token_after(known):
                    raise RuntimeError(f"token {len(known)} is wrong: its KV was freed too early")
                known.append(token)
    return used


def row(held: Held) -> list[str]:
    """Cells of the printed table."""
    mib = [f"{num / 2**20:,.1f}" for num in (held.held, held.needed, held.one_group)]
    saved = f"{held.one_group / held.held:.2f}"
    return [held.model, str(held.num_groups), *mib, f"{100 * held.waste:.1f} %", saved]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(GEOMETRIES))
    parser.add_argument("--context", type=int, default=32768, help="tokens before the decodes")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--json", type=Path, help="keep the figures here")
    args = parser.parse_args()
    if unknown := set(args.models) - set(GEOMETRIES):
        parser.error(f"{', '.join(sorted(unknown))}: unknown; known: {', '.join(GEOMETRIES)}")
    found = [measure(name, args.context, args.block_size) for name in args.models or GEOMETRIES]
    head = ("model", "groups", "held MiB", "needed MiB", "one group", "waste", "one group / held")
    title = f"one request after {args.context:,} tokens, blocks of {args.block_size}"
    print_table(title, head, map(row, found))
    keep(args.json, held=list(map(asdict, found)))


if __name__ == "__main__":
    main()

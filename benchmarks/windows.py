"""Measures what sliding windows are worth at 32k tokens: KV, step times (estimates) and requests.

    python benchmarks/windows.py [--json FILE]

* KV of one request while it decodes, as `kv_memory.py` measures it, next to one group of layers
  that all keep all tokens.
* Floors of decode steps on an H100, from its measured ceilings (`results/`) and the sizes of the
  models: the larger of bytes / bandwidth and operations / peak. Nothing is computed.
* Simulated service of Gemma-3-27B: the engine's scheduler on a virtual clock, step times by the
  data sheet of an H200, one pool of memory. The one-group engine gets the same requests.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import kv_memory
import numpy as np
from figures import keep, print_table
from kv_memory import GEOMETRIES, Held

from engine.config.kv_groups import FULL
from engine.kv.layout import KVLayout, make_layout, one_group
from engine.models.families import FAMILIES
from engine.models.spec import DecoderSpec
from engine.models.work import Shapes
from engine.worker.roofline import Ceilings
from policylab.sim.datasheet import DEVICES, OF_BANDWIDTH, OF_FLOPS
from policylab.sim.run import Engine, Run, run
from policylab.sim.worker import StepCost
from policylab.sim.workloads import Workload, find_workload

DEVICE = Path(__file__).parent / "results" / "device-h100-2026-11-23.json"
CONTEXT = 32768
GIB = 1 << 30
CELLS = (2, 2)  # bytes of a weight, and of a number in the cache
BATCHES = (1, 8)
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {  # sizes by the names of config.json
    "Gemma-3-27B": (
        "Gemma3ForCausalLM",
        {
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "sliding_window": 1024,
            "layer_types": [
                "full_attention" if index % 6 == 5 else "sliding_attention" for index in range(62)
            ],
        },
    ),
    "Mistral-7B-v0.1": (
        "MistralForCausalLM",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "vocab_size": 32000,
            "max_position_embeddings": 32768,
        },
    ),
}
SERVED = "Gemma-3-27B"
POOL_BYTES = 64 * GIB
BLOCK_SIZE = 64
BUDGET = 2048
LOADS = (0.5, 0.8)  # arrivals relative to the rate that the one-group engine can serve
WORKLOAD = "log-uniform(prompt_tokens=(31744, 32256), output_tokens=(384, 512), num_requests={})"


def spec_of(name: str) -> DecoderSpec:
    """The decoder of a model, from its published sizes."""
    family, sizes = PUBLISHED[name]
    return FAMILIES[family](sizes)


def floors(name: str) -> dict[str, dict[str, float]]:
    """Least milliseconds of decode steps after ``CONTEXT`` tokens, by number of sequences: with the
    model's windows, and if every layer read all tokens."""
    rows = json.loads(DEVICE.read_text())["sections"]["ceilings"]["rows"]
    copy, product = (next(r["value"] for r in rows if r["what"].startswith(w)) for w in ("c", "p"))
    ceilings = Ceilings(0, copy * 1e12, product * 1e12, product * 1e12)
    spec = spec_of(name)
    full = replace(spec, layers=tuple(replace(layer, window=0) for layer in spec.layers))
    found: dict[str, dict[str, float]] = {}
    for batch in BATCHES:
        new = np.ones(batch, dtype=np.int64)
        works = {
            kind: Shapes(each).work(new, CONTEXT * new, CELLS, num_logits=batch)
            for kind, each in (("windows", spec), ("all tokens", full))
        }
        found[str(batch)] = {
            kind: 1e3 * ceilings.floor(work, "bfloat16") for kind, work in works.items()
        }
    return found


def cost_of(spec: DecoderSpec) -> StepCost:
    """Step times on an H200 by its data sheet. All requests are longer than a window."""
    device, attention = DEVICES["h200"], spec.attention
    bandwidth, flops = OF_BANDWIDTH * device.bandwidth, OF_FLOPS * device.flops
    windows = [layer.window for layer in spec.layers]
    key_bytes = 2 * attention.kv_width * CELLS[1]
    return StepCost(
        fixed=CELLS[0] * Shapes(spec).num_weights / bandwidth,
        per_seq=key_bytes * sum(windows) / bandwidth,
        per_token=(2 * Shapes(spec).num_weights + 4 * attention.q_width * sum(windows)) / flops,
        per_context=key_bytes * windows.count(0) / bandwidth,
        per_attention=4 * attention.q_width * windows.count(0) / flops,
    )


def layouts() -> dict[str, KVLayout]:
    """The layouts of the served model that are compared."""
    layers = GEOMETRIES[SERVED]
    sizes = {"block_size": BLOCK_SIZE, "max_num_batched_tokens": BUDGET, "max_model_len": CONTEXT}
    return {"windows": make_layout(layers, **sizes), "one group": one_group(layers, BLOCK_SIZE)}


def engine_of(layout: KVLayout) -> Engine:
    """The simulated engine, whose pool has ``POOL_BYTES``."""
    return Engine(
        max_num_seqs=64,
        max_num_batched_tokens=BUDGET,
        num_blocks=POOL_BYTES // layout.block_bytes,
        block_size=BLOCK_SIZE,
        depth=2,
        kv_groups=layout.groups,
        scheduler={"max_model_len": CONTEXT},
        cost=cost_of(spec_of(SERVED)),
    )


def workload(num_requests: int) -> Workload:
    """Independent requests of about 32k tokens."""
    return find_workload(WORKLOAD.format(num_requests))


def running(served: Run) -> dict[str, float]:
    """Requests that run at once in the middle half of a run's steps: mean and most."""
    assert served.steps is not None
    seqs = served.steps[:, 2]
    middle = seqs[len(seqs) // 4 : -len(seqs) // 4]
    return {"mean": float(middle.mean()), "most": float(middle.max())}


def first_tokens(served: Run) -> dict[str, float]:
    """Seconds from arrival to the first token."""
    took = served.requests.times("first") - served.requests.times("arrival")
    return {"p50": float(np.median(took)), "p99": float(np.quantile(took, 0.99))}


def service(num_requests: int = 200) -> dict[str, Any]:
    """What both engines serve: all requests at once, and arrivals at equal rates."""
    engines = {kind: engine_of(layout) for kind, layout in layouts().items()}
    assert engines["one group"].kv_groups == (FULL,)
    at_once: dict[str, Run] = {
        kind: run("fcfs", workload(num_requests), engine, rate=float("inf"), steps=True)
        for kind, engine in engines.items()
    }
    rates = {
        kind: num_requests / float(np.nanmax(served.requests.times("last")))
        for kind, served in at_once.items()
    }
    loads = {
        str(load): {
            kind: first_tokens(
                run("fcfs", workload(num_requests), engine, rate=load * rates["one group"])
            )
            for kind, engine in engines.items()
        }
        for load in LOADS
    }
    return {
        "pool_gib": POOL_BYTES / GIB,
        "running": {kind: running(served) for kind, served in at_once.items()},
        "requests_per_s": rates,
        "first_tokens_s": loads,
    }


def show(held: list[Held], steps: dict[str, Any], served: dict[str, Any]) -> None:
    head = ("model", "groups", "held MiB", "needed MiB", "one group", "waste", "one group / held")
    print_table(f"one request after {CONTEXT:,} tokens", head, map(kv_memory.row, held))
    rows = [
        [name, batch, *(f"{ms:.3g}" for ms in found.values())]
        for name, each in steps.items()
        for batch, found in each.items()
    ]
    title = f"estimates, H100: decode step after {CONTEXT:,} tokens, ms"
    print_table(title, ("model", "sequences", "with windows", "all tokens"), rows)
    rows = [
        [kind, *(f"{x:.3g}" for x in (*served["running"][kind].values(), rate))]
        + [f"{x:.3g}" for load in served["first_tokens_s"].values() for x in load[kind].values()]
        for kind, rate in served["requests_per_s"].items()
    ]
    cells = [f"first token {p}, load {load}" for load in LOADS for p in ("p50", "p99")]
    head = ("KV", "running, mean", "most", "requests/s", *cells)
    print_table(f"{SERVED}, simulated, {POOL_BYTES // GIB} GiB of KV, times in s", head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=200, help="simulated ones in each run")
    parser.add_argument("--json", type=Path, help="keep the figures here")
    args = parser.parse_args()
    held = [kv_memory.measure(name, CONTEXT, BLOCK_SIZE) for name in GEOMETRIES]
    steps = {name: floors(name) for name in PUBLISHED}
    served = service(args.requests)
    show(held, steps, served)
    keep(args.json, held=list(map(asdict, held)), floor_ms=steps, service=served)


if __name__ == "__main__":
    main()

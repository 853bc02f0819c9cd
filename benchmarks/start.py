"""Measures the seconds from the start of the process to the first token, and the memory.

    python benchmarks/start.py MODEL_DIR [--dtype bfloat16] [--rounds 5] [--kv-mib 256]

Two kinds of process run in turn: with compiled kernels in the cache, as at a user's second start,
and with an empty cache. Memory (PSS) is measured after the first token and after W1 and W3, and is
compared with the size of weights in the computing type, KV pool and 400 MiB. The pool is as small
as these loads allow, since untouched pages take no memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import compare
import machine
import roofline
from figures import keep, print_table
from pairs import in_order

OTHER_MIB = 400
MIB = 1 << 20
LOADS = ["W1", "W3"]
Run = dict[str, Any]


def runs_of(args: Namespace) -> dict[str, list[Run]]:
    """Runs of a start, by whether kernels were compiled before."""
    peer = compare.Peer(
        compare.OURS,
        "peers.metronome",
        sys.executable,
        str(args.model),
        LOADS,
        options={"kv_cache_memory_bytes": args.kv_mib * MIB},
    )
    task = Namespace(rate=1.0, kv_gib=0.0, dtype=args.dtype)
    compare.run_once(replace(peer, workloads=[]), 0, task)  # compiles what is not compiled yet
    found: dict[str, list[Run]] = {"warm": [], "cold": []}
    for number in range(args.rounds):
        for name, runs in in_order(found, number).items():
            with tempfile.TemporaryDirectory() as empty:
                # After a cold start no workload is run: it would be as fast as after a warm one.
                chosen = peer
                if name == "cold":
                    chosen = replace(peer, workloads=[], environment={"NUMBA_CACHE_DIR": empty})
                runs.append(compare.run_once(chosen, number, task))
            print(f"round {number} {name}: {runs[-1]['startup']}", flush=True)
    return found


def allowed(args: Namespace, run: Run) -> dict[str, float]:
    """MiB of weights and KV pool, and the allowed sum."""
    model, cell = roofline.Model.of(args.model), roofline.CELL[run["dtype"]]
    weights = model.num_weights * cell / MIB
    pool = run["kv_pool_tokens"] * model.kv_bytes(cell) / MIB
    return {"weights": weights, "pool": pool, "allowed": weights + pool + OTHER_MIB}


def figures(args: Namespace, found: dict[str, list[Run]]) -> dict[str, float]:
    """Medians of the runs, in seconds and MiB."""
    warm = found["warm"]

    def median(runs: list[Run], *path: str) -> float:
        values = []
        for run in runs:
            value: Any = run
            for key in path:
                value = value[key]
            values.append(value)
        return float(statistics.median(values))

    return {
        "first token, kernels compiled before, s": median(warm, "startup", "first_token_s"),
        "first token, first start ever, s": median(found["cold"], "startup", "first_token_s"),
        "memory after the first token, MiB": median(warm, "memory_at_start", "pss_mib"),
        "memory after the load, MiB": median(warm, "memory", "pss_mib"),
        "peak resident, MiB": median(warm, "memory", "peak_rss_mib"),
        **{f"{name}, MiB": value for name, value in allowed(args, warm[0]).items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="model directory")
    parser.add_argument("--dtype", help="to compute in; the engine's own choice if not given")
    parser.add_argument("--kv-mib", type=int, default=256, help="KV pool")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="keep the figures here")
    args = parser.parse_args()
    found = runs_of(args)
    shown = figures(args, found)
    dtype = found["warm"][0]["dtype"]
    title = f"{args.model.name}, {dtype}, {machine.describe()['cpu']}"
    print_table(title, ("", ""), [(name, f"{value:.4g}") for name, value in shown.items()])
    keep(args.json, dtype=dtype, figures=shown, runs=found)


if __name__ == "__main__":
    main()

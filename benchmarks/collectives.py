"""Measures the operations of two ranks of one machine, in shared memory and with gloo.

    python benchmarks/collectives.py [--rounds 2000] [--json FILE]

Two processes, each on a core of its own, add tensors of some sizes in place. Shown are medians of
rank 0, from the call to the return, of the operation alone and as one of the recorded launches of a
step. Other programs on the two cores make figures worse.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import keep, print_table

from engine.ipc.sealed_files import SealedFile
from engine.parallel import distributed
from engine.parallel.collectives import Collectives
from engine.parallel.shared import SharedCollectives, SharedMemory
from kernels.cpu.recording import Launches

SIZE = 2
BYTES = (0, 512, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGE = 1 << 18  # bytes from which there are fewer rounds
REPEATED = 50  # operations of one recording
HOST = "127.0.0.1"


def median_us(work: Callable[[], Any], rounds: int) -> float:
    """Median of the time of a call in microseconds."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter_ns()
        work()
        times.append(time.perf_counter_ns() - begin)
    return float(np.median(times)) / 1e3


def measure(ranks: Collectives, rounds: int, *, records: bool) -> list[dict[str, Any]]:
    """Measure all sizes and types. All ranks call this."""
    found: list[dict[str, Any]] = []
    for dtype in DTYPES:
        for num_bytes in BYTES:
            x = torch.zeros(num_bytes // dtype.itemsize, dtype=dtype)

            def work(x: torch.Tensor = x) -> None:
                ranks.all_reduce(x) if len(x) else ranks.barrier()

            num = rounds if num_bytes < LARGE else rounds // 20 + 1
            median_us(work, num // 10 + 1)
            row = {"dtype": str(dtype)[6:], "bytes": num_bytes, "us": median_us(work, num)}
            if records:

                def step(work: Callable[[], None] = work) -> None:
                    for _ in range(REPEATED):
                        work()

                _, launches = Launches.of(step)
                row["recorded_us"] = median_us(launches.repeat, num // REPEATED + 5) / REPEATED
            found.append(row)
    return found


def run_rank(line: Connection, handle: SealedFile, rank: int, rounds: int) -> None:
    """Main function of a rank's process: measures both kinds. Rank 0 sends the results."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    shared = SharedCollectives(handle, rank, SIZE, num_threads=1)
    results = [measure(shared, rounds, records=True)]
    if rank == 0:
        store = distributed.serve(HOST, SIZE)
        line.send(store.port)
    else:
        store = distributed.connect(HOST, line.recv(), SIZE)
    gloo = distributed.TorchCollectives(store, rank, SIZE, host=HOST)
    results.append(measure(gloo, rounds // 4, records=False))
    line.send(results)
    line.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    context, memory = multiprocessing.get_context("spawn"), SharedMemory(SIZE)
    lines = []
    for rank in range(SIZE):
        ours, theirs = context.Pipe()
        arguments = theirs, memory.handle, rank, options.rounds
        context.Process(target=run_rank, args=arguments, daemon=True).start()
        lines.append(ours)
    lines[1].send(lines[0].recv())
    shared, gloo = lines[0].recv()
    lines[1].recv()
    for line in lines:
        line.send(None)
    memory.close()
    print_table(
        f"all_reduce between {SIZE} processes, medians in us (0 bytes: barrier)",
        ("type", "bytes", "shared memory", "recorded", "gloo"),
        [
            (
                one["dtype"],
                str(one["bytes"]),
                f"{one['us']:.1f}",
                f"{one['recorded_us']:.1f}",
                f"{other['us']:.1f}",
            )
            for one, other in zip(shared, gloo, strict=True)
        ],
    )
    keep(options.json, shared=shared, gloo=gloo)


if __name__ == "__main__":
    main()

"""Measures memory and time while a model loads, from the start of the process to the first token.

    python benchmarks/load_memory.py MODEL [--base MODEL] [--kv-mib 256] [--rounds 3]
                                     [--set NAME=VALUE ...] [--json FILE]

MODEL is a GGUF file or a model directory. Memory is the proportional set size without clean pages
of files, which the system can drop; it is sampled every 10 ms in a process of its own, since that
slows the load. Its largest value should be at most the bytes of the weights in the file, the KV
pool and 400 MiB (600 MiB with a vocabulary of 262,144 or more).

Time is measured in other processes. Before each, the file's pages are dropped from the system's
cache, and the file is read once to know how long that takes; then they are dropped again. With
--base, a small model, the time should be at most that model's, the reading time and 3 s. Kernels
are compiled before anything is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import machine
from figures import keep, print_table, value_of
from measure import process_tree

MIB = 1 << 20
INTERVAL = 0.01
OTHER_MIB = 400
LARGE_VOCAB, LARGE_VOCAB_MIB = 262_144, 600
ALLOWED_SECONDS = 3.0
CHUNK = 16 * MIB
CHILD = """
import json, sys
from engine import LLM, SamplingParams
llm = LLM(**json.loads(sys.argv[1]))
params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
llm.generate([{"prompt_token_ids": list(range(10, 42))}], params)
print("ready", llm.llm_engine.session.client.decided.vocab_size, flush=True)
"""


def weight_files(model: Path) -> list[Path]:
    """The files that hold a model's weights. Raises ``ValueError`` if there are none."""
    if model.is_dir():
        found = sorted(model.glob("*.safetensors"))
    else:
        from engine.gguf.header import part_files

        found = part_files(model)
    if not found:
        raise ValueError(f"{model} has no weights")
    return found


def drop_from_cache(files: list[Path]) -> None:
    """Let the system forget the contents of files, as far as no process has them mapped."""
    for file in files:
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def reading_seconds(files: list[Path]) -> float:
    """Time to read files that are not in the system's cache, in large pieces."""
    drop_from_cache(files)
    buffer = bytearray(CHUNK)
    began = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    return time.perf_counter() - began


def held_bytes(pid: int) -> int:
    """Memory of a process tree in bytes, without clean pages of files."""
    total = 0
    for each in process_tree(pid):
        try:
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:  # it has ended meanwhile
            continue
        found = {line.partition(":")[0]: int(line.split()[1]) for line in lines}
        own = found["Pss_Anon"] + found["Pss_Shmem"]
        total += max(own, found.get("Pss_Dirty", 0))
    return total << 10


def load(
    args: argparse.Namespace, model: Path, sample: Callable[[int], None] | None = None
) -> tuple[float, int]:
    """Load a model in a fresh process and compute a token; returns the seconds that it took, and
    the size of the vocabulary. sample: called with the process id again and again meanwhile."""
    options = {
        "model": str(model),
        "kv_cache_memory_bytes": args.kv_mib * MIB,
        "max_model_len": 1024,
        "log_level": "error",
        **dict(args.set),
    }
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, json.dumps(options)], stdout=subprocess.PIPE, text=True
    )
    if sample is not None:
        while process.poll() is None:
            sample(process.pid)
            time.sleep(INTERVAL)
    assert process.stdout is not None
    vocab_size, seconds = 0, 0.0
    for line in process.stdout:
        if line.startswith("ready "):
            vocab_size, seconds = int(line.split()[1]), time.perf_counter() - began
    if process.wait() != 0 or not vocab_size:
        raise RuntimeError(f"loading {model} ended with {process.returncode}")
    return seconds, vocab_size


def memory(args: argparse.Namespace) -> dict[str, float]:
    """Largest memory during a load, and what it should not exceed, in MiB."""
    samples: list[int] = []
    _, vocab_size = load(args, args.model, lambda pid: samples.append(held_bytes(pid)))
    weights = sum(file.stat().st_size for file in weight_files(args.model)) / MIB
    other = LARGE_VOCAB_MIB if vocab_size >= LARGE_VOCAB else OTHER_MIB
    return {
        "weights, MiB": weights,
        "KV pool, MiB": args.kv_mib,
        "allowed memory, MiB": weights + args.kv_mib + other,
        "largest memory, MiB": max(samples) / MIB,
        "last memory, MiB": [each for each in samples if each][-1] / MIB,
        "samples": len(samples),
    }


def times(args: argparse.Namespace) -> dict[str, float]:
    """Medians of the seconds until a token is computed, and of reading the file."""
    files = weight_files(args.model)
    found: dict[str, list[float]] = {"reading, s": [], "ready, s": []}
    if args.base is not None:
        load(args, args.base)
        found["base is ready, s"] = []
    for _ in range(args.rounds):
        found["reading, s"].append(reading_seconds(files))
        drop_from_cache(files)
        found["ready, s"].append(load(args, args.model)[0])
        if args.base is not None:
            found["base is ready, s"].append(load(args, args.base)[0])
    medians = {name: statistics.median(values) for name, values in found.items()}
    if args.base is not None:
        least = medians["base is ready, s"] + medians["reading, s"]
        medians["allowed until ready, s"] = least + ALLOWED_SECONDS
    return medians


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="GGUF file or model directory")
    parser.add_argument("--base", type=Path, help="small model whose start is compared")
    parser.add_argument("--kv-mib", type=int, default=256, help="KV pool")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", type=value_of, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--json", type=Path, help="keep the figures here")
    args = parser.parse_args()
    load(args, args.model)  # compiles what is not compiled yet
    found = memory(args) | times(args)
    title = f"{args.model.name}, {machine.describe()['cpu']}"
    print_table(title, ("", ""), [(name, f"{value:,.1f}") for name, value in found.items()])
    keep(args.json, model=args.model.name, figures=found)
    is_slow = found["ready, s"] > found.get("allowed until ready, s", float("inf"))
    return int(is_slow or found["largest memory, MiB"] > found["allowed memory, MiB"])


if __name__ == "__main__":
    sys.exit(main())

"""Write a copy of a model directory with weights in 4 bits, for this and other engines."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from engine.config.model import ModelConfig
from engine.errors import ConfigError
from engine.hub.fetch import fetched
from engine.models.quant.directory import check_out, quantize_directory
from kernels.reference.int4 import GROUP_SIZES

SMALLEST_GROUP = 16
NAMED = 5  # modules that a message names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="DIR", help="model directory, or the name on a hub")
    parser.add_argument("out", metavar="OUT", help="directory to write; must not exist yet")
    parser.add_argument(
        "--quantization",
        choices=("int4",),
        default="int4",
        help="int4: symmetric 4-bit integers in groups of inputs, rounded to nearest (default)",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="inputs that share a scale, such as 32, 64 or 128. Default: 128, or 32 for weights "
        "whose number of inputs is no multiple of 128",
    )


def run(parsed: argparse.Namespace) -> int:
    sizes, out = _group_sizes(parsed.group_size), Path(parsed.out).expanduser()
    check_out(out)  # before a download
    config = fetched(ModelConfig(model=parsed.model), for_core=True, for_text=True)
    started, shows_progress = time.perf_counter(), sys.stderr.isatty()

    def progress(done: int, total: int) -> None:
        if shows_progress:
            end = "\n" if done == total else ""
            print(f"\r{done} of {total} matrices", end=end, file=sys.stderr, flush=True)

    found = quantize_directory(Path(config.model), out, sizes, progress)
    kept = f"; {len(found.kept)} kept plain ({_some(found.kept)})" if found.kept else ""
    print(
        f"{out}: {found.num_quantized} matrices in 4 bits, groups of "
        f"{' and '.join(map(str, found.group_sizes))}{kept}; {found.bytes_after / 1e6:,.1f} MB, "
        f"was {found.bytes_before / 1e6:,.1f} MB; {time.perf_counter() - started:.1f} s"
    )
    return 0


def _group_sizes(given: int | None) -> tuple[int, ...]:
    if given is None:
        return GROUP_SIZES
    if given < SMALLEST_GROUP or given % SMALLEST_GROUP:
        raise ConfigError(
            f"--group-size is {given}, must be a multiple of {SMALLEST_GROUP}, such as 32 or 128"
        )
    return (given,)


def _some(modules: tuple[str, ...]) -> str:
    return ", ".join(modules[:NAMED]) + (", ..." if len(modules) > NAMED else "")

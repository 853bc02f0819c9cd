"""Checks that a request's tokens and log-probabilities depend on the request alone, on a CPU.

    python tools/invariance.py [MODEL_DIR ...] [--families llama,gemma2] [--texts 2000]
                               [--isa all | --isa amx,avx512] [--threads 1,2] [--seed 0]

Random requests are first answered one by one. Then they are answered together in rounds with
random batches, chunks, cache states, preemption, drafts, recorded and plain steps, and numbers of
threads (`tests/support/company.py`), in the type of the checkpoint. Each answer must equal the
first one in every bit; otherwise it is printed with the seed, and the exit status is 1.

Families are the tiny random models of the tests; `box` is the shipped model. With --isa everything
runs once for each level of the CPU kernels, in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from e2e.tiny_models import make_tiny_model  # noqa: E402
from support.company import Company, differences  # noqa: E402

from engine.assets import BOX_MODEL  # noqa: E402
from kernels.cpu import isa  # noqa: E402

FAMILIES = "llama,gemma2,mistral-window,qwen3-moe,granite,box"


def at_each_level(levels: list[str]) -> int:
    """Run this program for each level; returns the number of levels with differences."""
    rest = [given for given in sys.argv[1:] if not given.startswith("--isa")]
    if "--isa" in sys.argv:
        rest.remove(sys.argv[sys.argv.index("--isa") + 1])
    failed = 0
    for level in levels:
        environment = {**os.environ, isa.VARIABLE: level}
        failed += subprocess.run([sys.executable, __file__, *rest], env=environment).returncode != 0
    return failed


def model_for(name: str, place: Path) -> str:
    if Path(name).is_dir():
        return name
    if name == "box":
        return str(BOX_MODEL)
    return str(make_tiny_model(name, place / name, torch.bfloat16))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", help="model directories")
    parser.add_argument("--families", default=None, help=f"default, without models: {FAMILIES}")
    parser.add_argument("--texts", type=int, default=2000, help="answers compared, of all models")
    parser.add_argument("--isa", help="levels of the CPU kernels; all: those of this processor")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.isa:
        levels = [level for level in isa.available() if level != "base"]
        return int(at_each_level(levels if args.isa == "all" else args.isa.split(",")) > 0)
    families = args.families or ("" if args.models else FAMILIES)
    names = [*args.models, *filter(None, families.split(","))]
    num_wrong = 0
    with tempfile.TemporaryDirectory() as place:
        for name in names:
            began = time.perf_counter()
            company = Company(
                path=model_for(name, Path(place)),
                num_texts=-(-args.texts // len(names)),
                threads=tuple(map(int, args.threads.split(","))),
                seed=args.seed,
            )
            num, wrong = 0, []
            for answered, found in differences(company):
                num += answered
                wrong += found
            seconds = time.perf_counter() - began
            print(
                f"{isa.LEVEL} {Path(name).name}: {num} texts, {len(wrong)} differ, {seconds:.0f} s"
            )
            for line in wrong[:10]:
                print("   ", line, flush=True)
            num_wrong += len(wrong)
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

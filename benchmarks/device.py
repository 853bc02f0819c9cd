"""Measures a GPU from its ceilings to the whole engine, in less than nine minutes.

    python benchmarks/device.py [--only ceilings,decode,...] [--json FILE] [--dry-run]
    python benchmarks/device.py --estimates

Measures bandwidth and peak operations, attention, sampler, launches, and the engine on random
weights of two published shapes, each figure next to the least possible time; `pytest -m gpu` tests
the results of kernels. Sections for windows, quantised weights, experts, draft models, grammars and
recurrent states run only if --only names them. Every section has a budget of seconds, and rows are
written at once, so that a run that is cut off loses nothing. The exit status is 1 after an error.
With --dry-run all sections run on the CPU with tiny sizes and interpreted kernels; the figures then
mean nothing. With --estimates, times of the kernels of recurrent states are estimated.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from math import inf
from pathlib import Path

# Triton decides when it is imported, the engine when it is started.
if "--dry-run" in sys.argv:
    os.environ |= {"TRITON_INTERPRET": "1", "METRONOME_INTERPRET_CUDA": "1"}

import machine
import torch
import triton
from gpu import attention, ceilings, engines, kinds, pieces, states
from gpu.box import Box
from gpu.report import Report, Section

from kernels.bodies import CPU_TENSORS

RESULTS = Path(__file__).parent / "results"
SECONDS = 520.0

# The last two take what is left.
SECTIONS = [
    Section("ceilings", 15, ceilings.ceilings),
    Section("decode", 50, attention.decodes),
    Section("prefill", 45, attention.prompts),
    Section("launches", 10, pieces.launches),
    Section("sampler", 25, pieces.samplers),
    Section("qwen3-0.6b", 110, partial(engines.of_model, "qwen3-0.6b")),
    Section("llama-3.1-8b", 150, partial(engines.of_model, "llama-3.1-8b")),
    Section("pieces", 25, pieces.pieces),
    Section("products", 40, ceilings.products),
]
# Kinds of models and of requests; only if --only names them.
KINDS = [
    Section("windows", 60, kinds.windows),
    Section("quantised", 150, kinds.quantised),
    Section("experts", 90, kinds.experts),
    Section("drafts", 60, kinds.drafts),
    Section("grammars", 60, kinds.grammars),
    Section("states", 60, states.states),
]
DRY_MODELS = [Section("tiny", 60, partial(engines.of_model, "tiny"))]


def sections_of(is_dry: bool, only: str) -> list[Section]:
    usual = [s for s in SECTIONS if "." not in s.name] + DRY_MODELS if is_dry else SECTIONS
    chosen = usual + KINDS
    names = only.split(",") if only else [s.name for s in (chosen if is_dry else usual)]
    unknown = set(names) - {section.name for section in chosen}
    if unknown:
        known = ", ".join(section.name for section in chosen)
        raise SystemExit(f"no section {', '.join(sorted(unknown))}; there are: {known}")
    chosen = [section for section in chosen if section.name in names]
    # A dry run has no budgets: all sections must be reached.
    return [section._replace(budget=inf) for section in chosen] if is_dry else chosen


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="sections, separated by commas")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of all sections together")
    parser.add_argument("--json", type=Path, default=RESULTS / "device.json")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument(
        "--estimates", action="store_true", help="of recurrent states, without a device, and exit"
    )
    args = parser.parse_args(arguments)
    if args.estimates:
        states.show_estimates()
        return 0
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --dry-run goes through everything without one")
    box = Box(is_dry=args.dry_run)
    CPU_TENSORS.go_to_triton(args.dry_run)
    about = {
        "machine": machine.describe(),
        "device": box.name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    report = Report(args.json, about)
    report.run(sections_of(args.dry_run, args.only), box, inf if args.dry_run else args.seconds)
    return 0 if report.is_sound else 1


if __name__ == "__main__":
    sys.exit(main())

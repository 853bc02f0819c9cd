"""What bits that no other request changes cost on a CPU: the default and `batch_invariant=False`.

    python benchmarks/invariance.py MODEL_DIR [--long MODEL_DIR] [--old CHECKOUT] [--rounds 6]

The workloads of `compare.py`, in alternating fresh processes, and one stream after 8,000 and
30,000 tokens, for which --long names a model with as many positions (if MODEL_DIR has fewer). In
this checkout False changes nothing on a CPU, so both sides should be as fast; --old names a
checkout in which it is another way (97046b3), and that is the other side. Figures of each model are
kept in `benchmarks/results`, with the processor's name.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import compare

OFF = "batch_invariant=false"
NEEDED = 30_000 + 208  # positions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="model directory")
    parser.add_argument("--long", type=Path, help=f"model directory, of {NEEDED} positions or more")
    parser.add_argument("--old", type=Path, help="another checkout, to compare with")
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    other = ["--variant", OFF]
    if args.old is not None:
        other = ["--old", str(args.old), "--old-option", OFF]
    common = ["--rounds", str(args.rounds), "--label", "invariance", *other]
    compare.main([str(args.model), "--workloads", "W1,W2,W3,W4", *common])
    wide = ["--workloads", "L8000,L30000", "--option", f"max_model_len={NEEDED}"]
    compare.main([str(args.long or args.model), *wide, *common])


if __name__ == "__main__":
    main()

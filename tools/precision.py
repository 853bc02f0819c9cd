"""Measures how far logits are from float32's: the engine's, and transformers' in bfloat16.

    python tools/precision.py [MODEL_DIR ...] [--families llama,mixtral,gpt2 | --families all]
                              [--dtype bfloat16] [--isa amx,avx512_bf16] [--positions 10000]
                              [--ways whole,chunks,decode,batched,cached,preempted]
                              [--ranks 2] [--json FILE]

Each text is computed in each way (`tests/support/watched.py`), and the logits after every token
are compared with those of transformers in float32 and in bfloat16, from the same directory in
bfloat16. A line for each: positions; the mean KL divergence from float32, the mean and the 99.9th
percentile of |logit - float32's|, each as a ratio to transformers' in bfloat16, with 95 % intervals
over the texts. A position that is computed again counts once, as it was computed last. What is
above 1.1 is marked, and the exit status is 1.

Families are the tiny random models that tests make; `box` is the model in the box. A directory
with a tokenizer reads this project's documentation, any other one random tokens. --isa goes through
everything once for each body of the CPU kernels, in processes of their own. --ranks computes each
model in that number of processes (tensor parallel); models that cannot be divided are left out. At
the end of each model two fresh processes answer the same requests, the second one with two stages
of a pipeline if the family is native: tokens and log-probabilities must be the same to the last
bit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import machine  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from e2e.general_models import GENERAL_CASES, make_general_model  # noqa: E402
from e2e.tiny_models import CASES, make_tiny_model  # noqa: E402
from support.fingerprint import of_a_fresh_process  # noqa: E402
from support.precision import BAR, Ratio, Texts, measure, random_texts  # noqa: E402
from support.watched import WAYS  # noqa: E402

from engine.assets import BOX_MODEL  # noqa: E402
from engine.config.model import read_model_info  # noqa: E402
from engine.errors import ConfigError  # noqa: E402
from engine.models.load import native_spec  # noqa: E402

LENGTH = 500  # tokens of a text
ISA = "METRONOME_CPU_ISA"


class Model(NamedTuple):
    """A directory of a model, and the texts that it reads."""

    name: str
    path: Path
    texts: Texts


def texts_for(path: Path, positions: int, seed: int) -> Texts:
    """Texts of this many positions: documentation if the model has a tokenizer of words."""
    info = read_model_info(path)
    length = min(LENGTH, info.max_position_embeddings)
    num = -(-positions // (length - 1))
    written = written_tokens(path)
    if len(written) < num * length:
        return random_texts(seed, num, length, info.vocab_size)
    return {f"text {i}": written[i * length : (i + 1) * length] for i in range(num)}


def written_tokens(path: Path) -> list[int]:
    """This project's documentation, none if the model knows no words."""
    if not (path / "tokenizer.json").exists():
        return []
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    text = "\n".join(page.read_text() for page in sorted(ROOT.glob("docs/**/*.md")))
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def models(args: argparse.Namespace, root: Path) -> Iterator[Model]:
    known = [*CASES, *GENERAL_CASES]
    names = [name for part in args.families for name in (known if part == "all" else [part])]
    for name in names:
        if name == "box":
            yield Model(name, BOX_MODEL, texts_for(BOX_MODEL, args.positions, args.seed))
            continue
        make = make_tiny_model if name in CASES else make_general_model
        path = make(name, root, torch.bfloat16)
        yield Model(name, path, texts_for(path, args.positions, args.seed))
    for path in args.directories:
        yield Model(path.name, path, texts_for(path, args.positions, args.seed))


def show(name: str, ratio: Ratio) -> None:
    kl, mean, high = ratio.values
    of_kl, of_mean, of_high = (f"({low:.3f} to {top:.3f})" for low, top in ratio.intervals)
    mark = "  ABOVE" if max(ratio.values) > BAR else ""
    preempted = f"  {ratio.num_preemptions} preemptions" if ratio.num_preemptions else ""
    print(
        f"{name:28} {ratio.way:10} {ratio.num_positions:6}  "
        f"KL {ratio.ours.kl:.3g}, {kl:.3f} {of_kl}  "
        f"mean {ratio.ours.mean:.3g}, {mean:.3f} {of_mean}  "
        f"p99.9 {ratio.ours.high:.3g}, {high:.3f} {of_high}{preempted}{mark}",
        flush=True,
    )


def run_here(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures all models with the kernels that this process chose."""
    options: dict[str, Any] = {"dtype": args.dtype}
    if args.ranks > 1:
        options["tensor_parallel_size"] = args.ranks
    rows: list[dict[str, Any]] = []
    isa = os.environ.get(ISA, "")
    kernels = f"{isa or 'own choice of kernels'}; ranks: {args.ranks}"
    print(f"{machine.describe()['cpu']}; dtype {args.dtype}; {kernels}")
    with tempfile.TemporaryDirectory() as root:
        for model in models(args, Path(root)):
            began = time.perf_counter()
            vocab = read_model_info(model.path).vocab_size
            try:
                ratios = measure(model.path, model.texts, vocab, args.ways, **options)
            except ConfigError as error:
                print(f"{model.name:28} left out: {error}")
                continue
            for ratio in ratios:
                show(model.name, ratio)
                rows.append({"isa": isa, "model": model.name, **as_json(ratio)})
            staged = {"pipeline_parallel_size": 2} if is_native(model.path) else {}
            one, other = (
                of_a_fresh_process(model.path, {**options, **more}) for more in ({}, staged)
            )
            rows.append({"isa": isa, "model": model.name, "is_repeatable": one == other})
            same = "answer alike" if one == other else "ANSWER OTHERWISE"
            print(f"{model.name:28} two processes {same}; {time.perf_counter() - began:.0f} s")
    return rows


def is_native(path: Path) -> bool:
    return native_spec(read_model_info(path)) is not None


def as_json(ratio: Ratio) -> dict[str, Any]:
    found = ratio._asdict()
    return (
        found
        | {key: found[key]._asdict() for key in ("ours", "theirs")}
        | {"ratios": ratio.values._asdict()}
    )


def run_each_isa(args: argparse.Namespace, arguments: list[str]) -> list[dict[str, Any]]:
    """Runs this command once for each level, in a process that chooses it."""
    rows: list[dict[str, Any]] = []
    for isa in args.isa:
        with tempfile.TemporaryDirectory() as root:
            found = Path(root) / "found.json"
            command = [sys.executable, __file__, *arguments, "--isa", "", "--json", str(found)]
            subprocess.run(command, env=os.environ | {ISA: isa}, check=False)
            if not found.exists():
                raise SystemExit(f"nothing was measured with {ISA}={isa}; see above")
            rows += json.loads(found.read_text())["rows"]
    return rows


def names_in(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def is_good(row: dict[str, Any]) -> bool:
    return row["is_repeatable"] if "is_repeatable" in row else max(row["ratios"].values()) <= BAR


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directories", nargs="*", type=Path, metavar="MODEL_DIR")
    parser.add_argument(
        "--families", type=names_in, default=[], help="of the tests' tiny models; all; box"
    )
    parser.add_argument("--dtype", default="bfloat16", help="that the engine computes in")
    parser.add_argument("--isa", type=names_in, default=[], help=f"values of {ISA}, in turn")
    parser.add_argument("--positions", type=int, default=10_000, help="of each model, at least")
    parser.add_argument("--ways", type=names_in, default=list(WAYS))
    parser.add_argument("--ranks", type=int, default=1, help="processes that compute a model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="keep the figures here")
    args = parser.parse_args(arguments)
    if unknown := set(args.ways) - set(WAYS):
        parser.error(f"--ways {', '.join(unknown)}: there are {', '.join(WAYS)}")
    if not args.families and not args.directories:
        args.families = ["all", "box"]
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rows = run_each_isa(args, arguments) if args.isa else run_here(args)
    if args.json:
        body = {"machine": machine.describe(), "dtype": args.dtype, "rows": rows}
        args.json.write_text(json.dumps(body, indent=1) + "\n")
    wrong = [row for row in rows if not is_good(row)]
    print(f"{len(rows)} rows, {len(wrong)} of them above {BAR} or not repeatable")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

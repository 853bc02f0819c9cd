"""Measures the perplexity of a text, and how far two configurations of the engine are apart.

    python tools/perplexity.py MODEL [--set quantization=int4 ...] [--text FILE] [--way whole]
                               [--against MODEL [--against-set NAME=VALUE ...]]
                               [--peer LLAMACPP_DIR] [--threads N]
                               [--tokens 4096] [--window 512] [--json FILE]

MODEL is a directory or a GGUF file. The text, by default the prose of this project's documentation,
is cut into windows that are computed one by one; the token that the model expects first (BOS) is
set before each. Every token of a window but the first counts. `--set` gives options of the engine.

`--peer` computes the same token ids by llama.cpp on the same GGUF file, from a directory in which
node-llama-cpp is installed (`benchmarks/peers/libllama.py`); the exit status is 1 if the engine's
perplexity is above 1.01 x llama.cpp's. `--against` computes them by a second model or configuration
and prints the mean KL divergence of this one from it, KL(other || this), in nats, and how often
both have the same most likely token.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import machine  # noqa: E402
import torch  # noqa: E402
from figures import value_of  # noqa: E402
from peers.libllama import LlamaCpp, used_body  # noqa: E402
from support.watched import WAYS, watch  # noqa: E402

from engine.config.model import ModelConfig  # noqa: E402
from engine.hub.fetch import fetched  # noqa: E402
from engine.text.tokenizer import load_tokenizer  # noqa: E402

BAR = 1.01
Windows = Mapping[str, list[int]]
"""Token ids by the name of a window."""
Take = Callable[[str, torch.Tensor], None]
"""Takes the name of a window and the log-probabilities after each token but its last, [N, V]."""


@dataclass
class Perplexity:
    """The perplexity of the windows that were added, and its parts."""

    windows: Windows
    each: dict[str, float] = field(default_factory=dict)
    """Nats of a window, summed over its tokens."""

    def add(self, name: str, logprobs: torch.Tensor) -> None:
        """Count a window. logprobs: [N, V], after each token but the last."""
        next_ids = torch.tensor(self.windows[name][1:])
        self.each[name] = -float(logprobs[torch.arange(len(next_ids)), next_ids].double().sum())

    @property
    def value(self) -> float:
        count = sum(len(self.windows[name]) - 1 for name in self.each)
        return math.exp(sum(self.each.values()) / count)


@dataclass
class Divergence:
    """KL divergence of one source of log-probabilities from a reference, over all positions."""

    reference: dict[str, torch.Tensor]
    nats: float = 0.0
    largest: float = 0.0
    num_same: int = 0
    num_positions: int = 0

    def add(self, name: str, logprobs: torch.Tensor) -> None:
        """Compare a window with the reference's, which is dropped. logprobs: [N, V]."""
        reference = self.reference.pop(name)
        for some, right in zip(logprobs.split(64), reference.split(64), strict=True):
            p, q = right.double(), some.double()
            each = (p.exp() * (p - q)).sum(-1)
            self.nats += float(each.sum())
            self.largest = max(self.largest, float(each.max()))
            self.num_same += int((p.argmax(-1) == q.argmax(-1)).sum())
            self.num_positions += len(each)

    def figures(self) -> dict[str, float]:
        return {
            "mean_kl": self.nats / self.num_positions,
            "largest_kl": self.largest,
            "same_top": self.num_same / self.num_positions,
        }


def by_engine(
    model: str, windows: Windows, way: str, options: Mapping[str, Any], take: Take
) -> None:
    """Compute all windows by the engine in one of the ways of ``tests/support/watched.py``."""
    directory = fetched(ModelConfig(model=model), for_core=True, for_text=False).model
    found: dict[str, dict[int, torch.Tensor]] = {name: {} for name in windows}

    def show(name: str, positions: list[int], logits: torch.Tensor) -> None:
        if name not in found:  # complete before it was preempted
            return
        found[name].update(zip(positions, logits.float().clone(), strict=True))
        num_wanted = len(windows[name]) - 1
        if len(found[name]) == num_wanted:
            rows = found.pop(name)
            take(name, torch.stack([rows[i] for i in range(num_wanted)]).log_softmax(-1))

    watch(directory, windows, WAYS[way], show, **options)
    if found:
        raise RuntimeError(f"the engine did not show all positions of {', '.join(found)}")


def by_llamacpp(peer: LlamaCpp, windows: Windows, take: Take) -> None:
    """Compute each window by llama.cpp."""
    for name, window in windows.items():
        peer.clear()
        peer.decode([(token, place, 0, True) for place, token in enumerate(window)])
        logits = [torch.from_numpy(peer.logits(i).copy()) for i in range(len(window) - 1)]
        take(name, torch.stack(logits).log_softmax(-1))


def windows_of(model: str, text: str, num_tokens: int, size: int) -> dict[str, list[int]]:
    """Cut the beginning of a text into windows of ``size`` tokens, the model's first one included.
    Raises ``SystemExit`` for a text that is too short."""
    config = fetched(ModelConfig(model=model), for_core=False, for_text=True)
    tokenizer = load_tokenizer(config)
    ids = tokenizer.encode(text, add_special_tokens=False)
    with_first = tokenizer.encode("a")
    first = with_first[:1] if with_first[0] == tokenizer.bos_token_id else []
    own = size - len(first)
    count = -(-num_tokens // size)
    if len(ids) < count * own:
        raise SystemExit(f"the text has {len(ids)} tokens; {count * own} are needed")
    return {f"window {i}": first + ids[i * own : (i + 1) * own] for i in range(count)}


def documentation() -> str:
    """The prose of this project's documentation: its pages without headings, tables and code."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    lines = (line for page in pages for line in page.read_text().splitlines())
    return "\n".join(line for line in lines if line[:1].isalpha())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Compute the windows in all requested ways; returns the figures."""
    text = documentation() if args.text is None else args.text.read_text()
    windows = windows_of(args.model, text, args.tokens, args.window)
    ours = Perplexity(windows)
    takers: list[Take] = [ours.add]
    found: dict[str, Any] = {"windows": len(windows), "window": args.window}
    if args.against is not None:
        other, kept = Perplexity(windows), dict[str, torch.Tensor]()
        takes = both([other.add, kept.__setitem__])
        by_engine(args.against, windows, args.way, dict(args.against_set), takes)
        divergence = Divergence(kept)
        takers.append(divergence.add)
    by_engine(args.model, windows, args.way, dict(args.set), both(takers))
    found["ours"] = ours.value
    if args.against is not None:
        found |= {"other": other.value, **divergence.figures()}
    if args.peer is not None:
        peer = LlamaCpp(args.peer, args.model, threads=args.threads, max_len=args.window)
        theirs = Perplexity(windows)
        by_llamacpp(peer, windows, theirs.add)
        found |= {"llama.cpp": theirs.value, "ratio": ours.value / theirs.value}
        found["body"] = used_body()
    return found


def both(takers: list[Take]) -> Take:
    """One function that gives a window's log-probabilities to all of these."""

    def take(name: str, logprobs: torch.Tensor) -> None:
        for each in takers:
            each(name, logprobs)

    return take


def show(args: argparse.Namespace, found: dict[str, Any]) -> None:
    print(machine.describe()["cpu"], *machine.describe()["features"])
    for name, value in found.items():
        print(f"{name:12} {value:.6g}" if isinstance(value, float) else f"{name:12} {value}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="model directory or GGUF file")
    parser.add_argument("--set", type=value_of, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--text", type=Path, help="file to read")
    parser.add_argument("--way", choices=WAYS, default="whole", help="see tests/support/watched.py")
    parser.add_argument("--tokens", type=int, default=4096, help="rounded up to windows")
    parser.add_argument("--window", type=int, default=512, help="tokens that are computed together")
    parser.add_argument("--peer", type=Path, help="directory in which node-llama-cpp is installed")
    parser.add_argument("--against", help="model directory or GGUF file to compare with")
    parser.add_argument(
        "--against-set", type=value_of, action="append", default=[], metavar="NAME=VALUE"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="keep the figures here")
    args = parser.parse_args()
    found = measure(args)
    show(args, found)
    if args.json:
        body = {"machine": machine.describe(), "model": Path(args.model).name, **found}
        args.json.write_text(json.dumps(body, indent=1) + "\n")
    return int(found.get("ratio", 0.0) > BAR)


if __name__ == "__main__":
    sys.exit(main())

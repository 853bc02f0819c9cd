"""Measures what the loading of LoRA adapters costs those who wait for it, and all others.

    python benchmarks/adapter_loads.py MODEL_DIR [--rank 16] [--others 1] [--rounds 7] [--json FILE]

Adapters have random weights for all linear layers. First a lone request with an adapter that is in
a slot, in the host's memory, or on disk: milliseconds to its token. Then some requests decode 400
tokens each, while every 20 steps one arrives: with an adapter that must be read from disk or, in
the other half of a round, without one. Shown is how much later the p99 of the others' tokens is.
A round counts only if other programs used less than a twentieth of a core in it.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
from adapters import FIRST, LAST, write_adapter
from figures import keep, print_table
from measure import Usage, median_interval, quantile

from engine import EngineArgs, LLMEngine, LoRARequest, SamplingParams

SLOTS, HOST, STORED = 2, 8, 24  # adapters in slots, in the host's memory, on disk
TOKENS, EVERY = 400, 20  # of a decoding request; steps between two arrivals
TRIES = 24  # lone requests
QUIET_CORES = 0.05  # that other programs may use
MOST_DISTURBED = 20  # rounds that do not count, after which all count


class Loads:
    """An engine, and adapters on disk."""

    def __init__(self, model: str, root: Path, rank: int, num_threads: int | None) -> None:
        for number in range(STORED):
            write_adapter(model, root / str(number), rank, number)
        self.adapters = [LoRARequest(str(n), n + 1, str(root / str(n))) for n in range(STORED)]
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=model,
                enable_lora=True,
                max_loras=SLOTS,
                max_cpu_loras=HOST,
                max_model_len=512,
                enable_prefix_caching=False,
                num_threads=num_threads,
                skip_tokenizer_init=True,
                log_level="error",
            )
        )
        self._rng, self._numbers = random.Random(0), itertools.count()
        self._next = itertools.cycle(self.adapters)

    def add(self, prompt: int, output: int, adapter: LoRARequest | None) -> str:
        """Add a request; returns its id."""
        name = str(next(self._numbers))
        ids = self._rng.choices(range(FIRST, LAST), k=prompt)
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": ids}, params, lora_request=adapter)
        return name

    def alone(self, adapter: LoRARequest | None) -> float:
        """Seconds to the token of a lone request."""
        began = time.perf_counter()
        self.add(16, 1, adapter)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return time.perf_counter() - began

    def first_tokens(self) -> dict[str, float]:
        """Median milliseconds to the token of a lone request, by where its adapter is."""
        for adapter in (None, *self.adapters[:4]) * 2:
            self.alone(adapter)
        by_place: dict[str, Sequence[LoRARequest]] = {
            "slot": self.adapters[3:4],
            "host": self.adapters[:4],  # each takes the slot of another
            "disk": self.adapters[4:],
        }
        return {
            place: 1e3 * statistics.median(self.alone(each[n % len(each)]) for n in range(TRIES))
            for place, each in by_place.items()
        }

    def others(self, num: int, *, reads: bool) -> list[float]:
        """Seconds between the tokens of the first of ``num`` decoding requests while others arrive.
        reads: whether these have adapters that are on disk."""
        names = [self.add(16, TOKENS, None) for _ in range(num)]
        gaps, last, step = list[float](), time.perf_counter(), 0
        while self.engine.has_unfinished_requests():
            outputs, now = self.engine.step(), time.perf_counter()
            if any(output.request_id == names[0] for output in outputs):
                gaps.append(now - last)
                last = now
            step += 1
            if step % EVERY == 0 and step < TOKENS:
                self.add(4, 1, next(self._next) if reads else None)
        return gaps[10:]


def measured(loads: Loads, num: int, rounds: int) -> dict[str, Any]:
    """p50 and p99 of others' tokens in milliseconds, and the differences of p99 by round."""
    pairs, disturbed = list[tuple[list[float], list[float]]](), 0
    for reads in (False, True):  # in which steps are recorded
        loads.others(num, reads=reads)
    while len(pairs) < rounds:
        before, began = Usage.now(), time.perf_counter()
        pair = {reads: loads.others(num, reads=reads) for reads in (False, True)}
        used, seconds = Usage.now().since(before), time.perf_counter() - began
        is_quiet = used["others_s"] + used["steal_s"] <= QUIET_CORES * seconds
        if is_quiet or disturbed >= MOST_DISTURBED:
            pairs.append((pair[False], pair[True]))
        else:
            disturbed += 1
    later = [1e3 * (quantile(read, 0.99) - quantile(plain, 0.99)) for plain, read in pairs]
    plain, read = ([gap for pair in pairs for gap in pair[side]] for side in range(2))
    return {
        "plain_ms": [1e3 * quantile(plain, share) for share in (0.5, 0.99)],
        "read_ms": [1e3 * quantile(read, share) for share in (0.5, 0.99)],
        "later_ms": statistics.median(later),
        "interval": median_interval(later),
        "disturbed": disturbed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="model directory")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--others", type=int, default=1, help="decoding requests")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, help="keep the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        loads = Loads(args.model, Path(root), args.rank, args.threads)
        first = loads.first_tokens()
        found = measured(loads, args.others, args.rounds)
    rows = [(f"first token, adapter in {place}", f"{each:.1f}") for place, each in first.items()]
    for key, what in (("plain", "requests arrive"), ("read", "adapters are read")):
        p50, p99 = found[f"{key}_ms"]
        rows.append((f"others' tokens p50, p99 while {what}", f"{p50:.1f}, {p99:.1f}"))
    low, high = found["interval"]
    rows.append(("p99 later by", f"{found['later_ms']:.1f} ({low:.1f} to {high:.1f})"))
    rows.append(("rounds that others disturbed", str(found["disturbed"])))
    title = f"{Path(args.model).name}, rank {args.rank}, {machine.describe()['cpu']}"
    print_table(title, ("", "ms"), rows)
    keep(args.json, first_token_ms=first, others=args.others, **found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures the speed-up by drafts whose rate of acceptance is given.

    python benchmarks/drafts.py MODEL_DIR [--acceptance 0.6,0.8,0.9] [--drafts 4] [--tokens 128]
                                [--rounds 5] [--json FILE]

One stream, greedy, ``batch_invariant=True``, so that the text is the same with and without drafts.
The proposer knows the text and is wrong on purpose. Two engines in one process run in turn. Next to
the speed-up stands the highest one that the costs of steps allow: a step with d drafts yields
1 + a + ... + a^d tokens on average, and its time was measured in the same run; d is the best
number. At acceptance 0 both engines should be equally fast.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
from figures import keep, print_table
from measure import median_interval

from engine import EngineArgs, LLMEngine, Request, SamplingParams
from engine.messages.step import StepResult
from engine.spec.decide import Drafts
from engine.spec.payoff import Payoff
from engine.spec.worth import Worth

PROMPT = list(range(20, 148))


class Oracle:
    """A proposer that knows the text after the prompt, and is right at a given rate."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self.acceptance = 0.0
        self._rng = random.Random(0)

    def propose(self, req: Request, num_tokens: int) -> Sequence[int]:
        coming = self.text[req.num_output : req.num_output + num_tokens]
        return [
            token if self._rng.random() < self.acceptance else (token + 1) % 1000
            for token in coming
        ]

    def release(self, req: Request) -> None:
        pass


def engine_for(model: str, resources: tuple[Drafts, ...]) -> LLMEngine:
    engine_args = EngineArgs(
        model=model,
        log_level="error",
        max_model_len=1024,
        batch_invariant=True,
        enable_prefix_caching=False,
        resources=resources,
    )
    return LLMEngine.from_engine_args(engine_args)


class Steps:
    """Seconds of decode steps, as the worker measured them, by the number of their tokens."""

    def __init__(self, engine: LLMEngine) -> None:
        self.seconds: dict[int, list[float]] = {}
        executor = engine.session.client._core.executor  # type: ignore[attr-defined]
        self._collect = executor.collect
        executor.collect = self._seen

    def _seen(self, ticket: Any) -> StepResult:
        result: StepResult = self._collect(ticket)
        if len(ticket.plan.rows) and ticket.plan.num_tokens < len(PROMPT):
            self.seconds.setdefault(ticket.plan.num_tokens, []).append(result.seconds)
        return result


def generate(engine: LLMEngine, num_tokens: int) -> tuple[list[int], float]:
    """Generate the text; returns it and the seconds from its first token to its last."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    engine.add_request("0", {"prompt_token_ids": PROMPT}, params)
    began, tokens = 0.0, []
    while engine.has_unfinished_requests():
        for output in engine.step():
            began = began or time.perf_counter()
            tokens = output.outputs[0].token_ids
    return list(tokens), time.perf_counter() - began


def allowed(acceptance: float, cost: dict[int, float], most: int) -> float:
    """The best speed-up that steps of these costs could give."""
    brings = [sum(acceptance**place for place in range(d + 1)) for d in range(most + 1)]
    return max(brings[d] * cost[1] / cost[d + 1] for d in range(most + 1) if d + 1 in cost)


def costs(engine: LLMEngine, oracle: Oracle, num_tokens: int) -> dict[int, float]:
    """Median seconds of a step by its number of tokens, up to one more than the drafts."""
    steps, text = Steps(engine), oracle.text
    oracle.acceptance = 1.0
    for _ in range(3):
        generate(engine, num_tokens)
    oracle.text = []
    generate(engine, num_tokens)
    oracle.text = text
    return {num: statistics.median(s) for num, s in steps.seconds.items() if len(s) > 3}


def drafting_engine(args: argparse.Namespace, oracle: Oracle) -> LLMEngine:
    return engine_for(
        args.model, (Drafts(args.drafts, oracle, worth=Worth(args.drafts), payoff=Payoff()),)
    )


def ratio(plain: LLMEngine, drafting: LLMEngine, oracle: Oracle, num_tokens: int) -> float:
    text, without = generate(plain, num_tokens)
    same, seconds = generate(drafting, num_tokens)
    assert same == text == oracle.text, "the text changed"
    return without / seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="model directory")
    parser.add_argument("--acceptance", default="0,0.6,0.8,0.9")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="keep the figures here")
    args = parser.parse_args()
    oracle, rows = Oracle(), []
    with engine_for(args.model, ()) as plain:
        oracle.text, _ = generate(plain, args.tokens)
        with drafting_engine(args, oracle) as engine:
            cost = costs(engine, oracle, args.tokens)
        for acceptance in map(float, args.acceptance.split(",")):
            with drafting_engine(args, oracle) as engine:  # which knows nothing of the last one
                oracle.acceptance = acceptance
                ratios = [ratio(plain, engine, oracle, args.tokens) for _ in range(args.rounds)]
            rows.append(
                {
                    "acceptance": acceptance,
                    "speed_up": statistics.median(ratios),
                    "interval": median_interval(ratios),
                    "allowed": allowed(acceptance, cost, args.drafts),
                }
            )
    shown = [
        (
            f"{row['acceptance']:g}",
            f"{row['speed_up']:.2f}",
            "{:.2f} to {:.2f}".format(*row["interval"]),
            f"{row['allowed']:.2f}",
            f"{row['speed_up'] / row['allowed']:.2f}",
        )
        for row in rows
    ]
    title = f"{Path(args.model).name}, {machine.describe()['cpu']}"
    print_table(title, ("acceptance", "speed-up", "95 %", "steps allow", "share"), shown)
    print("ms a step, by tokens:", {n: round(1e3 * s, 1) for n, s in sorted(cost.items())})
    keep(args.json, rows=rows, step_seconds=cost)
    return 0


if __name__ == "__main__":
    sys.exit(main())

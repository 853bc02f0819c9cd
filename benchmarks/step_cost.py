"""How long a step of a model takes by its sizes: a fit of `engine.sched.LinearCost`.

    python benchmarks/step_cost.py [--shape mid] [--rounds 3]

The engine serves random requests of its own accord (dummy weights, prefix cache off) and logs its
steps; the fit is over all of them. Kept in benchmarks/results/step-cost-SHAPE.json.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import machine
import numpy as np
import shapes
from workloads import random_tokens

from engine import EngineArgs, LLMEngine, SamplingParams
from engine.observe import steplog
from engine.sched.predict.cost import LinearCost, StepShape

HERE = Path(__file__).resolve().parent
NAMES = ("fixed_s", "row_s", "token_s", "context_s", "pair_s")
MAX_MODEL_LEN = 1024
MOST_LATE = 0.25  # of the expected time, from which on a step was disturbed


def serve(directory: str, log: Path, seed: int) -> None:
    """Requests of all sizes, as many at once as come to it."""
    rng = random.Random(seed)
    args = EngineArgs(
        model=directory, load_format="dummy", skip_tokenizer_init=True, dtype="float32",
        max_model_len=MAX_MODEL_LEN, max_num_seqs=64, enable_prefix_caching=False,
        step_log=log, disable_log_stats=True, log_level="error",
    )  # fmt: skip
    engine = LLMEngine.from_engine_args(args)
    waiting = 48
    while waiting or engine.has_unfinished_requests():
        if waiting and rng.random() < 0.2:
            waiting -= 1
            prompt = {"prompt_token_ids": random_tokens(rng, int(2 ** rng.uniform(4, 9)))}
            num_output = int(2 ** rng.uniform(3, 7))
            params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
            engine.add_request(str(waiting), prompt, params)
        engine.step()
    engine.shutdown()


def steps_of(log: Path) -> list[StepShape]:
    """The steps in a log that computed something, and how long they took."""
    coder, flight, steps = steplog.PlanCoder(), {}, []
    for record in steplog.StepLog(log):
        if isinstance(record, steplog.Planned):
            flight[record.step] = coder.decode(record)
        elif isinstance(record, steplog.Settled):
            steps.append(shape_of(flight.pop(record.step), record.seconds))
    return [step for step in steps if step.num_tokens]


def shape_of(plan: steplog.PlanColumns, seconds: float) -> StepShape:
    starts, counts = plan.starts.astype(np.int64), plan.counts.astype(np.int64)
    pairs = int((counts * starts + counts * (counts + 1) // 2).sum())
    sizes = (len(counts), int(counts.sum()), int((counts == 1).sum()), int(starts.sum()), pairs)
    return StepShape(*sizes, seconds)


def fit(steps: list[StepShape]) -> dict[str, Any]:
    """Coefficients. Other processes only ever add to a step's time, so what took much longer than
    expected is left out and the rest fitted again, until nothing is left out."""
    used = steps
    while True:
        cost = LinearCost(memory=10**9, every=len(used))
        for step in used:
            cost.observe(step)
        errors = [step.seconds / expected(cost, step) - 1 for step in used]
        kept = [s for s, error in zip(used, errors, strict=True) if error < MOST_LATE]
        if len(kept) == len(used):
            break
        used = kept
    return dict(zip(NAMES, (round(c, 10) for c in cost.coefficients), strict=True)) | {
        "steps": len(steps),
        "steps_used": len(used),
        "median_error": round(float(np.median(np.abs(errors))), 3),
    }


def expected(cost: LinearCost, step: StepShape) -> float:
    return cost.step_seconds(step.num_seqs, step.num_tokens, step.context, step.attention)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--shape", choices=shapes.SHAPES, default="mid")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    steps = []
    with (
        shapes.model_directory(shapes.SHAPES[asked.shape], MAX_MODEL_LEN) as directory,
        tempfile.TemporaryDirectory() as folder,
    ):
        for seed in range(asked.rounds):
            log = Path(folder, f"{seed}.log")
            serve(directory, log, seed)
            steps += steps_of(log)
    body = {"machine": machine.describe(), "shape": asked.shape, **fit(steps)}
    print(json.dumps(body, indent=1))
    kept = HERE / "results" / f"step-cost-{asked.shape}.json"
    kept.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()

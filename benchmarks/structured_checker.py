"""Measures the cost of the checker of schema keywords that grammars cannot express.

    python benchmarks/structured_checker.py MODEL_DIR [--num 32] [--tokens 96] [--rounds 7]
                                            [--before CHECKOUT] [--json FILE]

Processes with one engine each run in turn --num requests with a schema whose keywords only the
checker enforces (`uniqueItems`, `if`, `oneOf`, `not`, `contains`, `propertyNames`,
`minProperties`), with the same schema without these keywords, and without a schema. Every request
writes the same number of tokens. Then only half of the requests have the schema, and the time
between tokens of the other half is measured. With --before CHECKOUT, that checkout and this one run
a schema that needs no checker, which must not have become slower.

Prints the median of each ratio over the rounds, with 95 % intervals.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
from figures import keep, print_table
from measure import median_interval, quantile
from pairs import in_order
from schemas_for_peers import ITEM as SHORT
from structured import ratio_row, run

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
WORDS = ["north", "south", "east", "west", "up", "down"]

ITEM: dict[str, Any] = {
    **SHORT,
    "properties": {
        **SHORT["properties"],
        "sides": {"type": "array", "items": {"enum": WORDS}, "minItems": 1, "maxItems": 4},
        "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
    },
    "required": [*SHORT["required"], "sides", "counts"],
}


def plain_schema() -> dict[str, Any]:
    """More objects than a request has tokens for, so that all loads have as many."""
    return {"type": "array", "items": ITEM, "minItems": 500, "maxItems": 600}


def unchecked_schema() -> dict[str, Any]:
    """The plain schema without `counts`, whose names only a checker keeps from repeating."""
    properties = {name: each for name, each in ITEM["properties"].items() if name != "counts"}
    required = [name for name in ITEM["required"] if name != "counts"]
    item = {**ITEM, "properties": properties, "required": required}
    return {**plain_schema(), "items": item}


def checked_schema() -> dict[str, Any]:
    """``ITEM`` with keywords that the grammar cannot express."""
    own = ITEM["properties"]
    properties = {
        **own,
        "name": {**own["name"], "not": {"const": ""}},
        "size": {**own["size"], "oneOf": [{"multipleOf": 2}, {"multipleOf": 5}, {"maximum": -1}]},
        "tags": {**own["tags"], "uniqueItems": True},
        "sides": {**own["sides"], "uniqueItems": True, "contains": {"enum": WORDS[:4]}},
        "counts": {**own["counts"], "propertyNames": {"maxLength": 8}, "maxProperties": 3},
    }
    item = {
        **ITEM,
        "properties": properties,
        "if": {"properties": {"kind": {"const": "red"}}},
        "then": {"properties": {"tags": {"maxItems": 2}}},
    }
    return {**plain_schema(), "items": item, "uniqueItems": True}


SCHEMAS = {
    "checked": checked_schema,
    "plain": plain_schema,
    "unchecked": unchecked_schema,
    "before": unchecked_schema,
}


def measured(model: str, side: str, num: int, num_tokens: int) -> dict[str, float]:
    """Run one side in this process, with the schema for all requests and then for half."""
    from engine import EngineArgs, LLMEngine

    schema = SCHEMAS[side]() if side in SCHEMAS else None
    args = EngineArgs(model=model, log_level="error", max_model_len=1024, max_num_seqs=num)
    with LLMEngine.from_engine_args(args) as engine:
        run(engine, 8, [schema, None] * (num // 2))
        whole = run(engine, num_tokens, [schema] * num)
        half = run(engine, num_tokens, [schema, None] * (num // 2))
    return {
        "tokens_per_second": whole.tokens_per_second,
        "p50": quantile(half.gaps, 0.5),
        "p99": quantile(half.gaps, 0.99),
    }


def in_a_process(options: argparse.Namespace, side: str, checkout: Path) -> dict[str, float]:
    command = [sys.executable, str(HERE), options.model, "--side", side]
    command += ["--num", str(options.num), "--tokens", str(options.tokens)]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


RATIOS = {
    "throughput, checked to plain": ("tokens_per_second", "checked", "plain"),
    "throughput, unchecked to before": ("tokens_per_second", "unchecked", "before"),
    "neighbours' p99, checked to plain": ("p99", "checked", "plain"),
    "neighbours' p99, checked to none": ("p99", "checked", "none"),
    "neighbours' p50, checked to plain": ("p50", "checked", "plain"),
}


def compared(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, Any]]:
    found = {}
    for name, (what, side, other) in RATIOS.items():
        ratios = [one[side][what] / one[other][what] for one in rounds if other in one]
        if ratios:
            middle = statistics.median(ratios)
            found[name] = {"median": middle, "interval": median_interval(ratios)}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    if options.side:
        found = measured(options.model, options.side, options.num, options.tokens)
        print(json.dumps(found))
        return 0
    sides = {"checked": ROOT, "plain": ROOT, "none": ROOT}
    if options.before:
        sides |= {"unchecked": ROOT, "before": options.before}
    rounds = []
    for turn in range(options.rounds):
        order = in_order(sides, turn)
        rounds.append({side: in_a_process(options, side, path) for side, path in order.items()})
    ratios = compared(rounds)
    keep(options.json, rounds=rounds, ratios=ratios)
    show(f"{Path(options.model).name}, {machine.describe()['cpu']}", rounds, ratios)
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("model", help="model directory with a tokenizer")
    add("--num", type=int, default=32, help="requests at once")
    add("--tokens", type=int, default=96, help="output tokens of each")
    add("--rounds", type=int, default=7)
    add("--before", type=Path, help="another checkout, for the schema that needs no checker")
    add("--json", type=Path, help="keep the figures here")
    add("--side", help="one load in this process, as the benchmark calls itself")
    return parser.parse_args(argv)


def show(title: str, rounds: Sequence[Any], ratios: dict[str, dict[str, Any]]) -> None:
    rows = []
    for side in rounds[0]:
        for what, unit, scale in (("tokens_per_second", "tokens/s", 1), ("p99", "p99, ms", 1e3)):
            middle = scale * statistics.median(one[side][what] for one in rounds)
            rows.append((f"{side}, {unit}", f"{middle:.1f}"))
    rows += [ratio_row(name, ratio) for name, ratio in ratios.items()]
    print_table(title, ("", ""), rows)


if __name__ == "__main__":
    sys.exit(main())

"""Compiles random schemas that combine all keywords, and follows random instances through them.

    python tools/random_schemas.py [--first 0] [--num 500] [--instances 24]

Each seed makes a small schema and instances near to it (`tests/support/schema_makers.py`). Objects
allow further properties, and properties may come in any order. `jsonschema_rs` judges each
instance: token by token, every invalid one must be refused and 97 % of the valid ones accepted.
Refused schemas are counted by the keyword in the refusal. The exit status is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import jsonschema_rs

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from schema_suite import is_good, num_accepted, print_refusals, print_wrong  # noqa: E402
from structured.checks import Bench  # noqa: E402
from structured.suite import DRAFTS, OPENED, Group, Instance, follow  # noqa: E402

from tests.support.schema_makers import any_document, any_value  # noqa: E402

DRAFT = "draft2020-12"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0, help="seed of the first schema")
    parser.add_argument("--num", type=int, default=500, help="schemas")
    parser.add_argument("--instances", type=int, default=24, help="of each schema")
    options = parser.parse_args(argv)
    bench = Bench()
    seeds = range(options.first, options.first + options.num)
    found = [follow(bench, group(seed, options.instances), OPENED) for seed in seeds]
    compiled = [one for one in found if not one.refusal]
    accepted, valid = num_accepted(compiled)
    print(f"{len(compiled)} of {len(found)} schemas are compiled")
    print(f"of their {valid} valid instances {accepted} are accepted")
    print_refusals(found)
    print_wrong(found)
    return 0 if is_good(compiled) else 1


def group(seed: int, num: int) -> Group:
    dice = Random(seed)
    made: Any = any_document(dice)
    schema = made if isinstance(made, dict) else {"allOf": [made]}
    schema = {"$schema": DRAFTS[DRAFT], **schema}
    validator = jsonschema_rs.validator_for(schema)
    values = {json.dumps(value): value for value in (any_value(dice) for _ in range(num))}
    instances = tuple(
        Instance(text, value, validator.is_valid(value)) for text, value in values.items()
    )
    return Group(DRAFT, f"seed {seed}", json.dumps(schema), schema, instances)


if __name__ == "__main__":
    sys.exit(main())

"""Compiles random schemas in which all keywords meet, and follows random instances through them.

    python tools/random_schemas.py [--first 0] [--num 500] [--instances 24]

Each seed makes a schema of few values and instances near to it (`tests/support/schema_makers.py`).
Objects are opened and their properties may come in any order. `jsonschema_rs` judges each instance:
every wrong one must be refused, and of the right ones 97 % accepted, token by token. A schema that
is refused is counted by the word in the refusal, unless all its instances are wrong. Exit status 1
if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import jsonschema_rs

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from schema_suite import MIN_ACCEPTED, word_of  # noqa: E402
from structured.checks import Bench  # noqa: E402
from structured.suite import DRAFTS, OPENED, Followed, Group, Instance, follow  # noqa: E402

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
    return report(found)


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


def report(found: Sequence[Followed]) -> int:
    counts: Counter[str] = Counter()
    refused: dict[str, list[Followed]] = defaultdict(list)
    for one in found:
        if one.refusal and any(each.is_valid for each in one.group.instances):
            refused[word_of(one.refusal)].append(one)
        counts["accepted"] += len(one.accepted) + len(one.respelled)
        counts["not accepted"] += len(one.not_accepted)
        counts["refused"] += len(one.refused)
        counts["wrong"] += len(one.not_refused)
        for text in one.not_refused:
            print(f"WRONG, accepted: {one.group.keyword}: {text} for {one.group.description}")
    right = counts["accepted"] + counts["not accepted"]
    print(f"{len(found)} schemas, of which {sum(map(len, refused.values()))} are refused")
    print(f"right instances accepted: {counts['accepted']} of {right}")
    print(f"wrong instances refused: {counts['refused']} of {counts['refused'] + counts['wrong']}")
    for word, own in sorted(refused.items(), key=lambda item: -len(item[1])):
        print(f"refused, {word}: {len(own)}, as {own[0].group.keyword}: {own[0].refusal:.200}")
    for one in [one for one in found if one.not_accepted][:10]:
        print(f"not accepted: {one.not_accepted[0]} for {one.group.description}")
    is_good = not counts["wrong"] and counts["accepted"] >= MIN_ACCEPTED * right
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())

"""Replay a step log: check that the same inputs give the same plans.

Options that are given replace the recorded ones. The first plan that differs is reported. Of
several cores, the logs of all are replayed.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from engine.config.cli import json_object
from engine.config.kv_groups import FULL, kinds_of
from engine.core.replay import groups_of, replay
from engine.errors import ConfigError
from engine.observe.steplog import StepLog, logs_of

DIFFERENT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=Path, metavar="LOG", help="a file made with --step-log")
    parser.add_argument("--policy", metavar="NAME", help="another policy, by name or dotted path")
    parser.add_argument(
        "--policy-options",
        type=json_object,
        metavar="JSON",
        help="replaces the arguments of the policy's constructor",
    )
    parser.add_argument(
        "--changes",
        type=partial(json_object, example={"max_num_seqs": 8}),
        default={},
        metavar="JSON",
        help="""replaces options of the scheduler, as in '{"max_num_seqs": 8}'""",
    )
    parser.add_argument(
        "--allow-truncated",
        action="store_true",
        help="replay the complete part of a log that is cut off",
    )


def run(parsed: argparse.Namespace) -> int:
    for name in ("policy", "log", "allow_truncated"):
        if name in parsed.changes:
            raise ConfigError(
                f"--changes has {name!r}: give it as an option or argument of its own"
            )
    changes = dict(parsed.changes)
    if parsed.policy_options is not None:
        changes["policy_options"] = parsed.policy_options
    logs = logs_of(parsed.log)
    are_equal = [_replay(log, parsed, changes, is_named=logs != [parsed.log]) for log in logs]
    if parsed.policy is not None and not all(are_equal):
        print(
            "what the change is worth: metronome simulate --policy "
            f"{parsed.policy} --workload {logs[0]} --rate own"
        )
    return 0 if all(are_equal) else DIFFERENT


def waits_of(steps: float, waited: float, waited_for_stages: float) -> str:
    """A text about a rank: the seconds of its steps, and what share of them it waited."""
    text = f"{steps:.2f} s in steps"
    for seconds, others in ((waited, "ranks"), (waited_for_stages, "stages")):
        if steps and (seconds or others == "ranks"):
            text += f", {100 * seconds / steps:.1f} % waiting for other {others}"
    return text


def _replay(
    log: Path, parsed: argparse.Namespace, changes: dict[str, Any], *, is_named: bool
) -> bool:
    """Replay one log and print the outcome, with the log's name if ``is_named``. Returns whether
    all plans were equal."""
    outcome = replay(log, policy=parsed.policy, allow_truncated=parsed.allow_truncated, **changes)
    print(f"{log}: {outcome}" if is_named else outcome)
    for rank, times in enumerate(outcome.ranks):
        print(f"rank {rank}: {waits_of(*times)}")
    groups = groups_of(StepLog(log, allow_truncated=parsed.allow_truncated).header)
    if groups != (FULL,):
        print(f"KV groups by attention: {kinds_of(groups)}")
    return outcome.difference is None

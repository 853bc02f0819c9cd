"""Follows the JSON-Schema-Test-Suite token by token through the compiler of schemas.

    python tools/schema_suite.py [--suite DIR] [--drafts draft7,...] [--keywords not,...] [--all]
                                 [--keep DIR]

--suite: the folder `json` of the source package of `jsonschema`, which has the suite; without it
the package is downloaded by pip into --cache. Objects are opened and their properties may come in
any order, as JSON schema has it. Every invalid instance must be refused, and 97 % of the valid ones
accepted; those of a schema that is refused count as not accepted. What is accepted in another
spelling than the suite's (`1` for `1.0`) counts as accepted and is shown apart.

Prints a table for each draft, refused schemas by the keyword in their refusal, and each instance
that is wrong; exit status 1 if a bar is missed. --all has all keywords in the tables, not only
those where something is short. --keep writes the part of the suite that the tests use.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import gettempdir
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from columns import print_columns  # noqa: E402
from structured.checks import Bench  # noqa: E402
from structured.suite import DRAFTS, OPENED, Followed, follow, groups_of  # noqa: E402

PACKAGE = "jsonschema==4.26.0"
CACHE = Path(gettempdir()) / "metronome-schemas"
MIN_ACCEPTED = 0.97
EVERY = 8  # groups of a keyword, of which the first is kept for the tests

HEAD = ("keyword", "schemas", "refused", "valid accepted", "in other spelling", "invalid refused")


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    suite = options.suite or downloaded(options.cache)
    tests = suite / "tests" if (suite / "tests").is_dir() else suite
    if options.keep:
        keep(tests, options.keep, (suite / "LICENSE").read_text(encoding="utf-8"))
        return 0
    bench = Bench()
    found = [
        follow(bench, group, OPENED)
        for group in groups_of(tests, options.drafts.split(","))
        if not options.keywords or group.keyword in options.keywords.split(",")
    ]
    for draft in DRAFTS:
        if own := [one for one in found if one.group.draft == draft]:
            print_table(draft, own, is_whole=options.all)
    accepted, valid = num_accepted(found)
    print(f"of all {valid} valid instances {accepted} are accepted: {accepted / valid:.2%}\n")
    print_refusals(found)
    print_wrong(found)
    return 0 if is_good(found) else 1


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--suite", type=Path, help="folder `json` of the source package of jsonschema")
    add("--cache", type=Path, default=CACHE, help="folder that the package is downloaded into")
    add("--drafts", default=",".join(DRAFTS), help="only these")
    add("--keywords", default="", help="only these, as the suite's files are named")
    add("--all", action="store_true", help="all keywords, also where nothing is short")
    add("--keep", type=Path, help="write the tests' part of the suite into this folder instead")
    return parser.parse_args(argv)


def downloaded(cache: Path) -> Path:
    """The suite's folder, from the source package of ``jsonschema``."""
    name = PACKAGE.replace("==", "-")
    if not (cache / name).is_dir():
        command = ["pip", "download", "-q", "--no-deps", "--no-binary", ":all:", PACKAGE]
        subprocess.run([sys.executable, "-m", *command, "-d", str(cache)], check=True)
        with tarfile.open(cache / f"{name}.tar.gz") as archive:
            archive.extractall(cache, filter="data")
    return cache / name / "json"


def keep(tests: Path, where: Path, licence: str) -> None:
    """Some groups of each keyword, a line for each."""
    kept: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for draft in DRAFTS:
        for path in sorted((tests / draft).glob("*.json")):
            kept[draft] += [
                {"keyword": path.stem, **{k: v for k, v in group.items() if k != "specification"}}
                for group in json.loads(path.read_text(encoding="utf-8"))[::EVERY]
            ]
    where.mkdir(parents=True, exist_ok=True)
    (where / "LICENSE").write_text(licence, encoding="utf-8")
    for draft, groups in kept.items():
        lines = (json.dumps(group, ensure_ascii=False, separators=(",", ":")) for group in groups)
        (where / f"{draft}.jsonl").write_text("".join(f"{each}\n" for each in lines), "utf-8")


def print_table(draft: str, found: Sequence[Followed], *, is_whole: bool) -> None:
    by_keyword: dict[str, list[Followed]] = defaultdict(list)
    for one in found:
        by_keyword[one.group.keyword].append(one)
    rows = [
        _row(keyword, own) for keyword, own in by_keyword.items() if is_whole or not _is_clean(own)
    ]
    rows.append(_row(f"all of {draft}", found))
    print_columns(HEAD, rows)
    print()


def _row(keyword: str, found: Sequence[Followed]) -> tuple[str, ...]:
    accepted, valid = num_accepted(found)
    refused = sum(len(one.refused) for one in found) + sum(
        _count(one, is_valid=False) for one in found if one.refusal
    )
    invalid = sum(_count(one, is_valid=False) for one in found)
    return (
        keyword,
        str(len(found)),
        str(sum(bool(one.refusal) and not _is_impossible(one) for one in found)),
        f"{accepted}/{valid} {accepted / max(valid, 1):.1%}",
        str(sum(len(one.respelled) for one in found)),
        f"{refused}/{invalid}",
    )


def _is_clean(found: Sequence[Followed]) -> bool:
    accepted, valid = num_accepted(found)
    return accepted == valid and not any(one.not_refused for one in found)


def num_accepted(found: Iterable[Followed]) -> tuple[int, int]:
    """Valid instances that are accepted, and all of them."""
    accepted = valid = 0
    for one in found:
        accepted += len(one.accepted) + len(one.respelled)
        valid += _count(one, is_valid=True)
    return accepted, valid


def _count(one: Followed, *, is_valid: bool) -> int:
    return sum(each.is_valid == is_valid for each in one.group.instances)


def _is_impossible(one: Followed) -> bool:
    """Whether the suite has no valid instance of the schema, so that it may be refused."""
    return not _count(one, is_valid=True)


def print_refusals(found: Sequence[Followed]) -> None:
    by_word: dict[str, list[Followed]] = defaultdict(list)
    for one in found:
        if one.refusal and not _is_impossible(one):
            by_word[word_of(one.refusal)].append(one)
    if by_word:
        print("refused schemas, by the word in the refusal")
    for word, own in sorted(by_word.items(), key=lambda item: -len(item[1])):
        print(f"  {word}: {len(own)}, as {own[0].group.name}: {own[0].refusal:.150}")


def word_of(refusal: str) -> str:
    """The keyword that a refusal names, or the beginning of the refusal."""
    named = re.search(r'Unimplemented keys: \["([^"]+)"|^\W*(\$?\w+) is ', refusal)
    return next(filter(None, named.groups()), "") if named else refusal[:50]


def print_wrong(found: Sequence[Followed]) -> None:
    for one in found:
        for what in one.not_refused:
            print(f"WRONG, accepted: {one.group.name}: {what}")
    for one in found:
        for what in one.not_accepted:
            print(f"not accepted: {one.group.name}: {what}")


def is_good(found: Sequence[Followed]) -> bool:
    if any(one.not_refused for one in found):
        return False
    accepted, valid = num_accepted(found)
    return accepted >= MIN_ACCEPTED * valid


if __name__ == "__main__":
    sys.exit(main())

"""The corpus: what is asked, how it is judged, twenty right texts and twenty wrong ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from random import Random
from textwrap import dedent
from typing import Any

from structured import expressions, grammars, judges, makers, schemas, spacing

NUM = 20  # right texts of each entry, and wrong ones


@dataclass(frozen=True)
class Entry:
    name: str
    group: str
    kind: str  # json, regex, grammar
    asked: Any
    twin: str = ""  # the grammar that derives and judges, if it is another
    refused: str = ""  # the word in the reason with which it must be refused
    whitespace: str | None = None  # the pattern of what stands between tokens of JSON

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of ``StructuredOutputsParams``."""
        if self.whitespace is None:
            return {self.kind: self.asked}
        return {self.kind: self.asked, "whitespace_pattern": self.whitespace}

    @cached_property
    def judge(self) -> judges.Judge:
        if self.kind == "json":
            judge = judges.json_judge(self.asked)
            return judge if self.whitespace is None else spacing.judge_of(judge, self.whitespace)
        if self.kind == "regex":
            return judges.regex_judge(self.asked)
        return judges.grammar_judge(self.twin or self.asked)

    def right(self, num: int = NUM) -> list[str]:
        """Fewer where there are fewer."""
        rng = Random(f"right {self.name}")
        make, pattern = self._maker(rng).text, self.whitespace
        if pattern is not None:
            return makers.draw(
                lambda: spacing.spaced(make(), pattern, rng), self.judge, num, right=True
            )
        return makers.draw(make, self.judge, num, right=True)

    def wrong(self, right: list[str], num: int = NUM) -> list[str]:
        rng = Random(f"wrong {self.name}")
        if (pattern := self.whitespace) is not None:
            return makers.draw(
                lambda: spacing.damaged(rng.choice(right), pattern, rng),
                self.judge,
                num,
                right=False,
            )
        damage = makers.damaged_json if self.kind == "json" else makers.damaged_text
        return makers.draw(lambda: damage(rng.choice(right), rng), self.judge, num, right=False)

    def _maker(self, rng: Random) -> Any:
        if self.kind == "json":
            return makers.JsonMaker(self.asked, rng)
        if self.kind == "regex":
            return makers.RegexMaker(self.asked, rng)
        return makers.GrammarMaker(self.twin or self.asked, rng)


def entries() -> Iterator[Entry]:
    """Entries that must work, then those that must be refused."""
    counts: dict[str, int] = {}

    def named(group: str, kind: str, asked: Any, **more: str) -> Entry:
        number = counts[group] = counts.get(group, -1) + 1
        return Entry(f"{group} {number}", group, kind, asked, **more)

    for group, schema in schemas.schemas():
        yield named(f"json: {group}", "json", schema)
    for number, pattern in enumerate(schemas.WHITESPACE):
        for schema in schemas.SPACED[number % 2 :: 2]:
            yield named("json: whitespace", "json", schema, whitespace=pattern)
    for group, expression in expressions.expressions():
        yield named(f"regex: {group}", "regex", expression)
    for name, text in grammars.LARK.items():
        yield Entry(f"lark: {name}", "lark", "grammar", dedent(text))
    for name, (text, twin) in grammars.GBNF.items():
        yield Entry(f"gbnf: {name}", "gbnf", "grammar", text, twin)
    for word, schema in schemas.REFUSED:
        yield named("json: refused", "json", schema, refused=word)
    for word, expression in expressions.REFUSED:
        yield named("regex: refused", "regex", expression, refused=word)


def described(entry: Entry) -> str:
    return f"{entry.name}: {json.dumps(entry.asked, ensure_ascii=False)}"

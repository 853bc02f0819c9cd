"""A part of what `tools/structured.py` does with the whole corpus."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import pytest
from structured.bombs import BOMBS, NASTIEST
from structured.checks import (
    NEIGHBOURS,
    Bench,
    check_bomb,
    check_generation,
    check_texts,
    finished,
)
from structured.corpus import Entry, entries
from structured.differences import NARROWER
from structured.judges import json_judge

from engine import EngineArgs, LLMEngine
from engine.assets import BOX_MODEL
from engine.structured.decide import GrammarError

ALL = list(entries())
WRITTEN = [
    *("json: objects 3", "json: anyOf 4", "json: formats 2", "json: recursion 1", "json: tools 5"),
    *("json: patternProperties 0", "regex: identifiers 4", "regex: texts 1", "lark: sql"),
    *("gbnf: gbnf tic tac toe",),
]


@cache
def bench() -> Bench:
    return Bench()


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    args = EngineArgs(
        model=str(BOX_MODEL),
        max_model_len=400,
        max_num_seqs=32,
        num_kv_blocks=800,
        num_threads=1,
        log_level="error",
    )
    with LLMEngine.from_engine_args(args) as made:
        yield made


def test_the_corpus_is_as_large_as_it_says() -> None:
    kinds = [entry.kind for entry in ALL]
    assert [kinds.count(kind) for kind in ("json", "regex", "grammar")] == [338, 100, 30]
    assert len({entry.name for entry in ALL}) == 468 and len(BOMBS) == 40


@pytest.mark.parametrize("entry", ALL[::36], ids=lambda entry: entry.name)
def test_right_texts_pass_and_wrong_ones_do_not(entry: Entry) -> None:
    checked = check_texts(bench(), entry, num=4)
    assert not checked.faults
    assert entry.refused or checked.num_right_accepted > 0 < checked.num_wrong_refused


def test_what_is_written_is_right(engine: LLMEngine) -> None:
    checked = [check_texts(bench(), one, num=1) for one in ALL if one.name in WRITTEN]
    check_generation(engine, checked, seeds=range(2), max_tokens=300)
    assert len(checked) == len(WRITTEN)
    assert [fault for one in checked for fault in one.faults] == []
    assert sum(one.num_complete for one in checked) >= 0.8 * sum(one.num_texts for one in checked)


@pytest.mark.parametrize("name", NASTIEST)
def test_a_bomb_harms_itself_alone(engine: LLMEngine, name: str) -> None:
    alone = [one.token_ids for one in finished(engine, NEIGHBOURS)]
    check_bomb(engine, BOMBS[name], alone)


@pytest.mark.parametrize("name", ["a chain of references", "5,000 rules"])
def test_what_goes_deep_does_not_end_the_process(engine: LLMEngine, name: str) -> None:
    check_bomb(engine, BOMBS[name], [one.token_ids for one in finished(engine, NEIGHBOURS)])


@pytest.mark.parametrize("name", NARROWER)
def test_known_differences(name: str) -> None:
    """If one fails, a difference is gone: remove it from docs/internals/structured.md, too."""
    schema, texts = NARROWER[name]
    compilation = bench().compiled({"json": schema})
    for text in texts:
        (tokens, *_) = bench().tokenisations(text)
        is_written = bench().num_accepted(compilation.wait(), tokens) == len(tokens) + 1
        assert not is_written, text
        if name != "the year 0000":  # which the judge refuses, as Python does
            assert json_judge(schema)(text), text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": r"^\sx[\s\d]$"},
        {"type": "string", "pattern": r"^[^\S]x\s?$"},
        {"type": "string", "pattern": r"^\sx[^\S\n]?\s?$"},
        {"type": "string", "pattern": r"^\\?\sx(\s)$"},
    ],
)
def test_white_space_in_a_pattern_is_that_of_ecmascript(schema: dict[str, str]) -> None:
    """The library has U+0085 among it, and not U+FEFF."""
    compilation = bench().compiled({"json": schema})
    for space, is_one in {"\u2028": True, "\ufeff": True, " ": True, "\x85": False}.items():
        (tokens, *_) = bench().tokenisations(f'"{space}x{space}"')
        accepted = bench().num_accepted(compilation.wait(), tokens) == len(tokens) + 1
        assert accepted == is_one, space


@pytest.mark.parametrize("pattern", [r"^[0-9+-\s]+$", r"^[A-\s]$", r"^\s(x$"])
def test_what_is_wrong_with_a_pattern_is_said_of_it_as_it_was_given(pattern: str) -> None:
    """A class is no end of a range."""
    with pytest.raises(GrammarError, match=re.escape(pattern)):
        bench().compiled({"json": {"type": "string", "pattern": pattern}}).wait()

"""The corpus of answers: read the same whole and in pieces of any size, by all APIs."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from functools import cache
from typing import Any

import pytest
from speech.apis import APIS, Api, voice_of
from speech.cases import CASES
from speech.corpus import Case
from speech.families import TOOLS, markers_of, signs_of, tokenizer_with
from speech.mutations import Mutations
from speech.playing import PROMPT, FakeEngine, Read, pieces, play, read_of, streamed, whole

from engine.server.speech.families import TOOL_FAMILIES
from engine.server.speech.json_text import object_in
from engine.server.speech.tools import tools_of
from engine.server.speech.turns import ChatFormat
from engine.text.tokenizer import Tokenizer

PAIRS = [(family, case) for family in sorted(CASES) for case in CASES[family]]
NAMES = [f"{family}: {case.title}" for family, case in PAIRS]


@cache
def tokenizer_of(family: str, kind: str) -> Tokenizer:
    """kind: how it has the markers, as tokens, special ones, or letters."""
    if kind == "letters":
        return tokenizer_with()
    return tokenizer_with(*markers_of(family), special=kind == "special")


@cache
def speech_of(family: str, kind: str) -> ChatFormat:
    return ChatFormat(tokenizer_of(family, kind), signs_of(family))


def check(read: Read, case: Case) -> None:
    assert [name for name, _ in read.calls] == [name for name, _ in case.calls]
    for (_, arguments), (_, meant) in zip(read.calls, case.calls, strict=True):
        assert (arguments if isinstance(meant, str) else json.loads(arguments)) == meant
    assert (read.content, read.thinking) == (case.content, case.thinking)


def test_every_family_has_a_corpus() -> None:
    assert set(CASES) == set(TOOL_FAMILIES)
    assert all(len(cases) >= 20 for cases in CASES.values())


@pytest.mark.parametrize(("family", "case"), PAIRS, ids=NAMES)
def test_an_answer_is_read_as_it_is_meant(family: str, case: Case) -> None:
    tools = tools_of(TOOLS, "auto", None)
    assert tools is not None
    dice = random.Random(case.title)
    some = [dice.randint(1, 30) for _ in range(100)]
    for kind, sizes in (
        *(("tokens", sizes) for sizes in ([10**6], [1], [3], some)),
        ("special", [2]),
        *(("letters", sizes) for sizes in ([1], some)),
    ):
        completions = pieces(
            tokenizer_of(family, kind), case.text, itertools.cycle(sizes), case.reason
        )
        answer, _ = play(speech_of(family, kind), completions, tools.read_as)
        check(read_of(answer), case)


def with_whole_calls(case: Case) -> Case:
    """The form of an API that sends the arguments of a call as an object."""
    calls = [(tool, object_in(a) if isinstance(a, str) else a) for tool, a in case.calls]
    return case._replace(calls=calls)


def answers_of(api: Api, family: str, case: Case, size: int) -> tuple[Any, list[Any]]:
    """The answer of an API, whole and as events."""
    tokenizer, speech = tokenizer_of(family, "tokens"), speech_of(family, "tokens")
    engines = [
        FakeEngine(tokenizer, pieces(tokenizer, case.text, itertools.repeat(size), case.reason))
        for _ in range(2)
    ]
    answer = asyncio.run(whole(api.ask(voice_of(speech, engines[0]), False)))
    asked = api.ask(voice_of(speech, engines[1]), True)
    return answer, asyncio.run(streamed(asked, engines[1]))


@pytest.mark.parametrize("name", sorted(APIS))
@pytest.mark.parametrize("family", sorted(CASES))
def test_all_apis_say_the_same_whole_and_streamed(family: str, name: str) -> None:
    api = APIS[name]
    for case, size in zip(CASES[family], itertools.cycle([1, 4, 9]), strict=False):
        answer, events = answers_of(api, family, case, size)
        read, parts = api.whole(answer), api.streamed(events)
        check(parts, with_whole_calls(case) if name == "ollama" else case)
        if name == "messages":
            parts = parts._replace(calls=[(tool, object_in(text)) for tool, text in parts.calls])
        assert parts == read, case.title
        if case.calls:
            assert api.end(answer) == api.ends[case.reason], case.title
            assert api.end(events[api.last]) == api.ends[case.reason], case.title


@pytest.mark.parametrize("name", sorted(APIS.keys() - {"ollama"}))
def test_arguments_come_in_pieces(name: str) -> None:
    api = APIS[name]
    for family in sorted(CASES):
        case = next(each for each in CASES[family] if each.calls and "text" in str(each.calls))
        _, events = answers_of(api, family, case, 1)
        assert len([each for each in events if api.has_arguments(each)]) > 5, family


@pytest.mark.parametrize("family", sorted(CASES))
@pytest.mark.parametrize(
    "text", ['{"items": [1, ', '```json\n{"x": "y', "[[1, 2], ", "if a < b: x["]
)
def test_text_that_can_be_no_call_is_not_held(family: str, text: str) -> None:
    tools = tools_of(TOOLS, "auto", None)
    assert tools is not None
    answer = speech_of(family, "tokens").begin(PROMPT, tools=tools.read_as, skip_special=True)
    (completion,) = pieces(tokenizer_of(family, "tokens"), text, itertools.repeat(99), "stop")
    completion.finish_reason = None
    answer.read(completion)
    assert answer.content == text.rstrip()


def test_answers_that_nobody_foresaw() -> None:
    """`tools/server_campaign.py calls` draws more of them."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    mutations = Mutations(random.Random(seed))
    for _ in range(150):
        mutations.draw()
    assert not mutations.wrong, mutations.wrong[:3]

"""Odd inputs: ids, texts and errors are those of the front end, word for word."""

import asyncio
import enum
from collections import OrderedDict, UserDict, UserList
from collections.abc import Iterator
from typing import Any

import pytest
from support.pooled import WAIT, llm_around, session_on

from engine import LLM, AsyncLLMEngine, RequestOutput, SamplingParams
from engine.config.model import ModelConfig
from engine.frontend.text_workers import TextPool
from engine.text.tokenizer import Tokenizer

SIZES = [1, 2, 4]


class Loud(str):
    """A text that says something else when it is shown."""

    def __str__(self) -> str:
        return "LOUD"

    def encode(self, *_: Any) -> bytes:
        raise RuntimeError("not mine")


class Level(enum.IntEnum):
    LOW = 1


class Showing:
    def __str__(self) -> str:
        raise RuntimeError("not to be shown")


def nested(depth: int) -> Any:
    value: Any = "core"
    for _ in range(depth):
        value = [value]
    return value


PROMPTS: dict[str, Any] = {
    "empty": "",
    "space": " ",
    "NUL": "a\0b",
    "only NUL": "\0",
    "high half": "a\ud83d",
    "low half": "\ude00a",
    "both halves": "\ud83d\ude00",
    "special tokens": "<s>a</s><unk><s>",
    "part of one": "<s",
    "last plane": "\U0010ffff\U000e0001",
    "marks": "\u202e\u200d\ufeff\ufffd\u0301",
    "newlines": "\r\n\n\r\t\v\f\x85\u2028",
    "long word": "x" * 200,
    "too long": "long " * 3000,
    "far too long": "x" * 40_000,
    "far too long, with half": "x" * 40_000 + "\ud800",
    "str subclass": Loud("loud"),
    "bytes": b"bytes",
    "number": 1.5,
    "boolean": True,
    "nothing": None,
    "empty list": [],
    "list of lists": [[1], [2]],
    "list of texts in a dict": {"prompt": ["a"]},
    "empty dict": {},
    "empty text in a dict": {"prompt": ""},
    "both": {"prompt": "shown", "prompt_token_ids": [5, 6]},
    "half shown": {"prompt": "\ud800", "prompt_token_ids": [5, 6]},
    "number with ids": {"prompt": 5, "prompt_token_ids": [5, 6]},
    "no ids": {"prompt": "a", "prompt_token_ids": None},
    "unknown key": {"prompt": "a", "multi_modal_data": {}},
    "key no text": {5: "a"},
    "own mapping": UserDict(prompt="mapped"),
    "odd salt": {"prompt": "a", "cache_salt": "\ud800"},
    "negative": [5, -1],
    "beyond": [1 << 31],
    "far beyond": [1 << 70],
    "boolean ids": [True, False],
    "fraction": [1.5],
    "text among ids": [5, "6"],
}


def user(content: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **more}]


CHATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (user("Hello"), {}),
    "NUL and specials": (user("<s>\0</s>\U0001f600"), {}),
    "half": (user("\ud800"), {}),
    "half in a key": ([{"role": "user", "content": "x", "\udc00": 1}], {}),
    "number": (user(5), {}),
    "huge number": (user(1 << 64), {}),
    "least number": (user(-(1 << 63)), {}),
    "fraction": (user(0.1), {}),
    "endless": (user(float("inf")), {}),
    "no number": (user(float("nan")), {}),
    "nothing": (user(None), {}),
    "bytes": (user(b"x"), {}),
    "set": (user({"x"}), {}),
    "tuple": (user(("a", "b")), {}),
    "own list": (user(UserList(["a"])), {}),
    "own mapping": ([UserDict(role="user", content="x")], {}),
    "in order": (user(OrderedDict(b=1, a=2)), {}),
    "enum": (user(Level.LOW), {}),
    "own text": (user(Loud("loud")), {}),
    "odd object": (user(Showing()), {}),
    "keys of all kinds": (user({1: "a", None: "b", 1.5: "c", False: "d", (1,): "e"}), {}),
    "deep": (user(nested(100)), {}),
    "deeper": (user(nested(600)), {}),
    "bottomless": (user(nested(100_000)), {}),
    "no role": ([{"content": "x"}], {}),
    "no content": ([{"role": "user"}], {}),
    "message no mapping": (["x"], {}),
    "a text": ("conversation", {}),
    "nobody": ([], {}),
    "refused": ([{"role": "bad", "content": "x"}], {}),
    "too long": (user("long " * 3000), {}),
    "own template": (user("x"), {"chat_template": "{{ messages | length }}"}),
    "broken template": (user("x"), {"chat_template": "{% if %}"}),
    "half a template": (user("x"), {"chat_template": "\ud800"}),
    "template no text": (user("x"), {"chat_template": 5}),
    "empty template": (user("x"), {"chat_template": ""}),
    "undefined": (user("x"), {"chat_template": "{{ nobody.knows }}"}),
    "division": (user("x"), {"chat_template": "{{ 1 / 0 }}"}),
    "way out": (user("x"), {"chat_template": "{{ ''.__class__.__mro__ }}"}),
    "endless call": (
        user("x"),
        {"chat_template": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"},
    ),
    "as JSON": (user({"b": [1, "ü"], "a": None}), {"chat_template": "{{ messages | tojson }}"}),
    "unfit for JSON": (user("x"), {"chat_template": "{{ cycler | tojson }}"}),
    "variables": (user("x"), {"chat_template_kwargs": {"extra": {"a": [1, 2.5, None, True]}}}),
    "odd variables": (user("x"), {"chat_template_kwargs": {"extra": Showing(), "b": b"x"}}),
    "own names": (user("x"), {"chat_template_kwargs": {"bos_token": 5, "self": 1}}),
    "taken name": (user("x"), {"chat_template_kwargs": {"messages": []}}),
    "tools": (user("x"), {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    "no prompt for an answer": (user("x"), {"add_generation_prompt": False}),
}


@pytest.fixture(scope="module", params=SIZES)
def pool(request: pytest.FixtureRequest, model: ModelConfig) -> Iterator[TextPool]:
    started = TextPool(model, request.param)
    started.wait_until_ready()
    pids = started.pids
    yield started
    assert started.pids == pids  # no input was the death of one
    started.close()


def llm_on(pool: TextPool | None, tokenizer: Tokenizer) -> LLM:
    return llm_around(session_on(pool, tokenizer))


def told(act: Any) -> Any:
    """What a call brings, or the error it raises."""
    try:
        outputs: list[RequestOutput] = act()
        return [(each.prompt, each.prompt_token_ids, each.outputs) for each in outputs]
    except Exception as error:
        return type(error), str(error), type(error.__cause__)


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(pool: TextPool, tokenizer: Tokenizer, name: str) -> None:
    """Whole, cut, and cut to nothing; alone and among others."""
    for kept in (None, -1, 0, 1, 2, 255, 256, 1 << 40, -2):
        found = []
        for each in (pool, None):
            llm = llm_on(each, tokenizer)
            try:
                params = SamplingParams(max_tokens=2, truncate_prompt_tokens=kept)
            except ValueError:
                continue
            for prompts in (PROMPTS[name], ["fine", PROMPTS[name], "fine"]):
                found.append(
                    told(lambda p=prompts, o=params, m=llm: m.generate(p, o, use_tqdm=False))
                )
            assert not llm.llm_engine.session.has_unfinished
        assert found[: len(found) // 2] == found[len(found) // 2 :], kept


@pytest.mark.parametrize("name", CHATS)
def test_chats(pool: TextPool, tokenizer: Tokenizer, name: str) -> None:
    messages, options = CHATS[name]
    params = SamplingParams(max_tokens=2)
    found = []
    for each in (pool, None):
        llm = llm_on(each, tokenizer)
        for chats in (messages, [user("fine"), messages]):
            found.append(told(lambda c=chats, m=llm: m.chat(c, params, use_tqdm=False, **options)))
    assert [_without_cause(f) for f in found[:2]] == [_without_cause(f) for f in found[2:]]


def _without_cause(found: Any) -> Any:
    return found[:2] if isinstance(found, tuple) else found


async def test_streams(model: ModelConfig, tokenizer: Tokenizer) -> None:
    """The same of an event loop, all at once."""

    async def run(pool: TextPool | None) -> list[Any]:
        engine = AsyncLLMEngine(session_on(pool, tokenizer))

        async def one(number: int, prompt: Any) -> Any:
            params = SamplingParams(max_tokens=2, output_kind="final")
            try:
                async for output in engine.generate(prompt, params, str(number)):
                    return output.prompt, output.prompt_token_ids, output.outputs
            except Exception as error:
                return type(error), str(error)

        tasks = [one(number, prompt) for number, prompt in enumerate(PROMPTS.values())]
        found = await asyncio.wait_for(asyncio.gather(*tasks), WAIT)
        await asyncio.to_thread(engine.shutdown)
        return found

    found, expected = await run(TextPool(model, 2)), await run(None)
    for name, one, other in zip(PROMPTS, found, expected, strict=True):
        assert one == other, name

"""One suite for text made in the front end and in processes: same outputs, same errors."""

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from support.pooled import Pools, joined, llm_around, session_on, texts_of

from engine import AsyncLLMEngine, LLMEngine, RequestOutput, SamplingParams
from engine.config.model import ModelConfig
from engine.frontend.session import Session
from engine.frontend.text_workers import TextPool
from engine.messages.params import OutputKind
from engine.text.tokenizer import Tokenizer, load_tokenizer

KINDS: tuple[OutputKind, ...] = ("cumulative", "delta", "final")


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2])
def pool(request: pytest.FixtureRequest, model: ModelConfig) -> Iterator[TextPool]:
    started = TextPool(model, request.param)
    started.wait_until_ready()
    pids = started.pids
    yield started
    assert started.pids == pids  # no input was the death of one
    started.close()


Open = Callable[..., Session]


@pytest.fixture
def open_session(pool: TextPool, model: ModelConfig) -> Iterator[Open]:
    """Opens sessions on scripted cores, with or without a pool."""
    tokenizer = load_tokenizer(model)
    opened: list[Session] = []

    def make(with_pool: TextPool | None = pool, **options: Any) -> Session:
        opened.append(session_on(with_pool, tokenizer, **options))
        return opened[-1]

    yield make
    assert not any(session.has_unfinished for session in opened)


def run(session: Session, params: dict[str, SamplingParams]) -> dict[str, list[RequestOutput]]:
    """Every output of these requests, side by side."""
    llm_engine = LLMEngine(session)
    outputs: dict[str, list[RequestOutput]] = {name: [] for name in params}
    for name, own in params.items():
        llm_engine.add_request(name, f"Prompt of {name}: 日本", own)
    while llm_engine.has_unfinished_requests():
        for output in llm_engine.step():
            outputs[output.request_id].append(output)
    return outputs


def many_params() -> dict[str, SamplingParams]:
    """What can be asked of a text, in all kinds of output."""
    asked: dict[str, dict[str, Any]] = {
        "plain": {"max_tokens": 60},
        "short": {"max_tokens": 1},
        "stop": {"max_tokens": 60, "stop": ["jumps over", "lazy"]},
        "stop in": {"max_tokens": 60, "stop": ["ö", "日本"], "include_stop_str_in_output": True},
        "stop later": {"max_tokens": 60, "stop": ["f"], "min_tokens": 12},
        "never": {"max_tokens": 60, "stop": ["not there at all"]},
        "special": {"max_tokens": 60, "skip_special_tokens": False},
        "stop id": {"max_tokens": 60, "stop_token_ids": [260]},
        "stop id in": {
            "max_tokens": 60,
            "stop_token_ids": [260],
            "include_stop_str_in_output": True,
        },
        "no text": {"max_tokens": 9, "detokenize": False},
        "logprobs": {"max_tokens": 30, "logprobs": 1, "stop": ["quick brown"]},
        "several": {"max_tokens": 20, "n": 3, "stop": ["fox"]},
    }
    return {
        f"{name} {kind}": SamplingParams(**{**options, "output_kind": kind})
        for name, options in asked.items()
        for kind in KINDS
    }


def test_outputs_equal_those_of_the_front_end(open_session: Open) -> None:
    """117 to 120, 123, 124: all there is in them, whenever it comes."""
    params = many_params()
    found, expected = run(open_session(), params), run(open_session(None), params)
    for name, own in params.items():
        kind = own.output_kind
        assert joined(found[name], kind) == joined(expected[name], kind), name
        assert [output.finished for output in found[name]].index(True) == len(found[name]) - 1


def test_a_stop_string_ends_the_sequence_in_the_core(open_session: Open, pool: TextPool) -> None:
    """119: once, wherever it was found; its tokens end with it."""
    params = {
        kind: SamplingParams(max_tokens=9000, stop=["lazy"], output_kind=kind) for kind in KINDS
    }
    sessions = [
        open_session(each, max_model_len=10_000, pace=lambda: time.sleep(0.002))
        for each in (pool, None)
    ]
    for session in sessions:
        run(session, params)
    clients = [session.client for session in sessions]
    assert sorted(clients[0].aborted) == sorted(clients[1].aborted)  # type: ignore[attr-defined]
    assert not clients[0].has_unfinished() and not clients[1].has_unfinished()
    counts = [session.outputs.counts for session in sessions]
    assert counts[0] == counts[1]


@pytest.mark.behaviour(113)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_steps", [0, 1, 7])
def test_aborts_deliver_the_text_so_far_once(
    open_session: Open, kind: OutputKind, num_steps: int
) -> None:
    found = []
    for session in (open_session(), open_session(None)):
        llm_engine = LLMEngine(session)
        for name in ("a", "b", "c"):
            llm_engine.add_request(name, "Prompt", SamplingParams(max_tokens=20, output_kind=kind))
        outputs = [output for _ in range(num_steps) for output in llm_engine.step()]
        llm_engine.abort_request(["b", "unknown"])
        while llm_engine.has_unfinished_requests():
            outputs += llm_engine.step()
        own = {name: [o for o in outputs if o.request_id == name] for name in "abc"}
        assert [o.finished for o in own["b"]].count(True) == 1
        assert own["b"][-1].outputs[0].finish_reason == "abort"
        found.append({name: joined(several, kind) for name, several in own.items()})
    assert found[0] == found[1]


@pytest.mark.parametrize("kept", [-1, 1, 3, 10_000])
def test_prompts_are_cut_alike(open_session: Open, kept: int) -> None:
    """The last tokens stay, whether the prompt is text or ids."""
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=kept)
    found = []
    for session in (open_session(), open_session(None)):
        encoded = session.inputs.process("a", "one two three four", None, {}).prompt_token_ids
        for prompt in ("one two three four", encoded, "long " * 3000):
            if kept == 10_000 and prompt == "long " * 3000:
                continue  # still too long
            (output,) = llm_around(session).generate(prompt, params, use_tqdm=False)
            found.append(output.prompt_token_ids)
        limit = 255 if kept == -1 else kept
        assert found[-1] == found[-1][-limit:] and len(found[-1]) <= limit
        assert found[-2] == encoded[-limit:]
    assert found[: len(found) // 2] == found[len(found) // 2 :]


PROMPTS: dict[str, Any] = {
    "empty": "",
    "NUL": "a\0b",
    "half a character": "half \ud800",
    "special tokens": "<s>a</s><unk><s>",
    "last plane": "\U0010ffff\U000e0001",
    "too long": "long " * 3000,
    "far too long, with half": "x" * 40_000 + "\ud800",
    "no text": 5,
    "text of a dict": {"prompt": "half \udfff"},
    "unknown key": {"text": "x"},
    "no such id": [1 << 40],
    "odd salt": {"prompt": "x", "cache_salt": 5},
}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


CHATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (user(" Hello 😀 "), {"chat_template_kwargs": {"extra": "!"}}),
    "specials": (user("<s>\0</s>"), {}),
    "half a character": (user("\ud800"), {}),
    "tuple": (user(("a", "b")), {}),
    "huge number": (user(1 << 64), {}),
    "set": (user({"x"}), {}),
    "keys of all kinds": (user({1: "a", None: "b", 1.5: "c", (1,): "e"}), {}),
    "no list": ("conversation", {}),
    "nobody": ([], {}),
    "no role": ([{"content": "x"}], {}),
    "refused": ([{"role": "bad", "content": "x"}], {}),
    "too long": (user("long " * 3000), {}),
    "broken template": (user("x"), {"chat_template": "{% if %}"}),
    "division": (user("x"), {"chat_template": "{{ 1 / 0 }}"}),
    "way out": (user("x"), {"chat_template": "{{ ''.__class__.__mro__ }}"}),
    "tools": (user("x"), {"tools": [{"type": "function", "function": {"name": "f"}}]}),
}


def result_of(act: Callable[[], list[RequestOutput]]) -> Any:
    """What a call returns, or the error it raises."""
    try:
        return [(each.prompt, each.prompt_token_ids, each.outputs) for each in act()]
    except (ValueError, TypeError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_have_the_same_ids_or_errors(open_session: Open, name: str) -> None:
    """Alone and among others, whole and cut; the first of several errors is raised."""
    found = []
    for session in (open_session(), open_session(None)):
        llm = llm_around(session)
        for kept in (None, 3):
            params = SamplingParams(max_tokens=2, truncate_prompt_tokens=kept)
            for prompts in (PROMPTS[name], ["fine", PROMPTS[name], "long " * 3000]):
                act = partial(llm.generate, prompts, params, use_tqdm=False)
                found.append(result_of(act))
    assert found[: len(found) // 2] == found[len(found) // 2 :]


@pytest.mark.parametrize("name", CHATS)
def test_chats_are_the_same_prompts_or_errors(open_session: Open, name: str) -> None:
    messages, options = CHATS[name]
    params = SamplingParams(max_tokens=2)
    found = []
    for session in (open_session(), open_session(None)):
        llm = llm_around(session)
        for chats in (messages, [user("fine"), messages, user("\ud800")]):
            found.append(result_of(partial(llm.chat, chats, params, use_tqdm=False, **options)))
    assert found[:2] == found[2:]


@pytest.mark.behaviour(126)
@pytest.mark.parametrize("size", [0, 2])
async def test_a_hundred_streams_with_cancels(
    pools: Pools, tokenizer: Tokenizer, size: int
) -> None:
    """Exact texts; cancelling some, while they are tokenised too, disturbs nobody."""
    params = SamplingParams(max_tokens=40, output_kind="delta")
    (text,) = texts_of(session_on(None, tokenizer), 1, params)
    pool = pools.start(size) if size else None
    async_engine = AsyncLLMEngine(session_on(pool, tokenizer))
    for _ in range(2):  # ids can be used again

        async def collect(name: str) -> str:
            prompt = f"Prompt of {name} 日本"
            stream = async_engine.generate(prompt, params, name)
            return "".join([output.outputs[0].text async for output in stream])

        tasks = [asyncio.create_task(collect(str(i))) for i in range(100)]
        for task in tasks[::10]:
            await asyncio.sleep(0)
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        cancelled = {
            i for i, each in enumerate(results) if isinstance(each, asyncio.CancelledError)
        }
        assert cancelled and cancelled <= set(range(0, 100, 10))  # some may have ended before
        assert all(each == text for i, each in enumerate(results) if i not in cancelled)
    async_engine.shutdown()

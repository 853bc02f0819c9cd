"""Prompts become tokens together, or beside the event loop; what is wrong is named as ever."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from support import made_tokenizers as made
from support.fakes import FakeClient, FakeClock, FakeDecided, counting, fake_session
from support.patience import WAIT_SECONDS

from engine import LLM, AsyncLLMEngine, RequestOutput, SamplingParams
from engine.errors import EngineDeadError, RequestError, RequestTypeError
from engine.frontend.session import Session
from engine.text.tokenizer import RustBackend, Tokenizer

PARAMS = SamplingParams(max_tokens=2)
LONG = "several words " * 200


class Counted(RustBackend):
    """Counts how often the library is asked."""

    def __init__(self) -> None:
        super().__init__(made.byte_level())
        rust, self.num_calls = self._tokenizer, 0

        class Counting:
            def __getattr__(_, name: str) -> Any:
                if name.startswith("encode"):
                    self.num_calls += 1
                return getattr(rust, name)

        self._tokenizer = Counting()


class Held(RustBackend):
    """Has not tokenised a text before the test says so."""

    def __init__(self) -> None:
        super().__init__(made.byte_level())
        self.may_end = threading.Event()
        self.has_begun = threading.Event()
        rust = self._tokenizer

        class RequestBlocks:
            def __getattr__(_, name: str) -> Any:
                if name.startswith("encode"):
                    self.has_begun.set()
                    assert self.may_end.wait(WAIT_SECONDS / 3), "the event loop stood still"
                return getattr(rust, name)

        self._tokenizer = RequestBlocks()


class Sizing(RustBackend):
    """Notes which threads work out how long a token can be."""

    def __init__(self) -> None:
        super().__init__(made.byte_level())
        self.threads: list[threading.Thread] = []
        self.has_ended = threading.Event()

    def max_chars_per_token(self) -> int | None:
        self.threads.append(threading.current_thread())
        most = super().max_chars_per_token()
        self.has_ended.set()
        return most


def session_with(backend: RustBackend, max_model_len: int = 4096) -> Session:
    client = FakeClient(counting, FakeDecided(max_model_len=max_model_len, vocab_size=1000))
    return fake_session(client, Tokenizer(backend, {}, {}))


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LLM:
    """One whose tokenizer is counted."""
    fake = FakeClient(counting, FakeDecided(vocab_size=1000))
    monkeypatch.setattr("engine.frontend.session.open_core", lambda config: fake)
    llm = LLM(str(made.save(tmp_path, made.byte_level(), {})))
    llm.get_tokenizer().backend = Counted()
    return llm


@pytest.fixture
def held() -> Any:
    backend = Held()
    yield backend
    backend.may_end.set()


async def collect(engine: AsyncLLMEngine, prompt: Any, name: str) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, PARAMS, name)]


async def test_other_tasks_go_on_while_a_long_prompt_is_tokenised(held: Held) -> None:
    engine = AsyncLLMEngine(session_with(held))
    task = asyncio.create_task(collect(engine, LONG, "long"))
    while not held.has_begun.is_set():
        await asyncio.sleep(0)  # in the event loop it would stay in there until the test says so
    (short,) = (await collect(engine, [5, 6], "short"))[-1:]
    assert short.finished and not task.done()
    held.may_end.set()
    assert (await task)[-1].finished
    engine.shutdown()


async def test_a_request_has_arrived_when_it_was_asked_not_when_it_is_tokenised(held: Held) -> None:
    session = session_with(held)
    clock = session.client.clock
    assert isinstance(clock, FakeClock)
    engine, asked = AsyncLLMEngine(session), clock.now
    task = asyncio.create_task(collect(engine, LONG, "long"))
    while not held.has_begun.is_set():
        await asyncio.sleep(0)
    clock.now += 7.0
    held.may_end.set()
    metrics = (await task)[-1].metrics
    assert metrics is not None and metrics.arrival_time == asked
    engine.shutdown()


async def test_a_million_characters_hold_up_no_other_task() -> None:
    """A real tokenizer would block the event loop from the first character to the last."""
    engine = AsyncLLMEngine(session_with(RustBackend(made.byte_level()), max_model_len=1 << 21))
    task = asyncio.create_task(collect(engine, "several words " * 72_000, "long"))
    num_turns = 0
    while not task.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert len(task.result()[-1].prompt_token_ids) > 100_000
    assert num_turns > 100
    engine.shutdown()


async def test_what_is_wrong_with_a_text_is_said_beside_the_loop_too() -> None:
    session = session_with(RustBackend(made.byte_level()), max_model_len=256)
    engine = AsyncLLMEngine(session)
    with pytest.raises(RequestTypeError, match="must be a str without lone surrogates"):
        await collect(engine, LONG + "\ud800", "half")
    with pytest.raises(RequestError, match="max_model_len is 256"):
        await collect(engine, LONG, "long")
    engine.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await collect(engine, LONG, "late")


async def test_who_gives_up_while_it_is_tokenised_leaves_nothing(held: Held) -> None:
    session = session_with(held)
    engine = AsyncLLMEngine(session)
    task = asyncio.create_task(collect(engine, LONG, "a"))
    while not held.has_begun.is_set():
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    held.may_end.set()
    assert (await collect(engine, [5], "a"))[-1].finished
    engine.shutdown()


async def test_a_shutdown_is_told_to_those_whose_prompts_wait_for_a_thread(held: Held) -> None:
    """They were not cancelled, so that is not what they are told."""
    engine = AsyncLLMEngine(session_with(held))
    tasks = [asyncio.create_task(collect(engine, LONG, f"r{i}")) for i in range(6)]
    while not held.has_begun.is_set():
        await asyncio.sleep(0)
    await asyncio.to_thread(engine.shutdown)
    held.may_end.set()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(end) for end in ends] == [EngineDeadError] * 6


def test_many_prompts_are_tokenised_together(llm: LLM) -> None:
    texts = [f"prompt number {i}" for i in range(100)]
    outputs = llm.generate([*texts, [5, 6]], PARAMS, use_tqdm=False)
    backend = llm.get_tokenizer().backend
    assert isinstance(backend, Counted) and backend.num_calls < 10
    plain = made.byte_level()
    ids = [plain.encode(text).ids for text in texts]
    assert [output.prompt_token_ids for output in outputs] == [*ids, [5, 6]]
    assert [output.prompt for output in outputs] == [*texts, None]


@pytest.mark.parametrize(
    ("wrong", "error", "told"),
    [
        ("half \ud800", RequestTypeError, "half .* cannot be tokenised"),
        (7, RequestTypeError, "prompt must be a str, a list of token ids, or a dict"),
        ({"prompt": 7}, RequestTypeError, "prompt must be a str"),
        (
            "long " * 5000,
            RequestError,
            "the prompt is too long: it has .* but max_model_len is 256",
        ),
        ("", RequestError, "the prompt is empty"),
    ],
)
def test_a_wrong_prompt_among_many_is_named_before_anything_is_computed(
    llm: LLM, wrong: Any, error: type[Exception], told: str
) -> None:
    prompts: list[Any] = [f"prompt number {i}" for i in range(20)]
    with pytest.raises(error, match=told):
        llm.generate([*prompts[:7], wrong, *prompts[7:]], PARAMS, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.llm_engine.token_counts().generation_tokens == 0
    assert len(llm.generate(prompts, PARAMS, use_tqdm=False)) == 20


def test_the_first_wrong_prompt_is_the_one_that_is_named(llm: LLM) -> None:
    bad = SamplingParams(max_tokens=2, logit_bias={5000: 1.0})
    with pytest.raises(RequestError, match="5000"):
        llm.generate(["fine", "half \ud800"], [bad, PARAMS], use_tqdm=False)


async def test_the_event_loop_does_not_work_out_how_long_a_token_can_be() -> None:
    """Tens of milliseconds with a large vocabulary, when the first long prompt comes."""
    backend = Sizing()
    engine = AsyncLLMEngine(session_with(backend, max_model_len=64))
    try:
        await asyncio.to_thread(backend.has_ended.wait, 1.0)
        with pytest.raises(RequestError, match="at least"):
            await anext(engine.generate("x" * 1_000_000, PARAMS, "a"))
    finally:
        engine.shutdown()
    assert len(backend.threads) == 1 and backend.threads[0] is not threading.current_thread()

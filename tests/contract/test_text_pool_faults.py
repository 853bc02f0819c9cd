"""Text processes that die, hang or talk rubbish: nobody but the culprit notices."""

import os
import random
import signal
import threading
import time
from contextlib import suppress

import pytest
from support.deadly_program import (
    DEADLY,
    DEADLY_ID,
    HANGING,
    RAISING_ID,
    RUBBISH,
    RaisingDetokenizer,
)
from support.fakes import FakeClient, FakeDecided, asked_id
from support.pooled import TEXT, WAIT, Pools, joined, session_on, texts_of

from engine import LLMEngine, RequestOutput, SamplingParams
from engine.config.engine import EngineConfig
from engine.config.model import ModelConfig
from engine.errors import EngineDeadError, RefusedError, RequestError
from engine.frontend import text_workers
from engine.frontend.session import Session
from engine.frontend.text_workers import MAX_IDLE_DEATHS, TextPool
from engine.messages.params import OutputKind
from engine.messages.requests import CompletionOutput
from engine.text import detokenizer as text
from engine.text.tokenizer import Tokenizer

KINDS: tuple[OutputKind, ...] = ("cumulative", "delta", "final")


@pytest.fixture
def deadly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_workers, "PROGRAM", "support.deadly_program")


def send(pool: TextPool, name: str, number: signal.Signals) -> None:
    pid = pool.pids.get(name)
    if pid is not None:
        os.kill(pid, number)


@pytest.mark.parametrize(
    ("number", "kind"),
    [(signal.SIGKILL, "delta"), (signal.SIGTERM, "final"), (signal.SIGSTOP, "delta")],
)
def test_streams_outlive_their_detokenizer(
    pools: Pools, tokenizer: Tokenizer, number: signal.Signals, kind: OutputKind
) -> None:
    """No token lost or doubled, in the middle of a character too."""
    pool = pools.start()
    params = SamplingParams(max_tokens=50, output_kind=kind, stop=["never there"])
    expected = texts_of(session_on(None, tokenizer), 4, params)
    steps = iter(range(1000))

    def pace() -> None:
        if next(steps) in (0, 7, 20):
            send(pool, "detokenizer process 0", number)
            time.sleep(0.02)

    assert texts_of(session_on(pool, tokenizer, pace), 4, params) == expected


@pytest.mark.parametrize("most", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_streams_outlive_kills_at_any_moment(
    pools: Pools, tokenizer: Tokenizer, seed: int, most: int
) -> None:
    pool = pools.start(size=2)
    dice = random.Random(seed)
    params = SamplingParams(max_tokens=200, output_kind="delta")
    expected = texts_of(session_on(None, tokenizer), 8, params)
    is_over = threading.Event()
    num_kills = 0

    def kill() -> None:
        nonlocal num_kills
        try:
            while num_kills < most and not is_over.is_set():
                time.sleep(dice.random() * 0.05)
                worker = pool.workers[2 + dice.randrange(2)]
                if worker.process is None or not worker.process.is_ready:
                    continue  # a death now would be its start's fault
                with suppress(ProcessLookupError):  # the last kill was not noticed yet
                    send(pool, worker.name, signal.SIGKILL)
                    num_kills += 1
        finally:
            is_over.set()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        while not is_over.is_set():
            assert texts_of(session_on(pool, tokenizer), 8, params) == expected
    finally:
        is_over.set()
        killer.join()
    assert num_kills == most


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGSTOP])
def test_prompts_outlive_their_tokenizer(
    pools: Pools, tokenizer: Tokenizer, number: signal.Signals
) -> None:
    pool = pools.start()
    texts = [f"prompt {i} " * 50 for i in range(200)]
    futures = [pool.encode(text) for text in texts]
    futures[20].result(WAIT)
    send(pool, "tokenizer process 0", number)
    assert [future.result(WAIT) for future in futures] == [tokenizer.encode(t) for t in texts]


@pytest.mark.parametrize("poison", [DEADLY, HANGING])
@pytest.mark.usefixtures("deadly")
def test_a_deadly_prompt_fails_alone(pools: Pools, tokenizer: Tokenizer, poison: str) -> None:
    pool = pools.start(hang_seconds=0.3)
    futures = {text: pool.encode(text) for text in ("before", poison, "behind", "last")}
    with pytest.raises(RequestError, match=poison) as caught:
        futures[poison].result(WAIT)
    assert "cannot be tokenised" in str(caught.value)
    for other in ("before", "behind", "last"):
        assert futures[other].result(WAIT) == tokenizer.encode(other)


def test_a_template_without_end_fails_alone(pools: Pools, tokenizer: Tokenizer) -> None:
    """A stranger's program: in the front end nothing could stop it."""
    pool = pools.start(hang_seconds=0.3)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    bomb = pool.render(endless, {"messages": [{"role": "user", "content": "boom"}]})
    fine = pool.render("{{ messages[0].content }}", {"messages": [{"content": "fine"}]})
    with pytest.raises(RequestError, match=r"boom.*3 times"):
        bomb.result(WAIT)
    assert fine.result(WAIT) == ("fine", tokenizer.encode("fine", add_special_tokens=False))


@pytest.mark.usefixtures("deadly")
def test_a_process_that_talks_rubbish_is_replaced(pools: Pools, tokenizer: Tokenizer) -> None:
    pool = pools.start()
    futures = [pool.encode(text) for text in ("before", RUBBISH, "behind")]
    with pytest.raises(RequestError, match=RUBBISH):
        futures[1].result(WAIT)
    assert futures[2].result(WAIT) == tokenizer.encode("behind")


@pytest.mark.parametrize("stop", [[], ["never there"]])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("deadly")
def test_tokens_that_raise_fail_their_sequence_alone(
    pools: Pools,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    kind: OutputKind,
    stop: list[str],
) -> None:
    """The same error wherever they are read."""
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    params = SamplingParams(output_kind=kind, stop=stop)
    healthy = ends_of(None, tokenizer, ids, ids, params)
    monkeypatch.setattr(text, "Detokenizer", RaisingDetokenizer)
    bad_ids = [*ids[:9], RAISING_ID, *ids[9:]]
    here, there = (ends_of(p, tokenizer, ids, bad_ids, params) for p in (None, pools.start()))
    assert here == there
    assert healthy[:7] + healthy[8:] == here[:7] + here[8:]
    assert here[7].finish_reason == "error" and f"no piece {RAISING_ID}" in str(here[7].error)


@pytest.mark.parametrize("stop", [[], ["never there"]])
@pytest.mark.parametrize("kind", ["delta", "final"])
@pytest.mark.usefixtures("deadly")
def test_deadly_tokens_fail_their_sequence_alone(
    pools: Pools, tokenizer: Tokenizer, kind: OutputKind, stop: list[str]
) -> None:
    """Among 16: the others lose nothing."""
    ids = [i for i in tokenizer.encode(TEXT, add_special_tokens=False) if i != DEADLY_ID]
    deadly_ids = [*ids[:9], DEADLY_ID, *ids[9:]]
    params = SamplingParams(max_tokens=30, stop=stop, output_kind=kind)
    found = ends_of(pools.start(), tokenizer, ids, deadly_ids, params)
    expected = ends_of(None, tokenizer, ids, deadly_ids, params)
    assert found[:7] + found[8:] == expected[:7] + expected[8:]
    assert found[7].finish_reason == "error" and "detokenizer process died" in str(found[7].error)


def ends_of(
    pool: TextPool | None,
    tokenizer: Tokenizer,
    ids: list[int],
    bad_ids: list[int],
    params: SamplingParams,
) -> list[CompletionOutput]:
    """What 16 requests get in all; the eighth of them gets ``bad_ids``."""
    client = FakeClient(
        lambda request, at: (bad_ids if asked_id(request.request_id) == "7" else ids)[at],
        FakeDecided(vocab_size=tokenizer.vocab_size),
    )
    config = EngineConfig(model=ModelConfig(model="fake"), disable_log_stats=True)
    llm_engine = LLMEngine(Session(config, client, tokenizer, client.clock, pool))
    for i in range(16):
        llm_engine.add_request(str(i), [5, 6, 7], params)
    outputs: list[list[RequestOutput]] = [[] for _ in range(16)]
    while llm_engine.has_unfinished_requests():
        for output in llm_engine.step():
            outputs[int(output.request_id)].append(output)
    assert not client.live
    return [joined(each, params.output_kind).outputs[0] for each in outputs]


def test_one_that_does_not_start_again_is_passed_over(
    pools: Pools, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ones do its work."""
    pool = pools.start(size=2)
    expected = texts_of(session_on(None, tokenizer), 8)
    monkeypatch.setattr(text_workers, "PROGRAM", "no_such_module_anywhere")
    session = session_on(pool, tokenizer)
    for worker in (pool.workers[0], pool.workers[3]):
        send(pool, worker.name, signal.SIGKILL)
        deadline = time.monotonic() + WAIT
        while not worker.is_down:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert pool.encode("fine").result(WAIT) == tokenizer.encode("fine")
    assert texts_of(session, 8) == expected


def test_one_that_never_stays_is_given_up_for_a_while(pools: Pools, tokenizer: Tokenizer) -> None:
    """No endless row of restarts; later it is tried again."""
    pool = pools.start(retry_seconds=0.2)
    worker = pool.workers[0]
    deadline = time.monotonic() + WAIT
    num_kills = 0
    while not worker.is_down:
        assert time.monotonic() < deadline
        if worker.process is not None and worker.process.is_ready:
            send(pool, worker.name, signal.SIGKILL)
            num_kills += 1
        time.sleep(0.02)
    assert num_kills >= MAX_IDLE_DEATHS
    time.sleep(0.25)
    assert pool.encode("fine").result(WAIT) == tokenizer.encode("fine")


@pytest.mark.behaviour(110)
def test_a_program_that_does_not_start_is_named(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within seconds, with its cause on standard error."""
    monkeypatch.setattr(text_workers, "PROGRAM", "no_such_module_anywhere")
    pool = TextPool(model, 1)
    with pytest.raises(EngineDeadError, match="tokenizer process 0 exited with status 1 before"):
        pool.wait_until_ready()
    with pytest.raises(RefusedError, match="tokenizer process 0"):
        pool.encode("x").result(WAIT)
    pool.close()

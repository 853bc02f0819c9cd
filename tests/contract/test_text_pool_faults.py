"""Text processes that die, hang, talk rubbish or are left alone: nobody but the culprit notices."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import made_tokenizers as made
import psutil
import pytest
import zmq
from contract.test_text_pool import TEMPLATE, TEXT
from deadly_program import DEADLY, DEADLY_ID, HANGING, RUBBISH
from fakes import FakeClient, FakeDecided, replay

from engine import AsyncLLMEngine, LLMEngine, SamplingParams
from engine.config.engine import EngineConfig
from engine.config.model import ModelConfig
from engine.errors import EngineDeadError, RefusedError, RequestError
from engine.frontend import pool_slot
from engine.frontend.pool import TextPool
from engine.frontend.pool_slot import Asked, Task, TextProcess
from engine.frontend.session import Session
from engine.frontend.tokenizer import Tokenizer, load_tokenizer
from engine.messages.outputs import CompletionOutput
from engine.messages.params import OutputKind
from engine.messages.text import Encode, Encoded, Failed, Ready, Reply

WAIT = 30.0  # longest any test waits for anything
SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGSTOP]
PARAMS = SamplingParams(max_tokens=50, output_kind="delta")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    root = tmp_path_factory.mktemp("tokenizer")
    made.save(root, made.metaspace(), {"chat_template.jinja": TEMPLATE})
    return ModelConfig(model=str(root))


@pytest.fixture(scope="module")
def tokenizer(model: ModelConfig) -> Tokenizer:
    return load_tokenizer(model)


Start = Callable[..., TextPool]


@pytest.fixture
def start(model: ModelConfig) -> Iterator[Start]:
    """Starts pools of one process of each kind; a hung one is given a second."""
    pools: list[TextPool] = []

    def make(size: int = 1, hang_seconds: float = 1.0) -> TextPool:
        pools.append(TextPool(model, size, hang_seconds=hang_seconds))
        pools[-1].wait_until_ready()
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def deadly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_slot, "PROGRAM", "deadly_program")


def session_on(
    pool: TextPool | None, tokenizer: Tokenizer, pace: Callable[[], object] = lambda: None
) -> Session:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    client = FakeClient(replay(ids), FakeDecided(vocab_size=tokenizer.vocab_size), pace=pace)
    config = EngineConfig(model=ModelConfig(model="fake"), disable_log_stats=True)
    return Session(config, client, tokenizer, client.clock, pool)


def texts_of(session: Session, num: int, params: SamplingParams = PARAMS) -> list[str]:
    llm_engine = LLMEngine(session)
    for i in range(num):
        llm_engine.add_request(str(i), [5, 6, 7], params)
    texts = [""] * num
    while llm_engine.has_unfinished_requests():
        for output in llm_engine.step():
            texts[int(output.request_id)] += output.outputs[0].text
    return texts


def send(pool: TextPool, name: str, number: signal.Signals) -> None:
    pid = pool.pids.get(name)
    if pid is not None:
        os.kill(pid, number)


def wait_for(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not is_true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("kind", ["delta", "final"])
def test_streams_outlive_their_detokenizer(
    start: Start, tokenizer: Tokenizer, number: signal.Signals, kind: OutputKind
) -> None:
    """No token lost or doubled, in the middle of a character too."""
    pool = start()
    params = SamplingParams(max_tokens=50, output_kind=kind, stop=["never there"])
    expected = texts_of(session_on(None, tokenizer), 4, params)
    steps = iter(range(1000))

    def pace() -> None:
        if next(steps) in (0, 7, 20):
            send(pool, "detokenizer process 0", number)
            time.sleep(0.02)

    assert texts_of(session_on(pool, tokenizer, pace), 4, params) == expected


@pytest.mark.parametrize("most", [10, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_streams_outlive_kills_at_any_moment(
    start: Start, tokenizer: Tokenizer, seed: int, most: int
) -> None:
    pool = start(size=2)
    dice = random.Random(seed)
    params = SamplingParams(max_tokens=200, output_kind="delta")
    expected = texts_of(session_on(None, tokenizer), 8, params)
    is_over = threading.Event()
    num_kills = 0

    def kill() -> None:
        nonlocal num_kills
        while num_kills < most and not is_over.is_set():
            time.sleep(dice.random() * 0.05)
            slot = pool._loop.slots[2 + dice.randrange(2)]
            if slot.process is not None and slot.process.is_ready:  # else its start is at fault
                send(pool, slot.name, signal.SIGKILL)
                num_kills += 1
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


@pytest.mark.parametrize("number", SIGNALS)
def test_prompts_outlive_their_tokenizer(
    start: Start, tokenizer: Tokenizer, number: signal.Signals
) -> None:
    pool = start()
    texts = [f"prompt {i} " * 50 for i in range(200)]
    futures = [pool.encode(text) for text in texts]
    futures[20].result(WAIT)
    send(pool, "tokenizer process 0", number)
    assert [future.result(WAIT) for future in futures] == [tokenizer.encode(t) for t in texts]


@pytest.mark.parametrize("poison", [DEADLY, HANGING])
@pytest.mark.usefixtures("deadly")
def test_a_deadly_prompt_fails_alone(start: Start, tokenizer: Tokenizer, poison: str) -> None:
    pool = start(hang_seconds=0.3)
    futures = {text: pool.encode(text) for text in ("before", poison, "behind", "last")}
    with pytest.raises(RequestError, match=poison) as caught:
        futures[poison].result(WAIT)
    assert "cannot be tokenised" in str(caught.value)
    for text in ("before", "behind", "last"):
        assert futures[text].result(WAIT) == tokenizer.encode(text)


@pytest.mark.usefixtures("deadly")
def test_a_process_that_talks_rubbish_is_replaced(start: Start, tokenizer: Tokenizer) -> None:
    pool = start()
    futures = [pool.encode(text) for text in ("before", RUBBISH, "behind")]
    with pytest.raises(RequestError, match=RUBBISH):
        futures[1].result(WAIT)
    assert futures[2].result(WAIT) == tokenizer.encode("behind")


@pytest.mark.parametrize("stop", [[], ["never there"]])
@pytest.mark.parametrize("kind", ["delta", "final"])
@pytest.mark.usefixtures("deadly")
def test_deadly_tokens_fail_their_sequence_alone(
    start: Start, tokenizer: Tokenizer, kind: OutputKind, stop: list[str]
) -> None:
    """Among 16: the others lose nothing."""
    ids = [i for i in tokenizer.encode(TEXT, add_special_tokens=False) if i != DEADLY_ID]
    deadly_ids = [*ids[:9], DEADLY_ID, *ids[9:]]

    def ends(pool: TextPool | None) -> list[CompletionOutput]:
        client = FakeClient(
            lambda request, at: (deadly_ids if request.request_id == "7" else ids)[at],
            FakeDecided(vocab_size=tokenizer.vocab_size),
        )
        config = EngineConfig(model=ModelConfig(model="fake"), disable_log_stats=True)
        llm_engine = LLMEngine(Session(config, client, tokenizer, client.clock, pool))
        params = SamplingParams(max_tokens=30, output_kind="cumulative", stop=stop)
        params.output_kind = kind if kind == "final" else "cumulative"
        for i in range(16):
            llm_engine.add_request(str(i), [5, 6, 7], params)
        last = {}
        while llm_engine.has_unfinished_requests():
            last.update({output.request_id: output.outputs[0] for output in llm_engine.step()})
        assert not client.live
        return [last[str(i)] for i in range(16)]

    found, expected = ends(start()), ends(None)
    assert found[:7] + found[8:] == expected[:7] + expected[8:]
    assert found[7].finish_reason == "error" and "detokenizer process died" in str(found[7].error)


GARBAGE = [
    [b""],
    [b"x", b"y"],
    [b"\x92\x90\x90", b"\x93\xa6encode\x00\xc3"],  # no text beside it
    [b"\x92\x91\xc0\x90", b"\x93\xa6encode\x00\xc3", b"\xff\xfe"],  # which is no UTF-8
    [b"\x92\x91\x93\x00\x01\x01\x90", b"\x93\xa6encode\x00\xc3"],  # a place nobody lent
    [os.urandom(99)] * 5,
]


def test_garbage_frames_cost_nobody_anything(model: ModelConfig, tokenizer: Tokenizer) -> None:
    """The process answers that they are none, and goes on."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    process = TextProcess(context, "tokenizer", Asked(model.model, None, False, 1 << 16, WAIT))
    pid = process.program.pid
    assert isinstance(next_reply(process), Ready)
    for frames in GARBAGE:
        process.socket.send_multipart([process._identity, *frames])
        assert isinstance(next_reply(process), Failed)
    process.send(Task(Encode(5, True), [b"fine"], lambda delivery: delivery))
    assert next_reply(process) == Encoded(5)
    assert process.program.pid == pid
    process.close()
    context.destroy()


def next_reply(process: TextProcess) -> Reply:
    assert process.socket.poll(int(WAIT * 1000))
    delivery = process.receive()
    assert delivery is not None
    return delivery.message


def test_110_a_program_that_does_not_start_is_named(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within seconds, with its cause on standard error."""
    monkeypatch.setattr(pool_slot, "PROGRAM", "no_such_module_anywhere")
    pool = TextPool(model, 1)
    with pytest.raises(EngineDeadError, match="tokenizer process 0 exited with status 1 before"):
        pool.wait_until_ready()
    with pytest.raises(RefusedError, match="tokenizer process 0"):
        pool.encode("x").result(WAIT)
    pool.close()


def test_116_closed_pools_leave_nothing_and_refuse(start: Start) -> None:
    """No child, no file, no descriptor; closing again does nothing."""
    me = psutil.Process()
    start().close()  # what is made once stays
    before = (me.num_fds(), sorted(os.listdir("/dev/shm")), _directories())
    pool = start(size=2)
    assert _directories() == before[2]  # sockets lose their names once they are connected
    children = [psutil.Process(pid) for pid in pool.pids.values()]
    assert len(children) == 4
    pending = [pool.encode("x " * 10_000) for _ in range(50)]
    pool.close()
    pool.close()
    assert not any(child.is_running() for child in children)
    for future in pending:
        if future.exception(WAIT) is not None:
            assert isinstance(future.exception(), EngineDeadError)
    with pytest.raises(EngineDeadError):
        pool.encode("x")
    assert (me.num_fds(), sorted(os.listdir("/dev/shm")), _directories()) == before


def test_the_death_of_the_parent_ends_all_within_two_seconds(model: ModelConfig) -> None:
    """Also a process that is busy in native code, and one that hangs."""
    code = (
        "import time\n"
        "from engine.config.model import ModelConfig\n"
        "from engine.frontend.pool import TextPool\n"
        f"pool = TextPool(ModelConfig(model={model.model!r}), 2)\n"
        "pool.wait_until_ready()\n"
        "pool.encode('a b c ' * 5_000_000)\n"
        "print(*pool.pids.values(), flush=True)\n"
        "time.sleep(100)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(children) == 4
    time.sleep(0.2)
    parent.kill()
    parent.wait(WAIT)
    parent.stdout.close()
    began = time.monotonic()
    _, alive = psutil.wait_procs(children, timeout=WAIT)
    assert not alive and time.monotonic() - began < 2.0


def test_idle_processes_use_no_time(start: Start) -> None:
    pool = start(size=2)
    processes = [psutil.Process(pid) for pid in pool.pids.values()]
    ours = psutil.Process().cpu_times()
    before = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(1.0)
    after = [sum(process.cpu_times()[:2]) for process in processes]
    assert sum(after) - sum(before) <= 0.01
    now = psutil.Process().cpu_times()
    assert (now.user + now.system) - sum(ours[:2]) <= 0.03


async def test_long_prompts_do_not_hold_up_the_event_loop(
    start: Start, tokenizer: Tokenizer
) -> None:
    """What the pool is for: others are served while a long text is tokenised."""
    async_engine = AsyncLLMEngine(session_on(start(hang_seconds=WAIT), tokenizer))
    long = asyncio.create_task(_first(async_engine, "long " * 100_000))
    await asyncio.sleep(0)
    num_turns = 0
    while not long.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    with pytest.raises(RequestError, match="max_model_len"):
        await long
    assert num_turns > 20
    async_engine.shutdown()


async def _first(async_engine: AsyncLLMEngine, prompt: str) -> None:
    async for _ in async_engine.generate(prompt, None, "long"):
        return


def _directories() -> list[str]:
    return sorted(str(path) for path in Path(tempfile.gettempdir()).glob("metronome-*"))

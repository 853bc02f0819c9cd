"""Text processes from their start to their end: closing, forks, interrupts, long texts."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.fakes import FakeDecided, replay
from support.patience import SOON_SECONDS
from support.pooled import WAIT, LeapingClient, Pools, llm_around, session_on, texts_of

from engine import AsyncLLMEngine, LLMEngine, SamplingParams
from engine.config.engine import EngineConfig
from engine.config.model import ModelConfig
from engine.errors import EngineDeadError
from engine.frontend.session import Session
from engine.frontend.text_workers import TextPool
from engine.text.tokenizer import Tokenizer

PROCESSES = ["tokenizer process 0", "detokenizer process 0"]
PARAMS = SamplingParams(max_tokens=40, output_kind="delta")


@pytest.mark.behaviour(116)
@pytest.mark.usefixtures("place")  # other tests may open sockets meanwhile
def test_closed_pools_leave_nothing_and_refuse(pools: Pools) -> None:
    """No child, no file, no descriptor; closing again does nothing."""
    me = psutil.Process()
    pools.start().close()  # what is made once stays
    before = (me.num_fds(), sorted(os.listdir("/dev/shm")), _directories())
    pool = pools.start(size=2)
    assert _directories() == before[2]  # it has no file at all
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
        "from engine.frontend.text_workers import TextPool\n"
        f"pool = TextPool(ModelConfig(model={model.model!r}), 2)\n"
        "pool.wait_until_ready()\n"
        "pool.encode('a b c ' * 500_000)\n"
        "print(*pool.pids.values(), flush=True)\n"
        "time.sleep(600)\n"
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
    assert not alive and time.monotonic() - began < SOON_SECONDS


def test_a_program_that_forgets_to_close_ends_at_once(model: ModelConfig) -> None:
    code = (
        "from engine.config.model import ModelConfig\n"
        "from engine.frontend.text_workers import TextPool\n"
        f"pool = TextPool(ModelConfig(model={model.model!r}), 1)\n"
        "print(pool.encode('x').result(), *pool.pids.values(), sep=';')\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not any(psutil.pid_exists(int(pid)) for pid in done.stdout.split(";")[1:])


async def test_long_prompts_do_not_hold_up_the_event_loop(
    pools: Pools, tokenizer: Tokenizer
) -> None:
    """What the pool is for: others are served while a long text is tokenised."""
    async_engine = AsyncLLMEngine(session_on(pools.start(hang_seconds=WAIT), tokenizer))
    long = asyncio.create_task(_first(async_engine, "long " * 100_000))
    await asyncio.sleep(0)
    num_turns = 0
    while not long.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    await long
    assert num_turns > 20
    async_engine.shutdown()


async def _first(async_engine: AsyncLLMEngine, prompt: str) -> None:
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=-1)
    async for _ in async_engine.generate(prompt, params, "long"):
        return


def _directories() -> list[str]:
    return sorted(str(path) for path in Path(tempfile.gettempdir()).glob("metronome-*"))


def test_an_end_waits_for_no_process_that_is_stopped(pools: Pools) -> None:
    pool = pools.start(size=2, hang_seconds=WAIT)
    pids = list(pool.pids.values())
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    futures = [pool.encode("x") for _ in range(10)]
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < SOON_SECONDS
    assert all(isinstance(future.exception(WAIT), EngineDeadError) for future in futures)
    assert not any(map(psutil.pid_exists, pids))


def test_a_fork_is_told_and_disturbs_nobody(model: ModelConfig) -> None:
    code = (
        "import os\n"
        "from engine.config.model import ModelConfig\n"
        "from engine.errors import EngineDeadError\n"
        "from engine.frontend.text_workers import TextPool\n"
        f"pool = TextPool(ModelConfig(model={model.model!r}), 1)\n"
        "before = pool.encode('x').result(60)\n"
        "fork = os.fork()\n"
        "if not fork:\n"
        "    try:\n"
        "        pool.encode('x').result(60)\n"
        "    except EngineDeadError as error:\n"
        "        raise SystemExit(7 if 'forked' in str(error) else 1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 7\n"
        "assert pool.encode('x').result(60) == before\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_short_texts_pass_a_long_one(pools: Pools, tokenizer: Tokenizer) -> None:
    pool = pools.start(size=2, hang_seconds=WAIT)
    long = pool.encode("long " * 400_000)
    short = [pool.encode(f"short {i}") for i in range(50)]
    assert [each.result(WAIT) for each in short] == [
        tokenizer.encode(f"short {i}") for i in range(50)
    ]
    assert not long.done()


@pytest.mark.parametrize("moment", [4, 7])
def test_tokens_that_come_several_at_a_time_outlive_a_death(
    pools: Pools, tokenizer: Tokenizer, moment: int
) -> None:
    """Half a character withholds the text of all that came with it."""
    ids = tokenizer.encode("日é本a語😀" * 4, add_special_tokens=False)
    pool = pools.start()
    steps = iter(range(1000))

    def pace() -> None:
        if next(steps) == moment:
            os.kill(pool.pids[PROCESSES[1]], signal.SIGKILL)

    def session(pool: TextPool | None, **options: Any) -> Session:
        client = LeapingClient(replay(ids), FakeDecided(256, tokenizer.vocab_size), **options)
        config = EngineConfig(model=ModelConfig(model="fake"), disable_log_stats=True)
        return Session(config, client, tokenizer, client.clock, pool)

    for stop in ([], ["never there"]):
        params = SamplingParams(max_tokens=60, output_kind="delta", stop=stop)
        steps = iter(range(1000))
        expected = texts_of(session(None), 3, params)
        assert texts_of(session(pool, pace=pace), 3, params) == expected


def test_a_long_text_is_no_hang(pools: Pools, tokenizer: Tokenizer) -> None:
    """However little time a task is given, a text has what it takes."""
    pool = pools.start(hang_seconds=0.01, slowest=1 << 15)  # of a busy machine
    pids = pool.pids
    text = "long " * 200_000
    assert pool.encode(text).result(WAIT) == tokenizer.encode(text)
    assert pool.pids == pids


def test_a_process_is_started_again_from_another_working_directory(
    model: ModelConfig, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(model.model).parent)
    with Pools(ModelConfig(model=Path(model.model).name)) as pools:
        pool = pools.start()
        monkeypatch.chdir(tmp_path)
        os.kill(pool.pids[PROCESSES[0]], signal.SIGKILL)
        assert pool.encode("again").result(WAIT) == tokenizer.encode("again")


def interrupt_after(seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


@pytest.mark.usefixtures("can_interrupt")
def test_an_interrupt_while_prompts_are_tokenised(pools: Pools, tokenizer: Tokenizer) -> None:
    """At once, however long they take."""
    pool = pools.start(hang_seconds=WAIT)
    llm = llm_around(session_on(pool, tokenizer))
    os.kill(pool.pids["tokenizer process 0"], signal.SIGSTOP)
    began, timer = time.monotonic(), interrupt_after(0.1)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["text"] * 40, PARAMS, use_tqdm=False)
    assert time.monotonic() - began < SOON_SECONDS
    timer.join()
    os.kill(pool.pids["tokenizer process 0"], signal.SIGCONT)
    (output,) = llm.generate(["text"], PARAMS, use_tqdm=False)
    assert output.prompt_token_ids == tokenizer.encode("text")


@pytest.mark.usefixtures("can_interrupt")
def test_an_interrupt_while_texts_are_made(pools: Pools, tokenizer: Tokenizer) -> None:
    """When the step is done, for which a process that hangs is replaced; then all goes on."""
    pool = pools.start(hang_seconds=0.4)
    expected = texts_of(session_on(None, tokenizer), 3, PARAMS)
    llm_engine = LLMEngine(session_on(pool, tokenizer, lambda: time.sleep(0.005)))
    texts = [""] * 3
    for i in range(3):
        llm_engine.add_request(str(i), [5, 6, 7], PARAMS)
    num_interrupts = 0
    while llm_engine.has_unfinished_requests():
        try:
            if not num_interrupts and len(texts[0]) > 20:
                num_interrupts += 1
                os.kill(pool.pids["detokenizer process 0"], signal.SIGSTOP)
                timer = interrupt_after(0.1)
            for output in llm_engine.step():
                texts[int(output.request_id)] += output.outputs[0].text
        except KeyboardInterrupt:
            num_interrupts += 1
    timer.join()
    assert num_interrupts == 2 and texts == expected

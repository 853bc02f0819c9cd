"""Text processes that are left alone, left behind, or given more and more to do."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from support.patience import SOON_SECONDS
from support.pooled import WAIT, Pools, session_on, texts_of

from engine import AsyncLLMEngine, SamplingParams
from engine.config.model import ModelConfig
from engine.errors import EngineDeadError
from engine.messages.params import OutputKind
from engine.text.tokenizer import Tokenizer


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


def test_what_arrives_after_a_rest_is_done_at_once(pools: Pools) -> None:
    """A sleeper wakes."""
    pool = pools.start()
    seconds = []
    for _ in range(15):
        time.sleep(0.1)
        began = time.monotonic()
        assert len(pool.encode("x" * 8000).result(WAIT)) > 1000
        seconds.append(time.monotonic() - began)
    assert min(seconds) < 0.1


@pytest.mark.parametrize("kind", ["delta", "final"])
def test_the_cost_of_a_text_grows_with_its_length_only(
    pools: Pools, tokenizer: Tokenizer, kind: OutputKind
) -> None:
    """No text is decoded again and again as it grows."""
    pool = pools.start()

    def seconds(num_tokens: int) -> float:
        process = psutil.Process(pool.pids["detokenizer process 0"])
        params = SamplingParams(max_tokens=num_tokens, output_kind=kind, stop=["never there"])
        before = sum(process.cpu_times()[:2])
        texts_of(session_on(pool, tokenizer, max_model_len=10_000), 4, params)
        return sum(process.cpu_times()[:2]) - before

    seconds(500)
    short, long = seconds(1000), seconds(8000)
    assert long < max(short, 0.02) * 8 * 2


def test_idle_processes_use_no_time(pools: Pools) -> None:
    pool = pools.start(size=2)
    processes = [psutil.Process(pid) for pid in pool.pids.values()]
    ours = psutil.Process().cpu_times()
    before = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(1.0)
    after = [sum(process.cpu_times()[:2]) for process in processes]
    assert sum(after) - sum(before) <= 0.01
    now = psutil.Process().cpu_times()
    assert (now.user + now.system) - sum(ours[:2]) <= 0.03


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

"""A rank of a real model that is killed or stopped ends its engine, whoever uses it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import Any

import pytest
from e2e.test_ngram import BOX
from support.live_core import is_running, wait_until
from support.patience import SOON_SECONDS
from support.processes import ranks_of, tree_of

from engine import LLM, AsyncLLMEngine, EngineArgs, SamplingParams
from engine.errors import EngineDeadError

pytestmark = pytest.mark.slow
TWO: dict[str, Any] = {**BOX, "tensor_parallel_size": 2, "core_hang_timeout": 5.0}
LONG = SamplingParams(max_tokens=200, ignore_eos=True)
HOW = {
    signal.SIGKILL: r"rank 1 \(process \d+\) was killed by SIGKILL",
    signal.SIGSTOP: r"rank 1( \(process \d+\))? has not answered for 4 s",
}


def last_rank() -> int:
    """The process of the rank that was started last."""
    return max(ranks_of(os.getpid()))


def strike(rank: int, number: int, seconds: float) -> None:
    threading.Timer(seconds, os.kill, (rank, number)).start()


@pytest.mark.parametrize("number", HOW)
@pytest.mark.parametrize("multiprocess", [False, True])
def test_a_user_of_llm_hears_which_rank_it_was(number: signal.Signals, multiprocess: bool) -> None:
    with LLM(**TWO, multiprocess=multiprocess) as llm:
        started = tree_of(os.getpid())[1:]
        rank = last_rank()
        strike(rank, number, 0.2)
        with pytest.raises(EngineDeadError, match=HOW[number]):
            for _ in range(1000):
                llm.generate(["a list", "a tree"], LONG, use_tqdm=False)
    assert wait_until(lambda: not is_running(rank), SOON_SECONDS) is not None
    assert started


@pytest.mark.parametrize("is_idle", [False, True])
def test_a_user_of_the_async_engine_hears_it_too(is_idle: bool) -> None:
    async def use() -> None:
        engine = AsyncLLMEngine.from_engine_args(EngineArgs(**TWO))
        try:
            rank = last_rank()
            if is_idle:
                os.kill(rank, signal.SIGKILL)
                began = time.monotonic()
                while time.monotonic() - began < SOON_SECONDS and engine.is_running:
                    await asyncio.sleep(0.05)
            else:
                strike(rank, signal.SIGKILL, 0.2)
            with pytest.raises(EngineDeadError, match=HOW[signal.SIGKILL]):
                for number in range(1000):
                    async for _ in engine.generate("a list", LONG, str(number)):
                        pass
        finally:
            engine.shutdown()
        assert wait_until(lambda: not is_running(rank), SOON_SECONDS) is not None

    asyncio.run(use())

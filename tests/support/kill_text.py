"""Text processes of a whole engine that die or are stopped: every text must come out as if not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from unittest.mock import patch

from engine import EngineArgs, LLMEngine, SamplingParams
from engine.assets import BOX_MODEL
from engine.frontend import text_workers
from support import hurt_text
from support.live_core import wait_until

SIGNALS = {"raise": hurt_text.RAISE, "garbage": hurt_text.RUBBISH}
NAMES = {"tokenizer": "tokenizer process 0", "detokenizer": "detokenizer process 0"}
PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPTS = [f"def function_{index}(value):\n    " + "return value + 1\n" * 20 for index in range(8)]


def texts_with(place: str, phase: str, fault: str, *, core: Callable[[int], object]) -> list[str]:
    """What the requests get while ``fault`` befalls the process of ``place`` in ``phase``.

    ``core`` is called with the core's process in phase ``draining``, before.
    """
    with patch.object(text_workers, "PROGRAM", "support.hurt_text"):
        return _texts_with(place, phase, fault, core)


def _texts_with(place: str, phase: str, fault: str, core: Callable[[int], object]) -> list[str]:
    args = EngineArgs(
        model=str(BOX_MODEL),
        tokenizer_pool_size=1,
        multiprocess=True,
        num_kv_blocks=400,
        max_model_len=512,
        disable_log_stats=True,
        log_level="error",
    )
    engine = LLMEngine.from_engine_args(args)
    pool, name = engine.session._pool, NAMES[place]
    pid = pool.pids[name]
    try:
        if phase == "handshake":  # of the one that takes its place
            os.kill(pid, signal.SIGKILL)
            assert wait_until(lambda: pool.pids.get(name, pid) != pid)
            hurt(pool.pids[name], fault)
        if phase == "idle":
            hurt(pid, fault)
            time.sleep(0.2)
        texts, is_first = _begin(engine), True
        if phase == "prefill":
            hurt(pid, fault)
        while engine.has_unfinished_requests():
            for output in engine.step():
                texts[int(output.request_id)] = output.outputs[0].text
            if is_first and any(texts) and phase in ("decode", "draining"):
                is_first = False
                if phase == "draining":
                    core(engine.session.client.pids[0])
                hurt(pid, fault)
        return texts
    finally:
        engine.session.shutdown()


def hurt(pid: int, fault: str) -> None:
    """Have a text process suffer one of the faults of the matrix; one that is stopped goes on."""
    number = SIGNALS[fault] if fault in SIGNALS else signal.Signals[fault]
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(0.3)
            os.kill(pid, signal.SIGCONT)


@cache
def texts_of_nobody_hurt() -> list[str]:
    args = EngineArgs(
        model=str(BOX_MODEL), num_kv_blocks=400, max_model_len=512, disable_log_stats=True
    )
    engine = LLMEngine.from_engine_args(args)
    texts = _begin(engine)
    while engine.has_unfinished_requests():
        for output in engine.step():
            texts[int(output.request_id)] = output.outputs[0].text
    engine.session.shutdown()
    return texts


def _begin(engine: LLMEngine) -> list[str]:
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, PARAMS)
    return [""] * len(PROMPTS)

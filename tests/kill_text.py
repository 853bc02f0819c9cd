"""Text processes of a whole engine that die or are stopped: every text must come out as if not."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

from engine import EngineArgs, LLMEngine, SamplingParams
from engine.assets import BOX_MODEL

NAMES = {"tokenizer": "tokenizer process 0", "detokenizer": "detokenizer process 0"}
PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPTS = [f"def function_{index}(value):\n    " + "return value + 1\n" * 20 for index in range(8)]


def texts_with(
    place: str, phase: str, hurt: Callable[[int], object], *, core: Callable[[int], object]
) -> list[str]:
    """What the requests get while ``hurt`` is called with the process of ``place`` in ``phase``.

    ``core`` is called with the core's process in phase ``draining``, before.
    """
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
    pid = engine.session._pool.pids[NAMES[place]]
    try:
        if phase == "idle":
            hurt(pid)
            time.sleep(0.2)
        texts, is_first = _begin(engine), True
        if phase == "prefill":
            hurt(pid)
        while engine.has_unfinished_requests():
            for output in engine.step():
                texts[int(output.request_id)] = output.outputs[0].text
            if is_first and any(texts) and phase in ("decode", "draining"):
                is_first = False
                if phase == "draining":
                    core(engine.session.client._child.pid)
                hurt(pid)
        return texts
    finally:
        engine.session.shutdown()


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

"""Ctrl-C while text processes are waited for: nothing is lost, nothing stays behind."""

import os
import signal
import threading
import time

import pytest
from support.patience import SOON_SECONDS
from support.pooled import WAIT, Pools, llm_around, session_on, texts_of

from engine import LLMEngine, SamplingParams
from engine.text.tokenizer import Tokenizer

PARAMS = SamplingParams(max_tokens=40, output_kind="delta")


pytestmark = pytest.mark.usefixtures("can_interrupt")


def interrupt_after(seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


def test_while_prompts_are_tokenised(pools: Pools, tokenizer: Tokenizer) -> None:
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


def test_while_texts_are_made(pools: Pools, tokenizer: Tokenizer) -> None:
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

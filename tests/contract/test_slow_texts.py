"""Texts that are slow to come: they hold up their own request, and nothing else."""

import os
import signal
import time
from collections.abc import Callable

import pytest
from support.pooled import PARAMS, WAIT, Pools, session_on, texts_of

from engine import LLMEngine, RequestOutput, SamplingParams
from engine.errors import EngineDeadError
from engine.frontend.text_workers import TextPool
from engine.text.tokenizer import Tokenizer

SLOW = "detokenizer process 0"


def signal_to(pool: TextPool, name: str, number: signal.Signals) -> None:
    os.kill(pool.pids[name], number)


def step_until(
    llm_engine: LLMEngine, is_so: Callable[[], bool], outputs: dict[str, list[RequestOutput]]
) -> int:
    """Steps that were made until then."""
    deadline, num_steps = time.monotonic() + WAIT, 0
    while not is_so():
        assert time.monotonic() < deadline
        num_steps += 1
        for output in llm_engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return num_steps


def finished(outputs: dict[str, list[RequestOutput]]) -> set[str]:
    return {name for name, own in outputs.items() if own[-1].finished}


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.outputs[0].text for output in outputs)


def test_a_slow_text_delays_no_neighbour(pools: Pools, tokenizer: Tokenizer) -> None:
    (text,) = texts_of(session_on(None, tokenizer), 1)
    pool = pools.start(size=2, hang_seconds=5.0)
    llm_engine = LLMEngine(session_on(pool, tokenizer))
    outputs: dict[str, list[RequestOutput]] = {}
    for name in ("slow", "neighbour"):  # each has a detokenizer of its own
        llm_engine.add_request(name, [5, 6, 7], PARAMS)
    no_text = SamplingParams(max_tokens=50, output_kind="delta", detokenize=False)
    llm_engine.add_request("no text", [5, 6, 7], no_text)
    signal_to(pool, SLOW, signal.SIGSTOP)
    step_until(llm_engine, lambda: finished(outputs) >= {"neighbour", "no text"}, outputs)
    assert "slow" not in outputs and llm_engine.has_unfinished_requests()
    assert text_of(outputs["neighbour"]) == text
    signal_to(pool, SLOW, signal.SIGCONT)
    step_until(llm_engine, lambda: "slow" in finished(outputs), outputs)
    assert text_of(outputs["slow"]) == text
    assert not llm_engine.has_unfinished_requests()


@pytest.mark.behaviour(113)
def test_an_abort_waits_for_its_own_text_only(pools: Pools, tokenizer: Tokenizer) -> None:
    pool = pools.start(size=2, hang_seconds=WAIT)
    llm_engine = LLMEngine(session_on(pool, tokenizer, lambda: time.sleep(0.002)))
    outputs: dict[str, list[RequestOutput]] = {}
    for name in ("slow", "neighbour"):
        llm_engine.add_request(name, [5, 6, 7], PARAMS)
    step_until(llm_engine, lambda: len(outputs) == 2, outputs)
    signal_to(pool, SLOW, signal.SIGSTOP)
    llm_engine.abort_request("slow")
    step_until(llm_engine, lambda: "neighbour" in finished(outputs), outputs)
    signal_to(pool, SLOW, signal.SIGCONT)
    step_until(llm_engine, lambda: "slow" in finished(outputs), outputs)
    last = outputs["slow"][-1]
    assert last.outputs[0].finish_reason == "abort" and not llm_engine.has_unfinished_requests()
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs["slow"])
    assert text_of(outputs["neighbour"]).startswith(text_of(outputs["slow"]).rstrip("\ufffd"))
    assert 0 < num_tokens < 50


@pytest.mark.behaviour(110)
@pytest.mark.parametrize("moment", [2, 20])
def test_texts_of_a_core_that_died_are_not_lost(
    pools: Pools, tokenizer: Tokenizer, moment: int
) -> None:
    texts = []
    for pool in (None, pools.start()):
        session = session_on(pool, tokenizer, lambda: time.sleep(0.005))
        session.client.dies_at = moment  # type: ignore[attr-defined]
        llm_engine = LLMEngine(session)
        llm_engine.add_request("a", [5, 6, 7], PARAMS)
        outputs: dict[str, list[RequestOutput]] = {}
        with pytest.raises(EngineDeadError, match="fake core died"):
            step_until(llm_engine, lambda: False, outputs)
        texts.append(text_of(outputs["a"]))
    assert texts[0] == texts[1]

"""Two cores with two ranks each: requests are answered as by one worker, and one core survives the
death of the other's rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from e2e.test_ngram import ASKED, BOX, answers
from support.patience import WAIT_SECONDS
from support.processes import nothing_left, ranks_of, tree_of

from engine import EngineArgs, LLMEngine, SamplingParams

pytestmark = pytest.mark.slow
TEXTS = [f"{word} {other} of" for word in ("A list", "The tree", "Each") for other in ("b", "c")]
LONG = SamplingParams(temperature=0.7, seed=3, max_tokens=220, ignore_eos=True)
TWO_TIMES_TWO: dict[str, Any] = {
    **BOX,
    "multiprocess": True,
    "data_parallel_size": 2,
    "tensor_parallel_size": 2,
    "num_threads": 2,
    "core_hang_timeout": 10.0,
}


@contextmanager
def two_times_two(**options: Any) -> Iterator[tuple[LLMEngine, list[int]]]:
    """An engine, and the processes of its cores; nothing is left of them."""
    args = EngineArgs(**{**TWO_TIMES_TWO, **options})
    with nothing_left() as started, LLMEngine.from_engine_args(args) as engine:
        cores = list(engine.session.client.pids)
        started.update(pid for core in cores for pid in tree_of(core))
        assert [len(ranks_of(core)) for core in cores] == [1, 1]
        yield engine, cores
        started.update(pid for core in engine.session.client.pids for pid in tree_of(core))


@pytest.fixture(scope="module")
def alone() -> Iterator[LLMEngine]:
    with LLMEngine.from_engine_args(EngineArgs(**BOX)) as engine:
        yield engine


def generate(engine: LLMEngine, texts: list[str], hit: Any = lambda: None) -> dict[str, Any]:
    """The last output of each request, by its prompt. hit: called once all have begun."""
    for text in texts:
        engine.add_request(text, text, LONG)
    last: dict[str, Any] = {}
    is_hit = False
    while engine.has_unfinished_requests():
        for output in engine.step():
            last[output.request_id] = output.outputs[0]
        if not is_hit and len(last) == len(texts):
            is_hit = True
            hit()
    return last


def test_cores_of_two_ranks_answer_as_one_worker_does(alone: LLMEngine) -> None:
    params = [make() for make in ASKED.values()]
    wanted, _ = answers(alone, params)
    with two_times_two() as (engine, _):
        found, _ = answers(engine, params)
        ranks = engine.stats().ranks
    assert [(each.text, each.token_ids) for each in found] == [
        (each.text, each.token_ids) for each in wanted
    ]
    assert [(use.core, use.rank) for use in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(use.step_seconds > 0.0 for use in ranks)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_rank_that_dies_ends_the_requests_of_its_core(
    alone: LLMEngine, number: signal.Signals, is_restarted: bool
) -> None:
    wanted = generate(alone, TEXTS)
    death = "restart" if is_restarted else "stay"
    with two_times_two(on_core_death=death, drain_timeout=0.0) as (engine, cores):
        (rank,) = ranks_of(cores[1])
        found = generate(engine, TEXTS, lambda: os.kill(rank, number))
        failed = {text for text, output in found.items() if output.finish_reason == "error"}
        assert 0 < len(failed) < len(TEXTS)
        why = "was killed by SIGKILL" if number == signal.SIGKILL else "has not answered for 8 s"
        for text, output in found.items():
            if text in failed:
                assert "rank 1" in output.error and why in output.error, output
                assert output.token_ids == wanted[text].token_ids[: len(output.token_ids)]
            else:
                assert output.token_ids == wanted[text].token_ids
        if is_restarted:
            until = time.monotonic() + WAIT_SECONDS
            while engine.session.client.num_cores().alive < 2:
                assert time.monotonic() < until
                engine.session.client.step()
        assert {use.core for use in engine.stats().ranks} == ({0, 1} if is_restarted else {0})
        again = generate(engine, TEXTS)
        assert {text: each.token_ids for text, each in again.items()} == {
            text: each.token_ids for text, each in wanted.items()
        }

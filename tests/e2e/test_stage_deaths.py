"""A stage that is killed or stopped ends its engine, which names it, and leaves nothing."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
from e2e.test_ngram import BOX
from support.processes import nothing_left, ranks_of

from engine import LLM, SamplingParams
from engine.errors import EngineDeadError

pytestmark = pytest.mark.slow
LONG = SamplingParams(max_tokens=200, ignore_eos=True)
FATES = {
    signal.SIGKILL: r"rank {} \(process {}\) was killed by SIGKILL",
    signal.SIGSTOP: r"rank {}( \(process {}\))? has not answered for 4 s",
}
SIZES: dict[str, dict[str, Any]] = {
    "three stages": {"pipeline_parallel_size": 3},
    "two ranks each": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
}


def stages_of_this_process() -> list[int]:
    """The processes of ranks 1, 2, ..., in this order."""
    return sorted(ranks_of(os.getpid()))


@pytest.mark.parametrize("number", FATES)
@pytest.mark.parametrize("struck", [1, -1])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_stage_that_fails_is_named(sizes: str, struck: int, number: signal.Signals) -> None:
    with nothing_left() as started, LLM(**BOX, **SIZES[sizes], core_hang_timeout=5.0) as llm:
        processes = stages_of_this_process()
        started.update(processes)
        rank = struck % (len(processes) + 1)
        pid = processes[rank - 1]
        threading.Timer(0.2, os.kill, (pid, number)).start()
        with pytest.raises(EngineDeadError, match=FATES[number].format(rank, pid)):
            for _ in range(1000):
                llm.generate(["a list", "a tree"], LONG, use_tqdm=False)


def test_cores_with_stages_answer_and_one_that_dies_takes_its_stages_with_it() -> None:
    two = {"pipeline_parallel_size": 2, "data_parallel_size": 2, "multiprocess": True}
    prompts = ["a list", "a tree", "one two three", "def f(x):"]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(**BOX) as alone:
        wanted = [each.outputs[0].token_ids for each in alone.generate(prompts, params)]
    with nothing_left() as started, LLM(**BOX, **two) as llm:
        found = [each.outputs[0].token_ids for each in llm.generate(prompts, params)]
        assert found == wanted
        cores = ranks_of(os.getpid())
        started.update(cores)
        assert len(cores) == 4  # each of two, with its second stage
        stages = [pid for pid in cores if not ranks_of(pid)]
        os.kill(next(pid for pid in cores if pid not in stages), signal.SIGKILL)
        later = [each.outputs[0].token_ids for each in llm.generate(prompts, params)]
        assert any(each == one for each, one in zip(later, wanted, strict=True))

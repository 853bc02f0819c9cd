"""Stages in processes of their own, each with some layers, answer as one worker does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e.box_engine import EXACT
from e2e.test_ngram import BOX, NGRAM
from e2e.test_tensor_parallel import assert_equal_answers
from e2e.tiny_models import TinyModels
from support.fingerprint import of_a_fresh_process
from support.processes import nothing_left, ranks_of

from engine import LLM, EngineArgs, LLMEngine, SamplingParams
from engine.assets import BOX_MODEL
from engine.core.replay import replay
from engine.errors import ConfigError, EngineDeadError

TWO: dict[str, Any] = {"pipeline_parallel_size": 2}
FEW = {"max_num_batched_tokens": 24, "num_kv_blocks": 40}
"""Prompts are chunked, and running requests preempt each other."""
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stages") / "steps"


@pytest.fixture(scope="module")
def engines(logged: Path) -> Iterator[tuple[LLMEngine, LLMEngine]]:
    args = {**BOX, **EXACT}
    with (
        nothing_left() as started,
        LLMEngine.from_engine_args(EngineArgs(**args)) as alone,
        LLMEngine.from_engine_args(
            EngineArgs(**{**args, **TWO, **FEW, **NGRAM}, step_log=str(logged))
        ) as staged,
    ):
        started.update(ranks_of(os.getpid()))
        assert len(started) == 1
        yield alone, staged
    assert replay(logged, allow_truncated=True).difference is None  # of the core that died


def test_each_request_hears_the_same(engines: tuple[LLMEngine, LLMEngine]) -> None:
    alone, staged = engines
    assert_equal_answers(alone, staged)
    stats = staged.stats()
    assert stats.counters["drafts.num_drafts"] > 0
    assert [use.rank for use in stats.ranks] == [0, 1]
    assert all(0.0 < use.stage_wait_seconds <= use.step_seconds for use in stats.ranks)


def test_a_request_that_is_aborted_changes_nothing_for_others(
    engines: tuple[LLMEngine, LLMEngine],
) -> None:
    found = []
    for engine in engines:
        for number in range(4):
            engine.add_request(str(number), "one two three one two three", LONG)
        last: dict[str, list[int]] = {}
        for _ in range(12):
            engine.step()
        engine.abort_request(["1", "3"])
        while engine.has_unfinished_requests():
            for out in engine.step():
                last[out.request_id] = list(out.outputs[0].token_ids)
        found.append([last["0"], last["2"]])
    assert found[0] == found[1]


def test_a_stage_that_is_killed_ends_the_engine_and_leaves_nothing(
    engines: tuple[LLMEngine, LLMEngine],
) -> None:
    """The last test with these engines."""
    _, staged = engines
    staged.add_request("last", "one two three", LONG)
    for _ in range(5):
        staged.step()
    (rank,) = ranks_of(os.getpid())
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"rank 1 \(process \d+\) was killed by SIGKILL"):
        while staged.has_unfinished_requests():
            staged.step()


DRAFT_MODEL = {"method": "draft_model", "model": "m", "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 33}, r"pipeline_parallel_size is 33, must be in 1\.\.32"),
        ({"tensor_parallel_size": 17}, "17 and pipeline_parallel_size is 2: 34 ranks, at most 32"),
        ({"pipeline_layer_split": [30]}, r"pipeline_layer_split is \[30\] and pipeline_parallel_s"),
        ({"pipeline_layer_split": [0, 30]}, "pipeline_layer_split has 0, must be at least 1"),
        ({"pipeline_layer_split": [1, 1]}, "pipeline_layer_split is 1, 1, and the model has"),
        ({"pipeline_parallel_size": 31}, "is 31, and the model has .* layers: each stage"),
        ({"speculative_config": DRAFT_MODEL}, "model 'm' in speculative_config needs all layers"),
    ],
)
def test_mistakes_are_named_and_leave_no_process(options: dict[str, Any], message: str) -> None:
    with nothing_left(), pytest.raises(ConfigError, match=message):
        LLMEngine.from_engine_args(EngineArgs(**{**BOX, **TWO, **options}))


SIZES = [{"pipeline_parallel_size": 3}, {**TWO, "tensor_parallel_size": 2}, TWO]
FAMILIES = ("smollm3-window", "gemma2", "mixtral-window", "qwen3-next", "bamba", "lfm2-moe")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_windows_experts_and_states_are_in_stages(tiny_models: TinyModels, name: str) -> None:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_kv_blocks": 60}
    options = {"max_model_len": 96, "num_threads": 1, "skip_tokenizer_init": True, **sizes}
    prompts = [{"prompt_token_ids": list(range(5, 5 + n))} for n in (3, 20, 33, 33, 40)]
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=24, ignore_eos=True)
    found = []
    for size in ({}, *SIZES):
        path = str(tiny_models.path(name))
        with LLM(path, dtype="float32", **size, **options) as model:
            outputs = [model.generate(prompts, params, use_tqdm=False) for _ in range(2)]
        found.append([each.outputs[0].token_ids for run in outputs for each in run])
    for each in found[1:]:
        assert each == found[0]


@pytest.mark.slow
@pytest.mark.parametrize("size", [TWO, SIZES[1]], ids=str)
def test_pooled_requests_have_the_same_vectors(
    tiny_models: TinyModels, size: dict[str, int]
) -> None:
    """Prompts come in chunks, and the last stage pools."""
    found = []
    options = {"num_threads": 1, "log_level": "error", "max_num_seqs": 4, **FEW}
    prompts = [{"prompt_token_ids": list(range(5, length))} for length in (8, 40, 61)]
    for sizes in ({}, size):
        path = str(tiny_models.path("qwen3"))
        with LLM(
            path, runner="pooling", dtype="float32", skip_tokenizer_init=True, **options, **sizes
        ) as model:
            out = model.embed(prompts, use_tqdm=False)
            tokens = model.encode(prompts, pooling_task="token_embed", use_tqdm=False)
        found.append([np.array(each.outputs.embedding) for each in out])
        found[-1] += [np.array(each.outputs.data) for each in tokens]
    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape and np.abs(one - other).max() < 1e-5


@pytest.mark.slow
def test_stages_have_the_bits_of_one_worker_in_bfloat16() -> None:
    options = {"dtype": "bfloat16", "num_threads": 1}
    alone, together = (
        of_a_fresh_process(BOX_MODEL, options | {"pipeline_parallel_size": size}) for size in (1, 2)
    )
    assert together == alone

"""Two ranks, each a process with a part of the model, answer as one worker does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e.box_engine import EXACT
from e2e.seeing_models import make_seeing_model
from e2e.test_draft_model import ROUGH
from e2e.test_ngram import ASKED, BOX, answers
from e2e.test_pictures import GREEDY, PROMPTS
from e2e.tiny_models import TinyModels
from support.processes import children, is_spawned

from engine import LLM, EngineArgs, LLMEngine, SamplingParams, StructuredOutputsParams
from engine.core.replay import replay
from engine.errors import ConfigError

TWO: dict[str, Any] = {"tensor_parallel_size": 2}
CHOICE = StructuredOutputsParams(choice=["a tall tree", "a tall house", "nothing"])
REGEX = StructuredOutputsParams(regex=r"[a-z]{3,9} [0-9]{2,4}\.")
OTHERS = [
    SamplingParams(temperature=0.8, seed=11, max_tokens=20, structured_outputs=CHOICE),
    SamplingParams(temperature=0.8, seed=12, max_tokens=20, structured_outputs=REGEX),
    SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=2, logprobs=1),
]
FAMILIES = (
    *("llama-mqa-head-dim", "smollm3-window", "gemma2", "gemma3", "phi3-longrope", "olmo2"),
    *("granite-biased", "mixtral-window", "qwen3-moe", "qwen3-next", "qwen3.5-tied", "lfm2-moe"),
    *("granite-hybrid-moe", "bamba", "falcon-h1-norm", "nemotron-h-moe", "jamba-moe", "mamba2"),
    "falcon-mamba",
)
DRAFTS = {"max_num_batched_tokens": 24, "num_kv_blocks": 40, "speculative_config": ROUGH}
"""Prompts are chunked, running requests preempt each other, and drafts are verified."""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLMEngine, LLMEngine]]:
    log = tmp_path_factory.mktemp("group") / "steps"
    before = children()
    with (
        LLMEngine.from_engine_args(EngineArgs(**{**BOX, **EXACT})) as alone,
        LLMEngine.from_engine_args(
            EngineArgs(**{**BOX, **EXACT, **TWO, **DRAFTS}, step_log=str(log))
        ) as together,
    ):
        started = children() - before
        assert sum(map(is_spawned, started)) == 1
        yield alone, together
    replayed = replay(log)
    assert replayed.difference is None and len(replayed.ranks) == 2
    assert all(0.0 < waited < steps for steps, waited, _ in replayed.ranks)


def assert_equal_answers(alone: LLMEngine, divided: LLMEngine) -> None:
    """Compare what two engines generate, each kind of request at once."""
    params = [*(make() for make in ASKED.values()), *OTHERS]
    wanted, _ = answers(alone, params)
    for _ in range(2):  # the second time prompts are in the prefix cache
        found, _ = answers(divided, params)
        assert [each[:2] + each[3:] for each in found] == [each[:2] + each[3:] for each in wanted]
        for one, other in zip(found, wanted, strict=True):
            assert_close(one.logprobs, other.logprobs)


def test_each_request_hears_the_same(engines: tuple[LLMEngine, LLMEngine]) -> None:
    alone, together = engines
    assert_equal_answers(alone, together)
    stats = together.stats()
    assert stats.counters["drafts.num_drafts"] > 0
    assert [(use.core, use.rank) for use in stats.ranks] == [(0, 0), (0, 1)]
    assert all(0.0 < use.wait_seconds < use.step_seconds for use in stats.ranks)
    assert not alone.stats().ranks


def assert_close(found: Any, wanted: Any) -> None:
    assert (found is None) == (wanted is None)
    for one, other in zip(found or [], wanted or [], strict=True):
        assert one.keys() == other.keys()
        for token in one:
            assert one[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_windows_experts_and_states_are_divided(tiny_models: TinyModels, name: str) -> None:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_kv_blocks": 60}
    options = {"max_model_len": 96, "num_threads": 1, "skip_tokenizer_init": True, **sizes}
    prompts = [{"prompt_token_ids": list(range(5, 5 + n))} for n in (3, 20, 33, 33, 40)]
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=24, ignore_eos=True)
    found = []
    for size in (1, 2):
        path = str(tiny_models.path(name))
        model = LLM(path, dtype="float32", tensor_parallel_size=size, **options)
        with model:
            outputs = [model.generate(prompts, params, use_tqdm=False) for _ in range(2)]
        found.append([each.outputs[0].token_ids for run in outputs for each in run])
    assert found[0] == found[1]


@pytest.mark.slow
def test_pooled_requests_have_the_same_vectors(tiny_models: TinyModels) -> None:
    found = []
    options = {"num_threads": 1, "log_level": "error", "skip_tokenizer_init": True}
    for size in (1, 2):
        sizes = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "tensor_parallel_size": size}
        path = str(tiny_models.path("qwen3"))
        with LLM(path, runner="pooling", dtype="float32", **options, **sizes) as model:
            out = model.embed([{"prompt_token_ids": list(range(5, 40))}], use_tqdm=False)
        found.append(np.array(out[0].outputs.embedding))
    assert np.abs(found[0] - found[1]).max() < 1e-5


def test_mistakes_are_named_and_leave_no_process() -> None:
    before = children()
    for options, message in (
        ({"tensor_parallel_size": 33}, r"tensor_parallel_size is 33, must be in 1\.\.32"),
        (
            {"enable_expert_parallel": True},
            "pipeline_parallel_size and data_parallel_size; leave it out",
        ),
        ({"tensor_parallel_size": 7}, "tensor_parallel_size is 7"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLMEngine.from_engine_args(EngineArgs(**{**BOX, **TWO, **options}))
        assert children() <= before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smolvlm", "qwen3-vl"])
def test_each_rank_sees_the_pictures(name: str, tmp_path: Path) -> None:
    path = make_seeing_model(tmp_path / name, name)
    options = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 4, "num_kv_blocks": 200}
    found = []
    for size in (1, 2):
        sizes = {"tensor_parallel_size": size, "max_num_batched_tokens": 64}
        with LLM(path, **options, **sizes, log_level="error") as model:
            prompts = [
                {"prompt": text, "multi_modal_data": {"image": pictures}}
                for text, pictures in PROMPTS
            ]
            outputs = model.generate(prompts, GREEDY, use_tqdm=False)
            outputs += model.generate(prompts[:1], GREEDY, use_tqdm=False)
        found.append([each.outputs[0].token_ids for each in outputs])
    assert found[0] == found[1]

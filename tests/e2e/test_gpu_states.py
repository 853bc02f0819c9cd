"""Models with recurrent states on a GPU: tokens of transformers, hits, drafts and preemption.
Skipped without one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from e2e.references import (
    Reference,
    Tally,
    compare,
    engine_for,
    finished,
    generate,
    prompts,
    run,
)
from e2e.tiny_models import TinyModels

from engine import SamplingParams

pytestmark = pytest.mark.gpu

NAMES = (
    *("lfm2", "lfm2-moe", "granite-hybrid", "bamba", "falcon-h1"),
    *("nemotron-h-moe", "jamba-moe", "mamba", "falcon-mamba"),
    *("qwen3-next", "qwen3.5", "qwen3.5-moe"),
)
OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "block_size": 16}
MODES: dict[str, dict[str, Any]] = {
    "recorded": {},
    "call by call": {"enforce_eager": True, "async_scheduling": False},
    "chunks": {"max_num_batched_tokens": 17, "cudagraph_capture_sizes": [2, 8]},
    "recorded chunks": {"max_num_batched_tokens": 24, "cudagraph_capture_sizes": [8, 12, 24]},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "preempted": {"num_kv_blocks": 14, "max_num_batched_tokens": 24},
}
FEW = ("lfm2", "bamba", "mamba", "qwen3.5")  # in every mode
CASES = [(name, mode) for name in NAMES for mode in MODES if mode != "call by call" or name in FEW]
LONG = [[(k * n + n) % 281 + 3 for k in range(length)] for n, length in ((7, 200), (11, 90))]
LONG.append(LONG[0][:64] + LONG[1][:50])


@pytest.fixture
def tally() -> Tally:
    """A tie in a few tokens is no fault."""
    return Tally()


@pytest.fixture(scope="module")
def references(tiny_models: TinyModels) -> Callable[[str], Reference]:
    @cache
    def get(name: str) -> Reference:
        found = [generate(tiny_models.reference(name), ids) for ids in prompts()]
        return Reference(prompts(), [one for one, _ in found], [each for _, each in found])

    return get


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_greedy_tokens_are_those_of_transformers(
    name: str,
    mode: str,
    tiny_models: TinyModels,
    references: Callable[[str], Reference],
    tally: Tally,
) -> None:
    """The second time, prompts start from snapshots."""
    with engine_for(str(tiny_models.path(name)), **OPTIONS, **MODES[mode]) as engine:
        for _ in range(2):
            tokens, cached = run(engine, prompts())
            compare(references(name), tokens, tally)
        stats = engine.stats()
    assert stats is not None
    if mode == "preempted":
        assert stats.num_preemptions > 0
    else:
        assert sum(cached) > 0


@pytest.mark.parametrize(
    "name", ["lfm2-bf16", "granite-hybrid", "falcon-h1", "jamba-moe", "mamba", "qwen3.5", "bamba"]
)
def test_prompts_in_bfloat16_are_as_exact_as_transformers_are(
    name: str, tiny_models: TinyModels
) -> None:
    """Long prompts, which are computed in chunks of the recurrence, in one step and in several."""
    model = tiny_models.reference(name)
    exact = logprobs_of(model)
    usual = (logprobs_of(copy.deepcopy(model).to(torch.bfloat16)) - exact).abs()
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=1)
    sizes = {**OPTIONS, "dtype": "bfloat16", "max_model_len": 256, "enable_prefix_caching": False}
    for budget in (256, 110):
        sizes["max_num_batched_tokens"] = budget
        with engine_for(str(tiny_models.path(name)), **sizes) as engine:
            outs = finished(engine, LONG, params)
        found = torch.tensor(
            [
                (out.prompt_logprobs or [])[place][ids[place]].logprob
                for ids, out in zip(LONG, outs, strict=True)
                for place in range(1, len(ids))
            ]
        )
        error = (found - exact).abs()
        assert error.mean() < 1.5 * usual.mean() + 1e-3, (error.mean(), usual.mean())
        assert error.max() < 3 * usual.max() + 1e-2, (error.max(), usual.max())


@torch.inference_mode()
def logprobs_of(model: torch.nn.Module) -> torch.Tensor:
    """transformers' log-probability of each token of ``LONG`` but the first ones."""
    found = []
    for ids in LONG:
        logits = model(torch.tensor([ids])).logits[0, :-1].float()
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    return torch.cat(found)

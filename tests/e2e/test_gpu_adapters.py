"""LoRA adapters on a GPU. Skipped without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from e2e.references import engine_for
from e2e.test_adapters import GREEDY, Case
from e2e.tiny_models import TinyModels
from support import low_rank_checks
from support.adapted import Adapted, run

pytestmark = pytest.mark.gpu
MODES = {
    "recorded": {},
    "call by call": {"enforce_eager": True, "async_scheduling": False},
    "recorded chunks": {"max_num_batched_tokens": 24, "cudagraph_capture_sizes": [8, 12, 24]},
    "slots in turns": {"max_loras": 1, "max_lora_rank": 9},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


@pytest.mark.parametrize("case", low_rank_checks.CASES, ids=lambda case: f"{case[0]}")
@pytest.mark.parametrize("dtype", low_rank_checks.TOLERANCE, ids=str)
def test_products_by_row(case: tuple, dtype: torch.dtype, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    low_rank_checks.check_products(case, dtype, dtype, (1, 5, 40, 600), rng, "cuda")


@pytest.fixture(scope="module")
def llama(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tiny_models, "llama", tmp_path_factory.mktemp("adapters"), a=4, b=1, c=9)


@pytest.mark.parametrize("mode", MODES)
def test_different_adapters_and_none_in_a_batch(llama: Case, mode: str) -> None:
    with engine_for(llama.path, enable_lora=True, device="cuda", **MODES[mode]) as engine:
        for _ in range(2):  # the second time some prompts are cached
            llama.check(run(engine, llama.mixed()))


@pytest.mark.parametrize("name", ["qwen2", "phi3", "qwen3-next", "falcon-h1"])
def test_families(tiny_models: TinyModels, tmp_path: Path, name: str) -> None:
    """Fused, reordered and scaled projections, and those of recurrent layers."""
    case = Case(tiny_models, name, tmp_path, a=3, b=8)
    with engine_for(case.path, enable_lora=True, device="cuda") as engine:
        case.check(run(engine, case.mixed()))


def test_a_row_is_the_same_beside_others(llama: Case) -> None:
    """With batch_invariant also beside rows with other adapters."""
    options = {"dtype": "bfloat16", "batch_invariant": True, "device": "cuda"}
    with engine_for(llama.path, enable_lora=True, **options) as engine:
        requests = llama.mixed()
        together = run(engine, requests)
        alone = [run(engine, [Adapted(one.ids, one.adapter, GREEDY)])[0] for one in requests]
    assert together == alone

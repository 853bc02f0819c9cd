"""Pooled requests on a GPU have transformers' hidden states. Skipped without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from e2e.encoder_models import LONGEST, VOCAB, hidden_of, make_encoder, reference
from e2e.test_pooled_decoders import (
    MODES,
    SMALL,
    hidden_states,
    made_prompts,
    model,
    open_core,
    pooled,
    worst,
)
from e2e.test_pooled_encoders import FEW

from engine.messages.pooling import PoolingParams

pytestmark = pytest.mark.gpu
__all__ = ["model"]

LARGE = {"num_kv_blocks": 200, "block_size": 16}
TIGHT = {"block_size": 16, **FEW}  # requests wait for a step with room for a whole text
CHUNKED = {"block_size": 16, **SMALL}
TOLERANCE = 1e-4  # of the largest number
HAS_GTE = hasattr(transformers, "GteModel")  # not before transformers 5.23
ENCODERS = [
    *("bert", "bert-relu", "roberta", "mpnet", "modernbert", "nomic"),
    pytest.param("gte", marks=pytest.mark.skipif(not HAS_GTE, reason="transformers is older")),
]


@pytest.mark.parametrize("options", [LARGE, TIGHT], ids=["large", "small"])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name: str, options: dict[str, Any], tmp_path: Path, seed: int) -> None:
    path, rng = make_encoder(name, tmp_path), np.random.default_rng(seed)
    prompts = [rng.integers(5, VOCAB, n).tolist() for n in (1, 2, 17, 40, 5, 64, LONGEST)]
    prompts += [prompts[-1], [*prompts[-1][:100], 7, 8], prompts[-1][:48]]
    theirs = reference(path)
    expected = [hidden_of(theirs, prompt) for prompt in prompts]
    scale = max(float(each.abs().max()) for each in expected)
    for mode in ("MEAN", "CLS"):
        pooler = {"pooling_type": mode}
        core = open_core(path, pooler_config=pooler, device="cuda", **options)
        found = pooled(core, prompts, PoolingParams(task="embed", use_activation=False))
        core.shutdown()
        wanted = [MODES[mode](each) for each in expected]
        assert worst(found, wanted) < TOLERANCE * scale, mode


@pytest.mark.parametrize("options", [LARGE, CHUNKED], ids=["whole", "small"])
@pytest.mark.parametrize("mode", [*MODES, "by token"])
def test_decoders(model: tuple[Path, Any], mode: str, options: dict[str, Any]) -> None:
    """Chunked and preempted in a small pool; the second time, from the prefix cache."""
    path, theirs = model
    prompts = made_prompts()
    is_by_token = mode == "by token"
    given = {} if is_by_token else {"pooler_config": {"pooling_type": mode}}
    core = open_core(path, runner="pooling", device="cuda", **given, **options)
    params = PoolingParams(task="token_embed" if is_by_token else "embed")
    found = [pooled(core, prompts, params) for _ in range(2)]
    core.shutdown()
    wanted = hidden_states(theirs, prompts)
    if not is_by_token:
        wanted = [MODES[mode](each) for each in wanted]
    for each in found:
        assert worst(each, wanted) < TOLERANCE


def test_a_text_is_the_same_in_any_company(tmp_path: Path, seed: int) -> None:
    path, rng = make_encoder("bert", tmp_path), np.random.default_rng(seed)
    prompts = [rng.integers(5, VOCAB, n).tolist() for n in (33, 1, 90, 60, 12)]
    options = {"pooler_config": {"pooling_type": "MEAN"}, "batch_invariant": True, **LARGE}
    core = open_core(path, device="cuda", **options)
    together = pooled(core, prompts, PoolingParams(task="embed"))
    alone = [pooled(core, [prompt], PoolingParams(task="embed"))[0] for prompt in prompts]
    core.shutdown()
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(torch.from_numpy(one), torch.from_numpy(other))

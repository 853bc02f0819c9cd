"""Pooled requests of encoders have transformers' hidden states, in a small pool as in a large."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from e2e.encoder_models import LONGEST, VOCAB, hidden_of, make_encoder, reference
from e2e.test_pooled_decoders import MODES, open_core, pooled, worst

from engine.messages.pooling import PoolingParams

FEW = {"max_num_batched_tokens": 128, "max_num_seqs": 3, "num_kv_blocks": 13}
"""Requests wait for a step with room for a whole text."""


@pytest.mark.parametrize("options", [{}, FEW], ids=["large", "small"])
@pytest.mark.parametrize("name", ["bert", "mpnet", "modernbert", "gte"])
def test_vectors_are_pooled_from_transformers_hidden_states(
    name: str, options: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    path, rng = make_encoder(name, tmp_path), np.random.default_rng(seed)
    prompts = [rng.integers(5, VOCAB, n).tolist() for n in (1, 2, 17, 40, 5, 64, LONGEST)]
    prompts += [prompts[-1], [*prompts[-1][:100], 7, 8], prompts[-1][:48]]  # no prefix is shared
    theirs = reference(path)
    expected = [hidden_of(theirs, prompt) for prompt in prompts]
    for mode in ("MEAN", "CLS"):
        core = open_core(path, pooler_config={"pooling_type": mode}, **options)
        found = pooled(core, prompts, PoolingParams(task="embed"))
        stats = core.stats()
        core.shutdown()
        scale = max(float(each.abs().max()) for each in expected)
        assert worst(found, [MODES[mode](each) for each in expected]) < 1e-5 * scale, mode
        assert stats is not None and stats.prefix_hits == 0


def test_a_text_is_the_same_in_any_company(tmp_path: Path, seed: int) -> None:
    path, rng = make_encoder("bert", tmp_path), np.random.default_rng(seed)
    prompts = [rng.integers(5, VOCAB, n).tolist() for n in (33, 1, 90, 60, 12)]
    core = open_core(path, pooler_config={"pooling_type": "MEAN"})
    together = pooled(core, prompts, PoolingParams(task="embed"))
    for prompt, vector in zip(prompts, together, strict=True):
        (alone,) = pooled(core, [prompt], PoolingParams(task="embed"))
        assert torch.equal(torch.from_numpy(alone), torch.from_numpy(vector))
    core.shutdown()

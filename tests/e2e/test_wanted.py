"""The last layer computes only rows somebody reads, and they are the same rows."""

from __future__ import annotations

import pytest
import torch
from e2e.paged import PagedRun
from e2e.tiny_models import TinyModels

from engine.config.model import ModelConfig, read_model_info
from engine.models.load import load_model
from engine.worker.batches import wanted_rows

NAMES = ["llama", "gemma3", "olmo2", "mixtral", "granite", "lfm2", "qwen3-next"]
WITH_MAMBA = ["bamba", "falcon-h1", "nemotron-h", "nemotron-h-moe", "jamba", "mamba2"]


@pytest.mark.parametrize("name", [*NAMES, *WITH_MAMBA])
def test_wanted_rows_are_the_rows_of_the_whole_pass(tiny_models: TinyModels, name):
    path = tiny_models.path(name)
    model = load_model(
        ModelConfig(model=str(path)), read_model_info(path), device="cpu", max_model_len=128
    )
    run = PagedRun(model)
    run.prefill("decode", list(range(5, 25)))
    chunks = {"decode": [7], "long": list(range(3, 40)), "short": list(range(60, 65))}
    for sequence, tokens in chunks.items():
        run.grow(sequence, len(tokens))
    batch = run.batch(list(chunks), chunks)
    whole = model.forward(batch, run.kv).last
    rows, both = torch.tensor([0, 37]), torch.tensor([0, 1])
    batch.wanted = wanted_rows(batch.attention, rows, both, batch.attention.seq_lens[both])
    part = model.forward(batch, run.kv).last
    assert torch.allclose(part, whole[rows], atol=1e-5)

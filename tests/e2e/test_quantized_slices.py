"""Ranks have parts of quantised weights, which stand for the same numbers as the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.gguf_models import MIXED, Kind
from e2e.test_quantized import DIRECTORIES, MORE_WITH_STATES, written
from e2e.test_slices import compare
from e2e.tiny_models import Case, config_of, random_model, save
from support.made_gguf import MadeGguf

from engine.errors import ConfigError
from engine.gguf.directory import make

FEW = {
    "awq",
    "awq-experts",
    "gptq-desc-act",
    "gptq-fused-files",
    "fp8-blocks",
    "ct-w8a8",
    "ct-w8-zeros",
    "ct-w4a16",
}
TOO_SMALL = {"gptq-ordered-by-head"}
"""With experts of a single group of columns."""
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in FEW))
        for name in (*DIRECTORIES, *MORE_WITH_STATES)
        if name not in TOO_SMALL
    ],
)
def test_ranks_have_parts_of_quantised_modules(tmp_path: Path, name: str, seed: int) -> None:
    compare(written(tmp_path, name).path, [2], seed)


def made_gguf(tmp_path: Path, kind: Kind) -> Path:
    """A model directory of a GGUF file whose matrices are of this type, or of many for Q4_K."""
    case = Case("Llama", WIDE)
    save(random_model(config_of(case), seed=3), tmp_path / "source", case.dtype)
    mixed = MIXED if kind is Kind.Q4_K else {}
    file = MadeGguf(tmp_path / "source", kind, mixed).write(tmp_path / "model.gguf")
    return make(file, tmp_path / "made")


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q8_0, Kind.F16], ids=lambda kind: kind.name)
def test_parts_of_gguf_files_begin_at_blocks(tmp_path: Path, kind: Kind, seed: int) -> None:
    """An MLP of three blocks of 256 columns gives two to rank 0. With four ranks, the heads cut
    blocks of ``out`` in half, so it is dequantised."""
    path = made_gguf(tmp_path, kind)
    compare(path, [2], seed)
    if kind is Kind.Q4_K:
        with pytest.raises(ConfigError, match=r"768 columns in its MLPs in blocks of 256.*: 1, 2$"):
            compare(path, [4], seed)
    else:
        compare(path, [4], seed)

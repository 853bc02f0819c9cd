"""Stages of a pipeline read quantised weights, and only their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.gguf_models import Kind
from e2e.test_quantized import DIRECTORIES, MORE_WITH_STATES, written
from e2e.test_quantized_slices import made_gguf
from e2e.test_stages import compare, splits_of

FEW = {"awq", "gptq-fused-files"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in FEW))
        for name in (*DIRECTORIES, *MORE_WITH_STATES)
    ],
)
def test_stages_have_quantised_modules(tmp_path: Path, name: str, seed: int) -> None:
    path = written(tmp_path, name).path
    compare(path, splits_of(path), seed)


@pytest.mark.parametrize(
    "kind", [pytest.param(Kind.Q4_K, marks=pytest.mark.slow), Kind.F16], ids=lambda kind: kind.name
)
def test_stages_have_parts_of_gguf_files(tmp_path: Path, kind: Kind, seed: int) -> None:
    path = made_gguf(tmp_path, kind)
    compare(path, splits_of(path), seed)

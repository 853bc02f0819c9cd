"""What ranks launch compiles for an H100, without spills and within its memory: parts of large
models, down to one key head, with parts of the vocabulary and columns that are no multiples of 16.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.slice_launches import MODELS, launches_of

from tools.device_gate import DEVICES, judge

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels cannot be compiled"
)
SIZES = (2, 4, 8)
DEVICE = DEVICES["sm_90"]


def faults_of(launches: list) -> list:
    return [verdict for one in launches if (verdict := judge(one, DEVICE)).faults]


def test_one_key_head_and_a_part_of_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = launches_of("Qwen3 32B", 8, 7, tmp_path, monkeypatch)
    by_name = {one.name: one for one in found}
    chosen = [by_name[name] for name in ("decode, bfloat16", "gemv, bfloat16", "part, float32")]
    assert not faults_of(chosen)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_all_that_ranks_launch(
    name: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = launches_of(name, size, size - 1, tmp_path, monkeypatch)
    assert len(found) > 30
    assert not faults_of(found)

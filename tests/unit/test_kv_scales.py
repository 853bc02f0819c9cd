"""Scales of keys and values in a checkpoint: under any of their names, of a layer or of a head."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import ModelError
from engine.models.checkpoint import Checkpoint
from engine.models.kv_scales import is_kv_scale, kv_scales

ATTENTION = "model.layers.{}.self_attn."
# Of two layers with two key heads.
SPEC: Any = SimpleNamespace(
    attention=SimpleNamespace(num_kv_heads=2),
    layers=[None, None],
    names=SimpleNamespace(prefix="model."),
)


def found(
    root: Path, stored: dict[str, torch.Tensor], heads: range | None = None
) -> list[torch.Tensor | None]:
    save_file(stored, root / "model.safetensors")
    with Checkpoint(root) as checkpoint:
        return kv_scales(checkpoint, SPEC, heads)


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ("k_scale", "v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
        ("attn.k_scale", "attn.v_scale"),
    ],
)
def test_names_that_tools_write(tmp_path: Path, keys: str, values: str) -> None:
    place = ATTENTION.format(1)
    stored = {place + keys: torch.tensor(0.5).bfloat16(), place + values: torch.tensor([2.0, 3.0])}
    first, second = found(tmp_path, stored)
    assert first is None
    assert second is not None and second.tolist() == [[0.5, 0.5], [2.0, 3.0]]
    assert all(map(is_kv_scale, stored))


def test_a_rank_has_the_scales_of_its_heads(tmp_path: Path) -> None:
    place = ATTENTION.format(0)
    stored = {place + "k_scale": torch.tensor(0.5), place + "v_scale": torch.tensor([2.0, 3.0])}
    (first, _) = found(tmp_path, stored, range(1, 2))
    assert first is not None and first.tolist() == [[0.5], [3.0]]


def test_one_may_stand_for_both(tmp_path: Path) -> None:
    name = ATTENTION.format(0) + "kv_scale"
    (first, _) = found(tmp_path, {name: torch.tensor([0.5])})
    assert first is not None and first.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert is_kv_scale(name) and not is_kv_scale(ATTENTION.format(0) + "qkv_scale")


def test_one_of_the_two_leaves_the_other_at_one(tmp_path: Path) -> None:
    (first, _) = found(tmp_path, {ATTENTION.format(0) + "v_scale": torch.tensor([0.25])})
    assert first is not None and first.tolist() == [[1.0, 1.0], [0.25, 0.25]]


@pytest.mark.parametrize("bad", [[0.0], [float("nan")], [1.0, 1.0, 1.0]])
def test_scales_that_cannot_be_are_named(tmp_path: Path, bad: list[float]) -> None:
    stored = {ATTENTION.format(0) + "k_scale": torch.tensor(bad)}
    with pytest.raises(ModelError, match=r"self_attn.k_scale in .* is \[.*for each of 2 heads"):
        found(tmp_path, stored)

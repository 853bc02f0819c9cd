"""Adapters of the model in the box whose answers are their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support import adapter_files

KINDS = (("self_attn.q_proj", 192, 192), ("mlp.up_proj", 512, 192), ("mlp.down_proj", 192, 512))


def make_adapter(seed: int, rank: int = 4) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The configuration and the tensors of an adapter."""
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(6):
        for path, outs, ins in KINDS:
            name = f"model.layers.{layer}.{path}"
            tensors |= adapter_files.product(name, rank, outs, ins)
    tensors = {
        name: tensor / tensor.shape[1] ** 0.5 if "lora_A" in name else 0.3 * tensor
        for name, tensor in tensors.items()
    }
    targets = [path.rpartition(".")[2] for path, _, _ in KINDS]
    return adapter_files.config_of(r=rank, lora_alpha=2 * rank, target_modules=targets), tensors


def write_adapter(root: Path, seed: int, rank: int = 4) -> Path:
    """Write an adapter, and return its directory."""
    return adapter_files.write(root, *make_adapter(seed, rank))

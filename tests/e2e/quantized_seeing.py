"""Directories of models that see with a quantised half, as published tools write them."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from e2e.picture_cases import Seen
from e2e.quantized_models import Writer, awq, fp8, gptq, packed
from e2e.seeing_models import reference
from e2e.test_quantized import AWQ, BLOCKS, GPTQ, compressed, integers
from safetensors.torch import load_file, save_file

ENCODERS = ("visual", "vision_tower", "vision_model", "multi_modal_projector", "connector")
KEPT = ["lm_head", *ENCODERS]
QUANTIZED: dict[str, tuple[Writer, dict[str, Any]]] = {
    "awq": (awq(32), {**AWQ, "modules_to_not_convert": KEPT}),
    "gptq": (gptq(4, 32), GPTQ),
    "fp8": (
        fp8("block", scale_name="weight_scale_inv"),
        {**BLOCKS, "modules_to_not_convert": KEPT},
    ),
    "compressed": (
        packed(4, 32),
        {
            **compressed("pack-quantized", integers(4, "group")),
            "ignore": ["lm_head", *(f"re:.*{name}.*" for name in ENCODERS)],
        },
    ),
}
"""Formats: what writes a weight, and the quantization_config."""


def in_text(name: str) -> bool:
    """Whether a tensor is a weight of a layer of the text half."""
    return "layers" in name and ("language_model" in name or "text_model" in name)


def quantized_copy(
    seen: Seen, root: Path, kind: str, chosen: Callable[[str], bool] = in_text
) -> tuple[Path, Any]:
    """A copy of a model's directory in one of the formats, and transformers' model of the numbers
    that its weights represent. chosen: names of tensors to quantise."""
    write, stated = QUANTIZED[kind]
    path = root / kind
    shutil.copytree(seen.path, path)
    stored = load_file(path / "model.safetensors")
    names = [name for name in stored if chosen(name)]
    model = copy.deepcopy(reference(seen.path))
    for module in model.modules():
        if type(module) is not torch.nn.Linear or min(module.weight.shape) < 32:
            continue
        # By content, since transformers' modules have other names.
        found = [name for name in names if torch.equal(stored[name], module.weight)]
        for name in found:
            names.remove(name)
            weight = stored.pop(name).contiguous()
            tensors, represented = write(weight, torch.Generator().manual_seed(1))
            stored |= {f"{name.removesuffix('weight')}{last}": t for last, t in tensors.items()}
            module.weight.data.copy_(represented)
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    return path, model

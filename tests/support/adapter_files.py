"""LoRA adapters in peft's format, made by hand or by peft itself on tiny random models."""

from __future__ import annotations

import json
import struct
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.lora.adapter import Adapter

Tensors = dict[str, torch.Tensor]
PREFIX = "base_model.model."


def config_of(**values: Any) -> dict[str, Any]:
    """An adapter_config.json of rank 4 for queries and values, with changes."""
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "base_model_name_or_path": "somewhere/base",
        "peft_version": "0.21.2",
    }
    return {**content, **values}


def product(path: str, rank: int = 4, outs: int = 6, ins: int = 10) -> Tensors:
    """The tensors of one product by their names in a file."""
    return {
        f"{PREFIX}{path}.lora_A.weight": torch.randn(rank, ins),
        f"{PREFIX}{path}.lora_B.weight": torch.randn(outs, rank),
    }


def write(root: Path, config: dict[str, Any] | None = None, tensors: Tensors | None = None) -> Path:
    """Write an adapter, and return its directory."""
    root.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config_of() if config is None else config)
    (root / "adapter_config.json").write_text(text)
    made = product("model.layers.0.self_attn.q_proj") if tensors is None else tensors
    save_file(made, root / "adapter_model.safetensors")
    return root


def write_raw(
    root: Path, header: str | bytes, data: bytes = b"", length: int | None = None
) -> Path:
    """Write an adapter whose safetensors file has this header. length: that the file claims."""
    write(root)
    text = header.encode() if isinstance(header, str) else header
    prefix = struct.pack("<Q", len(text) if length is None else length)
    (root / "adapter_model.safetensors").write_bytes(prefix + text + data)
    return root


def random_tensors(
    model: Any, linears: list[str], experts: list[str], use_dora: bool = False
) -> Tensors:
    """Random products of rank 4 for linear modules and for parameters with experts of a model of
    transformers, by their names in a file."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    made = {}
    for path in linears:
        outs, ins = model.get_parameter(f"{path}.weight").shape
        made[f"{PREFIX}{path}.lora_A.weight"] = random(4, ins)
        made[f"{PREFIX}{path}.lora_B.weight"] = random(outs, 4)
        if use_dora:
            made[f"{PREFIX}{path}.lora_magnitude_vector"] = 1 + random(outs).abs()
    for name in experts:
        count, outs, ins = model.get_parameter(name).shape
        path, _, parameter = name.rpartition(".")
        inner = f"{path}.base_layer" if "up_proj" in parameter else path
        made[f"{PREFIX}{inner}.lora_A.weight"] = random(4 * count, ins)
        made[f"{PREFIX}{inner}.lora_B.weight"] = random(outs, 4 * count)
    return made


def trained(model: Any, seed: int = 0, size: float = 0.5, **options: Any) -> Any:
    """A model of transformers with an adapter of peft's whose tensors are random, B not zero.

    size: standard deviation of what is random, in relation to what the shapes suggest."""
    import peft

    generator = torch.Generator().manual_seed(seed)
    config = peft.LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = peft.get_peft_model(model, config)
    for name, parameter in made.named_parameters():
        if "lora_" not in name and "modules_to_save" not in name:
            continue
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        if "magnitude" in name:
            parameter.data *= 1 + 0.3 * noise
        elif "modules_to_save" in name:
            parameter.data += size * parameter.data.std() * noise
        else:
            parameter.data = size * noise / parameter.shape[-1] ** 0.5
    return made.eval()


def save(made: Any, root: Path) -> Path:
    """Save an adapter as peft does, and return its directory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.save_pretrained(str(root))
    return root


def merged(state: Tensors, adapter: Adapter) -> Tensors:
    """The weights of a model with an adapter merged into them, in float64. state: by the names of
    transformers' parameters."""
    made = {name: tensor.double() for name, tensor in state.items()}
    for name, tensor in adapter.replaced.items():
        made[name] = tensor.double()
    for path, one in adapter.modules.items():
        changed = made[f"{path}.weight"] + one.scale * (one.b.double() @ one.a.double())
        if one.magnitude is not None:
            changed *= (one.magnitude.double() / changed.norm(dim=1))[:, None]
        made[f"{path}.weight"] = changed
        if one.bias is not None:
            bias = made.get(f"{path}.bias", torch.zeros(len(changed)).double())
            made[f"{path}.bias"] = bias + one.scale * one.bias.double()
    for path, table in adapter.tables.items():
        changed = made[f"{path}.weight"] + table.scale * (table.b.double() @ table.a.double()).T
        if table.magnitude is not None:
            changed *= table.magnitude.double() / changed.norm(dim=0)
        made[f"{path}.weight"] = changed
    for path, experts in adapter.experts.items():
        made[path] = made[path] + experts.scale * (experts.b.double() @ experts.a.double())
    return made

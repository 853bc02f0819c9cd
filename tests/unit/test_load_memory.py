"""Loading needs little more memory than the weights it ends with."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.models.families import FAMILIES
from engine.models.targets import targets

HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 16_000,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
LIMIT = 1.2
MEASURE = """
import sys
from engine.config.model import ModelConfig, read_model_info
from engine.models.load import load_model

def kilobytes(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

def load(path):
    config, info = ModelConfig(model=path), read_model_info(path)
    return load_model(config, info, device="cpu", max_model_len=64)

load(sys.argv[1])  # what a first model costs once, whatever its size
before = kilobytes("VmRSS")
model = load(sys.argv[2])
print(1024 * (kilobytes("VmHWM") - before))
"""


def write(root: Path, hf: dict[str, Any], dtype: torch.dtype) -> int:
    """A checkpoint in three shards; returns how many numbers it holds."""
    root.mkdir()
    parts = [part for t in targets(FAMILIES["LlamaForCausalLM"](hf)) for part in t.ways[0]]
    for shard in range(3):
        tensors = {part.name: torch.full(part.shape, 0.5, dtype=dtype) for part in parts[shard::3]}
        save_file(tensors, root / f"model-{shard}.safetensors")
    (root / "config.json").write_text(json.dumps(hf))
    return sum(part.size for part in parts)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_memory_of_loading(tmp_path: Path, dtype: torch.dtype) -> None:
    small = {**HF, "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 1}
    write(tmp_path / "small", small, dtype)
    num_bytes = 4 * write(tmp_path / "model", HF, dtype)
    arguments = [str(tmp_path / "small"), str(tmp_path / "model")]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout)
    print(f"weights {num_bytes / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB: {peak / num_bytes:.2f} x")
    assert peak < LIMIT * num_bytes

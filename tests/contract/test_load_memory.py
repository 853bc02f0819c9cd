"""Loading needs little more memory than the weights it ends with."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Starcoder2Config, Starcoder2ForCausalLM

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
# For each line of a small and a large model: what loading the large one needs, in a copy of a
# process that has loaded a small one of its kind. Plain: the peak. General: that of what the kernel
# cannot take back, for transformers maps the files, whose pages it can.
MEASURE = """
import os, sys, threading
from engine.config.model import ModelConfig, read_model_info
from engine.models.load import load_model

def kilobytes(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

def load(path):
    config, info = ModelConfig(model=path), read_model_info(path)
    return load_model(config, info, device="cpu", max_model_len=64)

def plain(path):
    before = kilobytes("VmRSS")
    model = load(path)
    return kilobytes("VmHWM") - before

def general(path):
    before, peak, ended = kilobytes("RssAnon"), 0, threading.Event()

    def watch():
        nonlocal peak
        while not ended.wait(0.002):
            peak = max(peak, kilobytes("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load(path)
    ended.set()
    watcher.join()
    with open("/proc/self/maps") as lines:
        assert not any(path in line for line in lines), "the files are still mapped"
    return peak - before

for line in sys.stdin:
    how, small, path = line.split()
    load(small)  # what a first model costs once, whatever its size
    if not os.fork():
        load(small)  # pages of libraries are not copied with a process
        print(1024 * {"plain": plain, "general": general}[how](path), flush=True)
        os._exit(0)
    if os.wait()[1]:
        print("failed", flush=True)
"""


@pytest.fixture(scope="module")
def measured() -> Iterator[Callable[[str, Path, Path], int]]:
    """Bytes that loading a model needs, of how it is measured, a small model and the model."""
    with subprocess.Popen(
        [sys.executable, "-c", MEASURE],
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # threads are not copied
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def measure(how: str, small: Path, model: Path) -> int:
            process.stdin.write(f"{how} {small} {model}\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        yield measure
        process.stdin.close()


def write(root: Path, hf: dict[str, Any], dtype: torch.dtype) -> int:
    """A checkpoint in three shards; returns how many numbers it holds."""
    root.mkdir()
    parts = [part for t in targets(FAMILIES["LlamaForCausalLM"](hf)) for part in t.ways[0]]
    for shard in range(3):
        tensors = {part.name: torch.full(part.shape, 0.5, dtype=dtype) for part in parts[shard::3]}
        save_file(tensors, root / f"model-{shard}.safetensors")
    (root / "config.json").write_text(json.dumps(hf))
    return sum(part.size for part in parts)


def write_awq(root: Path, hf: dict[str, Any]) -> int:
    """The same with modules of 4 bits, in groups of 64."""
    count = write(root, hf, torch.bfloat16)
    for file in root.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            (outputs, inputs), module = tensors.pop(name).shape, name.removesuffix(".weight")
            groups = inputs // 64
            tensors[f"{module}.qweight"] = torch.ones(inputs, outputs // 8, dtype=torch.int32)
            tensors[f"{module}.qzeros"] = torch.ones(groups, outputs // 8, dtype=torch.int32)
            tensors[f"{module}.scales"] = torch.ones(groups, outputs, dtype=torch.float16)
        save_file(tensors, file)
    stated = {"quant_method": "awq", "bits": 4, "group_size": 64}
    (root / "config.json").write_text(json.dumps({**hf, "quantization_config": stated}))
    return count


# How it is stored, and the bytes of a number once it is read.
WRITERS: dict[str, tuple[Callable[..., int], int]] = {
    "float32": (partial(write, dtype=torch.float32), 4),
    "bfloat16": (partial(write, dtype=torch.bfloat16), 2),
    "float16": (partial(write, dtype=torch.float16), 2),
    "awq": (write_awq, 2),
}


def write_general(root: Path, hf: dict[str, Any], dtype: torch.dtype) -> int:
    """A tied StarCoder2 of random weights; returns how many numbers it holds."""
    model = Starcoder2ForCausalLM(Starcoder2Config(**hf, tie_word_embeddings=True)).to(dtype)
    model.save_pretrained(root)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_peak_memory_of_loading_through_transformers(
    tmp_path: Path, dtype: torch.dtype, measured: Callable[[str, Path, Path], int]
) -> None:
    hf = {name: value for name, value in HF.items() if name not in ("architectures", "model_type")}
    small = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 1}
    write_general(tmp_path / "small", hf | small, dtype)
    num_bytes = dtype.itemsize * write_general(tmp_path / "model", hf, dtype)
    peak = measured("general", tmp_path / "small", tmp_path / "model")
    print(f"weights {num_bytes / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB: {peak / num_bytes:.2f} x")
    assert peak < LIMIT * num_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "stored",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("bfloat16", "awq")))
        for name in WRITERS
    ],
)
def test_peak_memory_of_loading(
    tmp_path: Path, stored: str, measured: Callable[[str, Path, Path], int]
) -> None:
    """Plain weights are kept as they are stored, and so are quantised modules: those with the
    float32 tables of this model take less than two bytes for each number."""
    make, size = WRITERS[stored]
    small = {**HF, "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 1}
    make(tmp_path / "small", small)
    num_bytes = size * make(tmp_path / "model", HF)
    peak = measured("plain", tmp_path / "small", tmp_path / "model")
    print(f"weights {num_bytes / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB: {peak / num_bytes:.2f} x")
    assert peak < LIMIT * num_bytes

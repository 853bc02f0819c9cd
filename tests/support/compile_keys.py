"""What a GPU would compile, by Triton's own keys: nothing is compiled, and no kernel runs.

The GPU's worker is driven on the CPU. Where it launches a kernel, Triton binds the arguments and
works out the key by which it would look for what it has compiled: that is kept. What a kernel would
have written is zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from e2e.tiny_models import CASES, Case, config_of
from triton.runtime.jit import compute_cache_key

from engine import EngineArgs, LLMEngine
from engine.config.env import INTERPRET_CUDA
from engine.worker.platform.host import HostPlatform
from kernels.bodies import CPU_TENSORS, CpuTensors
from kernels.triton.launch import Launch
from tools.device_gate import DEVICES, compiling_for

LARGE = {"max_position_embeddings": 131072, "vocab_size": 512, "num_hidden_layers": 2}


class Keys:
    """Keys met since the beginning, and how each was met first."""

    def __init__(self) -> None:
        self.phase = "start"
        self.first: dict[Any, str] = {}
        self.compiles = False  # for the device, what has a new key; that is not run either

    def meet(self, launch: Launch) -> None:
        key = key_of(launch)
        if key not in self.first:
            self.first[key] = f"{self.phase}: {_described(launch)}"
            if self.compiles:
                launch.compile()


def key_of(launch: Launch) -> Any:
    """By which Triton would find the launch's kernel; the same for another launch: same kernel."""
    kernel = launch.kernel
    _, hashes, _, _, binder = kernel.device_caches[0]
    mode = triton.knobs.compilation.instrumentation_mode
    options = {**launch.options(), "debug": False, "instrumentation_mode": mode}
    _, specialisation, found = binder(**launch.args, **options)
    return id(kernel), compute_cache_key(hashes, specialisation, found)


def _described(launch: Launch) -> str:
    """The kernel, and what of its arguments it is compiled for or by."""
    plain = {
        name: value
        for name, value in launch.args.items()
        if not isinstance(value, torch.Tensor) or value.data_ptr() % 16
    }
    given = {name: "unaligned" if torch.is_tensor(one) else one for name, one in plain.items()}
    return f"{launch.kernel.fn.__name__} {given} {launch.options()}"


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch, keys: Keys | None = None) -> Iterator[Keys]:
    """Within it ``device="cuda"`` is the CPU in the place of an H100 that computes zeros."""
    keys = Keys() if keys is None else keys
    monkeypatch.setenv(INTERPRET_CUDA, "1")
    monkeypatch.setattr(CPU_TENSORS, "are_interpreted", False)  # as it will be again
    monkeypatch.setattr(Launch, "run", lambda launch: keys.meet(launch))
    monkeypatch.setattr(
        CpuTensors, "go_to_triton", lambda self, asked: setattr(self, "are_interpreted", asked)
    )
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    monkeypatch.setattr(HostPlatform, "compiles", True)
    with compiling_for(DEVICES["sm_90"]):
        yield keys


def model(root: Path, family: str = "llama", **options: Any) -> Path:
    """A directory with a configuration alone, of tests/e2e/tiny_models: weights are made up."""
    case = CASES[family]
    config = config_of(Case(case.family, {**case.options, **LARGE, **options}))
    config.architectures = [f"{case.family}ForCausalLM"]
    config.save_pretrained(root)
    return root


def grouped(group: int, head_dim: int = 64) -> dict[str, int]:
    """Sizes of a model with so many query heads for each key head."""
    kv_heads = 1 if group > 8 else 2
    heads = group * kv_heads
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return sizes | {"head_dim": head_dim, "hidden_size": 16 * heads}


def engine_of(root: Path, **options: Any) -> LLMEngine:
    """An engine on the device of `recorded`."""
    defaults = {"load_format": "dummy", "dtype": "bfloat16", "device": "cuda", "num_threads": 1}
    defaults |= {"max_num_batched_tokens": 512, "num_kv_blocks": 2200, "log_level": "error"}
    defaults |= {"enable_prefix_caching": False, "max_model_len": 4096, "max_num_seqs": 8}
    if "tokenizer" not in options:
        defaults["skip_tokenizer_init"] = True
    return LLMEngine.from_engine_args(EngineArgs(model=root, **{**defaults, **options}))

"""Every launch of a run compiles for a device that is not here, and is compiled but once.

The GPU's worker is driven on the CPU as a user would drive it; where it launches a kernel, that is
compiled for sm_90 as the launch would have it, with these very arguments, and not run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from e2e.tiny_models import CASES, Case, config_of, random_model, save

from engine import EngineArgs, LLMEngine, SamplingParams
from engine.config.env import INTERPRET_CUDA
from engine.worker.platform.host import HostPlatform
from kernels.bodies import CPU_TENSORS, CpuTensors
from kernels.triton.launch import Launch
from tools.device_gate import DEVICES, compiling_for

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels cannot be compiled"
    ),
]

SMALL = {"num_hidden_layers": 2, "hidden_size": 128, "head_dim": 64, "vocab_size": 512}
LENGTHS = (3, 100, 200)
LONGER = (1, 2, 3, 5, 7, 9, 12, 16, 17, 33, 48, 64, 65, 90, 128, 150)
COMMON = {"max_tokens": 4, "ignore_eos": True, "detokenize": False}
PLAIN = SamplingParams(temperature=0.5, **COMMON)
EDITED = [
    SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[9], **COMMON),
    SamplingParams(
        seed=1,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        logprobs=3,
        prompt_logprobs=2,
        **COMMON,
    ),
    SamplingParams(allowed_token_ids=[0, 1], logit_bias={3: 1.0}, logprobs=-1, **COMMON),
]


class Compiled:
    """Kernels by name, and how often each was compiled."""

    def __init__(self) -> None:
        self.by_name: dict[str, int] = {}

    def compile(self, launch: Launch) -> None:
        launch.compile()
        variants = launch.kernel.device_caches[0][0]
        self.by_name[launch.kernel.fn.__name__] = len(variants)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiled]:
    """Launches compile. What they would have written is zero, as everything else on this device."""
    found = Compiled()
    monkeypatch.setenv(INTERPRET_CUDA, "1")
    monkeypatch.setattr(CPU_TENSORS, "are_interpreted", False)  # as it will be again
    monkeypatch.setattr(Launch, "run", lambda launch: found.compile(launch))
    monkeypatch.setattr(
        CpuTensors, "go_to_triton", lambda self, asked: setattr(self, "are_interpreted", asked)
    )
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    monkeypatch.setattr(HostPlatform, "compiles", True)
    with compiling_for(DEVICES["sm_90"]):
        yield found


def run(engine: LLMEngine, lengths, params: list[SamplingParams]) -> None:
    for index, (length, own) in enumerate(zip(lengths, params, strict=True)):
        engine.add_request(str(index), [1] * length, own)
    while engine.has_unfinished_requests():
        engine.step()


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_every_launch_of_a_run_compiles(family: str, compiled: Compiled, tmp_path: Path) -> None:
    case = CASES[family]
    small = Case(case.family, {**case.options, **SMALL}, torch.bfloat16)
    save(random_model(config_of(small), seed=0), tmp_path, torch.bfloat16)
    args = EngineArgs(
        model=tmp_path,
        dtype="bfloat16",
        device="cuda",
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=8,
        num_kv_blocks=40,
        max_num_batched_tokens=128,
        cudagraph_capture_sizes=[1, 2, 4, 8],
        enable_prefix_caching=False,
        num_threads=1,
        log_level="error",
    )
    with LLMEngine.from_engine_args(args) as engine:
        run(engine, LENGTHS, EDITED)
        before = dict(compiled.by_name)
        assert {"decode_kernel", "prefill_kernel", "race_kernel", "penalise_kernel"} < set(before)
        run(engine, LONGER, [PLAIN] * len(LONGER))
        for length in LONGER:
            run(engine, [length], [PLAIN])
        assert compiled.by_name == before, "compiled while requests wait"

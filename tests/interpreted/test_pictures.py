"""Models that see, on a made-up device that checks order, memory and graphs, next to the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e.picture_cases import picture
from e2e.seeing_models import make_seeing_model
from e2e.test_pictures import GREEDY, mark_of, prompt_of
from support import triton_interpreter
from support.fake_cuda import FakeCuda

from engine import LLM
from engine.config.gpu_memory import MemoryUse
from engine.worker.platform.cuda import CudaPlatform

pytestmark = pytest.mark.skipif(
    not triton_interpreter.IS_INTERPRETING, reason="takes the place of a device"
)
ENGINE = {"max_model_len": 96, "num_threads": 1, "max_num_seqs": 4, "num_kv_blocks": 40}
ENGINE |= {"block_size": 16, "max_num_batched_tokens": 32, "log_level": "error"}
ENGINE |= {"cudagraph_capture_sizes": [4]}


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """So there is no need to meet every shape of a launch at the start."""
    monkeypatch.setattr(CudaPlatform, "compiles", False)


@pytest.mark.parametrize(
    "name",
    ["qwen3-vl", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gemma3", "llava"))],
)
def test_tokens_are_those_of_the_cpu_worker(name: str, tmp_path: Path) -> None:
    path, mark = make_seeing_model(tmp_path, name), mark_of(name)
    prompts = [
        prompt_of(f"{mark} a", [picture(20, 20)]),
        prompt_of("text", []),
        prompt_of(f"b{mark}", [picture(30, 20)]),
    ]

    def run(**options: Any) -> list[list[int]]:
        with LLM(path, **{**ENGINE, **options}) as llm:
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    wanted = run(device="cpu")
    with FakeCuda() as cuda:
        assert run(device="cuda") == wanted
    assert not cuda.faults


@pytest.mark.slow
def test_outputs_and_encoder_runs_are_part_of_the_measured_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_seeing_model(tmp_path, "qwen3-vl")
    small = {"enforce_eager": True, "device": "cuda", "max_num_encoder_input_tokens": 64}

    def bytes_of_a_step(**options: Any) -> int:
        """At most, with a longest picture."""
        found: list[int] = []

        def measure(platform: CudaPlatform, work: Callable[[], object]) -> MemoryUse:
            before = memory.peak = memory.allocated
            work()
            found.append(memory.peak - before)
            return MemoryUse(total=1 << 30, loaded=before, activations=0, others=0)

        monkeypatch.setattr(CudaPlatform, "measure", measure)
        sizes = {**ENGINE, **small, "num_kv_blocks": None}
        with FakeCuda() as cuda:
            memory = cuda.memory
            LLM(path, **{**sizes, **options}).shutdown()
        return found[0]

    kept = [bytes_of_a_step(encoder_cache_size=size) for size in (1 << 10, 1 << 15)]
    many = bytes_of_a_step(encoder_cache_size=1 << 10, max_num_encoder_input_tokens=1 << 10)
    assert kept[1] - kept[0] >= 31 * 1024 * 3 * 64 * 4  # three vectors of 64 numbers a token
    assert many > kept[0]

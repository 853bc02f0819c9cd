"""The workers of two GPUs that compute one model, each on a made-up device of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from functools import partial
from pathlib import Path

import pytest
from e2e.tiny_models import CASES, CONV, FULL, LINEAR, Case, config_of, random_model, save
from interpreted.test_fake_cuda import MODES, RECORDED, SHAPE, llm_for, run, tokens
from support import triton_interpreter
from support.fake_cuda import FakeCuda
from support.fake_nccl import make_fake_rank
from support.live_core import is_running

from engine.core import pipeline, ranks
from engine.errors import EngineDeadError
from engine.worker.platform.cuda import CudaPlatform

pytestmark = pytest.mark.skipif(
    not triton_interpreter.IS_INTERPRETING, reason="takes the place of a device"
)
TWO = {"tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    case, sizes = CASES["llama"], {**SHAPE, "num_hidden_layers": 2}
    save(random_model(config_of(Case(case.family, {**case.options, **sizes})), seed=0), path)
    return path


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaPlatform, "compiles", False)


@pytest.fixture
def other_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the other rank writes its report."""
    report = tmp_path / "rank 1"
    for module, name in ((ranks, "make_rank"), (pipeline, "make_stage")):
        make = partial(make_fake_rank, module.__name__, name, str(report))
        monkeypatch.setattr(module, name, make)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return report


def ended_well(cuda: FakeCuda, report: Path) -> None:
    """Nothing was out of order on either device, and both did the same."""
    assert not cuda.faults
    found = json.loads(report.read_text())
    assert found == {"faults": [], "num_replays": cuda.num_replays, "gpu": "1"}


def test_recorded_steps_are_those_of_one_worker_and_nothing_is_out_of_order(model, other_rank):
    with llm_for(model, device="cpu") as llm:
        wanted = tokens(run(llm, 4, 3))
    with FakeCuda(num_devices=2) as cuda, llm_for(model, **MODES["recorded"], **TWO) as llm:
        assert tokens(run(llm, 4, 3)) == wanted
        assert cuda.num_replays > 3
    ended_well(cuda, other_rank)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_one_worker_and_nothing_is_out_of_order(mode, model, other_rank):
    with llm_for(model, device="cpu") as llm:
        wanted = tokens(run(llm))
    with FakeCuda(num_devices=2) as cuda, llm_for(model, **MODES[mode], **TWO) as llm:
        assert tokens(run(llm)) == wanted
        if mode == "preempted":
            assert llm.llm_engine.stats().num_preemptions > 0
        assert (cuda.num_replays > 5) == (mode != "call by call")
    ended_well(cuda, other_rank)


@pytest.mark.slow
def test_memory_is_measured_on_both_devices(model, other_rank):
    with llm_for(model, device="cpu") as llm:
        wanted = tokens(run(llm))
    options = {**RECORDED, **TWO, "num_kv_blocks": None, "gpu_memory_utilization": 0.1}
    with FakeCuda(num_devices=2) as cuda, llm_for(model, **options) as llm:
        assert tokens(run(llm)) == wanted
        assert llm.llm_engine.session.client.decided.num_kv_blocks == 1 + 4 * 32 // 8
    ended_well(cuda, other_rank)


FAMILIES = {
    "gemma3": {"num_hidden_layers": 3, "sliding_window": 7},
    "qwen3-moe": {},
    "qwen3.5": {
        "num_hidden_layers": 2,
        "layer_types": [LINEAR, FULL],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "lfm2": {"num_hidden_layers": 2, "layer_types": [CONV, FULL]},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_windows_experts_and_states_are_in_order_too(family, tmp_path, other_rank):
    case = CASES[family]
    sizes = {**case.options, **SHAPE, **FAMILIES[family]}
    save(random_model(config_of(Case(case.family, sizes)), seed=0), tmp_path)
    with llm_for(tmp_path, device="cpu") as llm:
        wanted = tokens(run(llm, 3, 5))
    with FakeCuda(num_devices=2) as cuda, llm_for(tmp_path, **RECORDED, **TWO) as llm:
        assert tokens(run(llm, 3, 5)) == wanted
        run(llm, 2, 2)
    ended_well(cuda, other_rank)


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_engine_and_is_named(model, other_rank):
    with FakeCuda(num_devices=2), llm_for(model, **RECORDED, **TWO) as llm:
        (rank,) = (child.pid for child in multiprocessing.active_children())
        run(llm, 2, 2)
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"rank 1 \(process \d+\) was killed by SIGKILL"):
            run(llm)
    assert not is_running(rank)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_stages_are_in_order_too(mode, model, other_rank):
    with llm_for(model, device="cpu") as llm:
        wanted = tokens(run(llm))
    options = {**MODES[mode], "pipeline_parallel_size": 2}
    with FakeCuda(num_devices=2) as cuda, llm_for(model, **options) as llm:
        assert tokens(run(llm)) == wanted
    ended_well(cuda, other_rank)

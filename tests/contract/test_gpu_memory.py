"""What the worker takes of a GPU's memory: weights, pool, graphs and steps within its share.

The real worker on tensors that count and hold nothing; see `support.fake_memory`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from shapes import QWEN3, SHAPES, Shape, model_directory
from support.fake_memory import FakeDevice, fake_memory

from engine import EngineArgs
from engine.config.decide import Decided, decide, resolve
from engine.config.gpu_memory import GraphTrial, graphs_bytes
from engine.config.model import read_model_info
from engine.errors import ConfigError
from engine.worker import worker as worker_module
from engine.worker.worker import ModelWorker

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels take other tiles"
)

GIB = 1 << 30
TOTAL = 80 * 10**9  # bytes
MODELS = {
    "qwen3-0.6b": (SHAPES["qwen3-0.6b"], 1.11),  # GiB of weights
    "llama-3.1-8b": (SHAPES["llama-3.1-8b"], 14.96),
    "qwen3-14b": (Shape(QWEN3, 40, 5120, 40, 8, 128, 17408, 151936, False), 27.51),
}


@contextmanager
def measured(
    shape: Shape, device: FakeDevice, monkeypatch: pytest.MonkeyPatch, **options: object
) -> Iterator[tuple[ModelWorker, Decided, int]]:
    """A worker that has loaded and measured, what is decided then, and bytes of the pool."""
    with model_directory(shape, 32768) as root, fake_memory(device, monkeypatch) as platform:
        config = EngineArgs(  # type: ignore[arg-type]
            model=Path(root),
            load_format="dummy",
            device="cuda",
            skip_tokenizer_init=True,
            **options,
        ).create_config()
        info = read_model_info(config.model.model)
        resolved = resolve(config, info, "cuda")
        worker = ModelWorker(resolved, info, platform)
        facts = worker.load()
        decided = decide(resolved, info, facts, worker.measure)
        yield worker, decided, decided.num_kv_blocks * facts.block_bytes
        worker.shutdown()


@pytest.mark.parametrize(
    "name, share, sizes",
    [("qwen3-0.6b", 0.5, (1, 64, 256)), *((name, 0.9, None) for name in MODELS)],
)
def test_all_that_a_gpu_holds_is_within_its_share(
    name: str, share: float, sizes: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, weights = MODELS[name]
    device, allowed = FakeDevice(TOTAL), int(TOTAL * share)
    options = {"gpu_memory_utilization": share, "cudagraph_capture_sizes": sizes}
    with measured(shape, device, monkeypatch, **options) as run:
        worker, decided, pool = run
        worker.platform.compiles = sizes is not None  # smaller steps: to meet them once is enough
        worker.allocate(decided.num_kv_blocks)
        assert device.left_by_recordings == 0, "a second copy of activations"
        sched = decided.scheduler
        worker.driver.runner.profile_run(sched.max_num_batched_tokens, sched.max_num_seqs)
    assert device.most_used <= allowed, f"{(device.most_used - allowed) / GIB:.2f} GiB too much"
    # The pool gets what weights, the largest step, graphs and the driver leave: some GiB less.
    assert pool >= allowed - (weights + 4.5) * GIB
    assert gc.isenabled()


def test_what_is_left_of_a_small_gpu_is_not_for_large_recorded_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape, weights = MODELS["qwen3-0.6b"]
    device = FakeDevice(8 * 10**9)
    with measured(shape, device, monkeypatch) as (_, _, pool):
        assert pool >= int(device.total * 0.9) - (weights + 1.7) * GIB


def test_what_does_not_fit_is_said_with_what_graphs_would_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeDevice(20 * 10**9)
    with (
        pytest.raises(ConfigError, match=r"no GPU memory is left .* recorded steps 0\.\d\d"),
        measured(MODELS["llama-3.1-8b"][0], device, monkeypatch),
    ):
        pass


def test_a_pool_that_leaves_no_room_for_steps_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of blocks that is given is taken as it is."""

    def meet(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(worker_module, "meet_shapes", meet)
    shape, device = MODELS["qwen3-0.6b"][0], FakeDevice(TOTAL)
    with (
        measured(shape, device, monkeypatch) as (worker, _, _),
        pytest.raises(ConfigError, match=r"out of GPU memory while steps .*num_kv_blocks or"),
    ):
        worker.allocate(2)


def test_fewer_graphs_leave_more_to_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = []
    for options in ({}, {"cudagraph_capture_sizes": [1, 2]}, {"enforce_eager": True}):
        device = FakeDevice(TOTAL)
        with measured(MODELS["qwen3-0.6b"][0], device, monkeypatch, **options) as (_, _, pool):
            pools.append(pool)
    recorded, few, eager = pools
    assert recorded + GIB // 4 < few <= eager


def test_graphs_are_reckoned_from_the_few_that_were_tried() -> None:
    trial = GraphTrial(before=100, one=60, several=54, num_several=4)
    assert graphs_bytes(trial, num_sizes=4) == 46
    assert graphs_bytes(trial, num_sizes=10) == 46 + 6 * 2
    # Another process has given something back meanwhile.
    given_back = GraphTrial(before=100, one=60, several=75, num_several=4)
    assert graphs_bytes(given_back, num_sizes=10) == 40
    assert graphs_bytes(GraphTrial(before=100, one=110, several=110, num_several=1), 1) == 0

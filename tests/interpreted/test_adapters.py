"""LoRA adapters on a made-up device that checks order, memory and graphs, next to the CPU's."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.tiny_models import CASES, Case, config_of, random_model, save
from support import adapter_files, triton_interpreter
from support.adapted import Adapted, random_adapter, run
from support.fake_cuda import FakeCuda
from support.fake_nccl import make_fake_rank

from engine import EngineArgs, LLMEngine, SamplingParams
from engine.core import ranks
from engine.lora.loading import FutureReading, Order, ThreadedReader
from engine.worker.platform.cuda import CudaPlatform
from engine.worker.worker import ModelWorker

pytestmark = pytest.mark.skipif(
    not triton_interpreter.IS_INTERPRETING, reason="takes the place of a device"
)
PROMPTS = ([5, 6, 7], [9] * 18, [3, 4], [8] * 5)  # the second in two chunks
PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
SHAPE = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 200}
ENGINE = {"max_model_len": 32, "num_threads": 1, "max_num_seqs": 4, "num_kv_blocks": 40}
ENGINE |= {"block_size": 8, "max_num_batched_tokens": 16, "log_level": "error"}
ENGINE |= {"enable_lora": True, "max_lora_rank": 16, "max_loras": 2}
DORA = {"target_modules": "all-linear", "use_dora": True}
MODES: dict[str, dict[str, Any]] = {
    "recorded": {"device": "cuda", "cudagraph_capture_sizes": [4, 16]},
    "call by call": {"device": "cuda", "enforce_eager": True},
}


def read_at_once(self: ThreadedReader, order: Order) -> FutureReading:
    """``submit`` of a reader without threads, of which the made-up device sees one."""
    reading = FutureReading()
    try:
        reading.future.set_result(self._read(order))
    except Exception as error:
        reading.future.set_exception(error)
    return reading


def make_rank_at_once(*arguments: Any) -> ModelWorker:
    """The worker of another rank, which reads adapters at once."""
    ThreadedReader.submit = read_at_once  # type: ignore[method-assign]
    return make_fake_rank(*arguments)


class Model:
    """A model, and adapters of different ranks."""

    def __init__(self, root: Path) -> None:
        case = CASES["llama"]
        model = random_model(config_of(Case(case.family, {**case.options, **SHAPE})), seed=0)
        save(model, root / "model")
        self.path = root / "model"
        dora = adapter_files.trained(copy.deepcopy(model), 5, 2.0, **DORA)
        self.adapters = [
            *(random_adapter(model, root / str(n), seed=n, rank=n) for n in (16, 4)),
            adapter_files.save(dora, root / "dora"),
        ]

    def tokens(
        self, *, are_adapted: bool = True, adapters: Sequence[Path] = (), **options
    ) -> list[list[int]]:
        """Prompts with more adapters than there are slots, and without one. adapters: by default
        all."""
        args = EngineArgs(model=str(self.path), skip_tokenizer_init=True, **{**ENGINE, **options})
        which = [*(adapters or self.adapters), None] if are_adapted else [None] * 4
        requests = [
            Adapted(prompt, adapter, PARAMS) for prompt, adapter in zip(PROMPTS, which, strict=True)
        ]
        with LLMEngine.from_engine_args(args) as engine:
            return run(engine, requests)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(autouse=True)
def _in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled."""
    monkeypatch.setattr(ThreadedReader, "submit", read_at_once)
    monkeypatch.setattr(CudaPlatform, "compiles", False)


@pytest.fixture
def wanted(model: Model) -> list[list[int]]:
    tokens = model.tokens(device="cpu")
    plain = model.tokens(device="cpu", are_adapted=False)
    assert [one != other for one, other in zip(tokens, plain, strict=True)] == [True] * 3 + [False]
    return tokens


@pytest.mark.parametrize("mode", ["recorded", pytest.param("call by call", marks=pytest.mark.slow)])
def test_tokens_are_those_of_the_cpu_and_nothing_is_out_of_order(
    mode: str, model: Model, wanted: list[list[int]]
) -> None:
    with FakeCuda() as cuda:
        assert model.tokens(**MODES[mode]) == wanted
        assert (cuda.num_replays > 5) == (mode != "call by call")
    assert not cuda.faults


@pytest.mark.slow
def test_two_devices_have_parts_of_adapters(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = tmp_path / "rank 1"
    monkeypatch.setattr(ranks, "make_rank", partial(make_rank_at_once, str(report)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    plain = [*model.adapters[:2], model.adapters[0]]
    wanted = model.tokens(device="cpu", adapters=plain)
    with FakeCuda(num_devices=2) as cuda:
        assert model.tokens(**MODES["recorded"], adapters=plain, tensor_parallel_size=2) == wanted
    assert not cuda.faults
    assert json.loads(report.read_text())["faults"] == []


@pytest.mark.parametrize("waits", [True, False])
def test_copies_beside_steps_wait_for_the_last_use_of_their_place(waits: bool) -> None:
    with FakeCuda() as cuda:
        platform = CudaPlatform()
        place, source = platform.zeros((64,), torch.uint8), platform.pinned(64)
        source.fill_(3)
        early = platform.mark()
        place.sum()
        platform.send(source, place, platform.mark() if waits else early)
        assert place.tolist() == [3] * 64
    assert (not cuda.faults) == waits

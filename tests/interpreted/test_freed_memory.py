"""An engine that has ended holds no memory of its model, whatever still refers to the engine."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.tiny_models import CASES, Case, config_of, random_model, save
from support import triton_interpreter

from engine import LLM, AsyncLLMEngine, EngineArgs, SamplingParams
from engine.config.env import INTERPRET_CUDA
from engine.spec import compute as spec
from engine.worker import worker
from engine.worker.memory import tensors_of

pytestmark = pytest.mark.skipif(
    not triton_interpreter.IS_INTERPRETING, reason="the CPU takes the place of a device"
)
SHAPE = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 200}
ENGINE = {"max_model_len": 32, "num_threads": 1, "max_num_seqs": 2, "num_kv_blocks": 12}
ENGINE |= {"block_size": 8, "max_num_batched_tokens": 16, "log_level": "error"}
ENGINE |= {"skip_tokenizer_init": True, "cudagraph_capture_sizes": [2, 16]}
HYBRID = {**CASES["qwen3.5"].options, "num_hidden_layers": 3}
DRAFTS = {"method": "draft_model", "num_speculative_tokens": 2}
GREEDY = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, options in (("llama", SHAPE), ("qwen3.5", HYBRID)):
        case = CASES[name]
        save(
            random_model(config_of(Case(case.family, {**case.options, **options})), seed=0),
            root / name,
        )
    return root


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, weakref.ref[Any]]]:
    """Models, KV tensors and states that engines have made. Nothing is freed by a collection."""
    found: dict[str, weakref.ref[Any]] = {}

    def watch(module: Any, name: str, parts: Callable[[Any], list[Any]]) -> None:
        make = getattr(module, name)

        def made(*args: Any, **kwargs: Any) -> Any:
            result = make(*args, **kwargs)
            for one in parts(result):
                found[f"{name} {len(found)}"] = weakref.ref(one)
            return result

        monkeypatch.setattr(module, name, made)

    watch(worker, "load_model", lambda model: [model])
    watch(worker, "make_kv_cache", lambda kv: list(tensors_of(kv)))
    watch(worker, "make_states", lambda states: [one for layer in states for one in layer])
    watch(spec, "load_model", lambda model: [model])
    watch(spec, "make_kv_cache", lambda kv: list(tensors_of(kv)))
    gc.collect()
    gc.disable()
    yield found
    gc.enable()
    gc.unfreeze()


def held(large: dict[str, weakref.ref[Any]]) -> list[str]:
    assert len(large) > 2
    return [name for name, one in large.items() if one() is not None]


OPTIONS = {
    "llama": {},
    "tiers": {"kv_offloading_size": 0.01},
    "adapters": {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1},
    "draft model": {"speculative_config": DRAFTS},
    "qwen3.5": {},
}
ON_CUDA = [
    pytest.param("cuda", kind, marks=() if kind == "llama" else pytest.mark.slow)
    for kind in OPTIONS
]


@pytest.mark.parametrize(("device", "kind"), [*(("cpu", kind) for kind in OPTIONS), *ON_CUDA])
def test_memory_is_free_after_shutdown(device, kind, models, large, monkeypatch):
    monkeypatch.setenv(INTERPRET_CUDA, str(int(device == "cuda")))
    model = models / (kind if kind == "qwen3.5" else "llama")
    options = dict(OPTIONS[kind])
    if kind == "draft model":
        options = {"speculative_config": {**DRAFTS, "model": str(model)}}
    llm = LLM(model, device=device, **ENGINE, **options)
    llm.generate([{"prompt_token_ids": [5, 6, 7] * 4}], GREEDY, use_tqdm=False)
    llm.shutdown()
    assert held(large) == []
    llm.shutdown()


def test_memory_is_free_after_shutdown_of_an_asyncio_engine(models, large):
    async def run() -> AsyncLLMEngine:
        args = EngineArgs(model=models / "llama", device="cpu", **ENGINE)
        engine = AsyncLLMEngine.from_engine_args(args)
        async for _ in engine.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY, "a"):
            pass
        engine.shutdown()
        return engine

    engine = asyncio.run(run())
    assert held(large) == []
    del engine

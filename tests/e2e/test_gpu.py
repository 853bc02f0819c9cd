"""What only a GPU can show: its streams, events, graphs and memory. Skipped without one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from e2e.references import tightest
from e2e.tiny_models import TinyModels

from engine import LLM, AsyncLLMEngine, EngineArgs, LLMEngine, SamplingParams
from engine.errors import ConfigError
from engine.worker.platform.cuda import CudaPlatform

pytestmark = pytest.mark.gpu

NUM_NEW = 24  # enough for windowed models to run out of blocks
LENGTHS = (9, 1, 23, 40, 40, 61)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, detokenize=False)
MODES = {
    "recorded, depth 2": {},
    "call by call, depth 1": {"enforce_eager": True, "async_scheduling": False},
    "chunks": {"max_num_batched_tokens": 16, "cudagraph_capture_sizes": [2, 8]},
    "recorded chunks": {"max_num_batched_tokens": 24, "cudagraph_capture_sizes": [8, 12, 24]},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "preempted": {"is_tight": True, "max_num_batched_tokens": 24},
}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 290, (n,), generator=generator).tolist() for n in LENGTHS]


def options_of(path, **options) -> dict:
    defaults = {"max_model_len": 128, "max_num_seqs": 8, "num_kv_blocks": 100, "block_size": 16}
    defaults |= {"skip_tokenizer_init": True, "device": "cuda", "dtype": "float32"}
    return {"model": str(path), "log_level": "error", **defaults, **options}


def run(engine: LLMEngine, params: SamplingParams = GREEDY) -> list[list[int]]:
    for index, ids in enumerate(prompts()):
        engine.add_request(str(index), ids, params)
    last = {}
    while engine.has_unfinished_requests():
        last |= {out.request_id: out.outputs[0].token_ids for out in engine.step()}
    return [last[str(index)] for index in range(len(LENGTHS))]


def started(path, **options) -> LLMEngine:
    return LLMEngine.from_engine_args(EngineArgs(**options_of(path, **options)))


def run_with(
    path, params: SamplingParams = GREEDY, *, is_tight: bool = False, **options
) -> list[list[int]]:
    """The tokens of every prompt. is_tight: the KV pool holds little more than one request."""
    if is_tight:
        with started(path, **options, enforce_eager=True) as engine:
            options["num_kv_blocks"] = tightest(engine, max(LENGTHS) + NUM_NEW)
    with started(path, **options) as engine:
        tokens = run(engine, params)
        assert (engine.stats().num_preemptions > 0) == is_tight
        return tokens


def greedy_of(model, ids: list[int]) -> list[int]:
    model.generation_config.eos_token_id = None
    length = {"max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones(1, len(ids), dtype=torch.long)
    out = model.generate(torch.tensor([ids]), attention_mask=mask, **length)
    return out[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def wanted(tiny_models: TinyModels) -> Callable[[str], list[list[int]]]:
    """Returns the tokens of transformers for each prompt."""

    @cache
    def get(family: str) -> list[list[int]]:
        return [greedy_of(tiny_models.reference(family), ids) for ids in prompts()]

    return get


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma2", "gemma3", "mistral-window", "mixtral"]
)
def test_greedy_tokens_are_those_of_transformers(
    family: str,
    mode: str,
    tiny_models: TinyModels,
    wanted: Callable[[str], list[list[int]]],
) -> None:
    assert run_with(tiny_models.path(family), **MODES[mode]) == wanted(family)


def test_seeded_tokens_do_not_hang_on_graphs_or_overlap(tiny_models: TinyModels) -> None:
    params = SamplingParams(
        temperature=0.9, top_p=0.9, seed=3, max_tokens=NUM_NEW, ignore_eos=True, detokenize=False
    )
    path = tiny_models.path("llama")
    first, *others = [run_with(path, params, **options) for options in MODES.values()]
    assert all(other == first for other in others)


def test_a_pool_is_sized_from_what_is_free(tiny_models: TinyModels) -> None:
    path = tiny_models.path("llama")
    options = {"num_kv_blocks": None, "gpu_memory_utilization": 0.3}
    with LLM(**options_of(path, **options)) as llm:
        assert llm.llm_engine.has_unfinished_requests() is False
    with pytest.raises(ConfigError, match=r"GiB gpu_memory_utilization 1e-06 allows 0\.00 GiB"):
        run_with(path, num_kv_blocks=None, gpu_memory_utilization=1e-6)


def test_the_host_sleeps_while_it_waits() -> None:
    platform = CudaPlatform()
    torch.cuda._sleep(1_000_000)
    platform.mark().synchronize()  # first use
    torch.cuda._sleep(1_000_000_000)  # cycles: about half a second
    mark = platform.mark()
    wall, busy = time.perf_counter(), time.thread_time()
    mark.synchronize()
    wall, busy = time.perf_counter() - wall, time.thread_time() - busy
    assert wall > 0.1 and busy < wall / 4, (wall, busy)


def test_results_come_home_beside_later_work() -> None:
    """What was there when it was fetched, although the device goes on and writes over it."""
    platform = CudaPlatform()
    place = torch.arange(1000, device=platform.device)
    fetched = []
    for _ in range(20):
        place += 1
        fetched.append(platform.fetch([place]))
        place *= 1
    torch.cuda._sleep(100_000_000)
    for step, (tensors, done) in enumerate(fetched, start=1):
        done.synchronize()
        assert np.array_equal(tensors[0].numpy(), np.arange(1000) + step)


def test_a_graph_is_replayed_with_new_data() -> None:
    platform = CudaPlatform()
    x, y = (torch.zeros(64, 64, device=platform.device) for _ in range(2))
    graph = platform.graph()
    graph.capture(lambda: y.copy_(x @ x))
    x.fill_(1.0)
    graph.replay()
    assert y.tolist() == torch.full((64, 64), 64.0).tolist()


def test_steps_may_come_from_another_thread(tiny_models: TinyModels) -> None:
    path = tiny_models.path("llama")
    wanted = run_with(path)

    async def complete() -> list[list[int]]:
        engine = AsyncLLMEngine.from_engine_args(EngineArgs(**options_of(path)))
        try:
            return await asyncio.gather(*(_last(engine, i) for i in range(len(LENGTHS))))
        finally:
            engine.shutdown()

    async def _last(engine: AsyncLLMEngine, index: int) -> list[int]:
        async for out in engine.generate(prompts()[index], GREEDY, str(index)):
            last = out.outputs[0].token_ids
        return last

    assert asyncio.run(complete()) == wanted

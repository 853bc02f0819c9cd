"""Builds the worker of a GPU: weights, tables, memory profile, KV pool, graphs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from engine.config.cache import CacheConfig
from engine.config.decide import Decided, cap_to_pool, decide_max_model_len, decide_num_blocks
from engine.config.engine import EngineConfig
from engine.config.gpu import for_gpu, graph_sizes
from engine.config.gpu_memory import GIB, kv_budget, shortage
from engine.config.model import ModelInfo
from engine.config.sched import SchedulerConfig
from engine.errors import ConfigError
from engine.kv.layout import KVSpec
from engine.models.decoder import Decoder
from engine.models.load import load_model
from engine.models.model import Model
from engine.worker.cuda.batches import Batches
from engine.worker.cuda.platform import Platform
from engine.worker.cuda.runner import DeviceRunner
from engine.worker.cuda.sampler import DeviceSampler
from engine.worker.cuda.slots import Slots
from engine.worker.cuda.staging import Staging
from engine.worker.cuda.steps import Machine
from engine.worker.memory import choose_kv_dtype, log_pool, make_kv_cache
from engine.worker.states import LiveSeqs
from engine.worker.warmup import warm_up

CHUNKS = (1, 2, 4, 8, 16, 32, 64, 128)  # tokens; launch settings differ between them, not beyond
# What torch's allocator, the driver and its libraries say when there is none left.
OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "Failed to allocate")

logger = logging.getLogger("engine.worker")


def make_cuda_worker(
    config: EngineConfig, info: ModelInfo, platform: Platform
) -> tuple[DeviceRunner, Decided]:
    """Load the model, size and make its KV pool, record decode steps. Raises ``ConfigError``."""
    device = platform.device.type
    asked, cache = for_gpu(config.gpu, config.scheduler, config.cache, config.async_scheduling)
    max_model_len = decide_max_model_len(config.model, info)
    asked = replace(asked, max_model_len=max_model_len)
    with explained(platform, "the weights were loaded"):
        model = load_model(config.model, info, device=device, max_model_len=max_model_len)
        if isinstance(model, Decoder):
            model.group_experts()
    kv_dtype = choose_kv_dtype(cache.kv_cache_dtype, model.dtype, "cuda")
    spec = replace(model.kv_spec, dtype_bytes=kv_dtype.itemsize)
    with explained(platform, "room was made for the requests"):
        machine = make_machine(model, platform, asked, cache.block_size, config)
    runner = DeviceRunner(machine, max_model_len)
    num_blocks = _size_pool(config, asked, cache, spec, runner, kv_dtype)
    sched = cap_to_pool(asked, cache, num_blocks)
    decided = Decided(
        max_model_len=sched.max_model_len,
        num_kv_blocks=num_blocks,
        block_size=cache.block_size,
        vocab_size=model.vocab_size,
        eos_token_ids=info.eos_token_ids,
        device="cuda",
        scheduler=sched,
        model=str(info.path.absolute()),
    )
    log_pool(spec, decided)
    machine.kv[:] = make_kv_cache(spec, num_blocks, cache.block_size, dtype=kv_dtype, device=device)
    if platform.compiles:
        _meet_shapes(runner, sched)
    warm_up(runner, num_blocks)
    _record(runner, config, sched)
    return runner, decided


def make_machine(
    model: Model,
    platform: Platform,
    sched: SchedulerConfig,
    block_size: int,
    config: EngineConfig,
) -> Machine:
    """Everything a step needs but the KV cache, which is an empty list yet."""
    num_seqs, max_model_len = sched.max_num_seqs, sched.max_model_len
    live = LiveSeqs(num_seqs, max_model_len, block_size)
    slots = Slots(platform.device, num_seqs, max_model_len, block_size)
    staging = Staging(platform, num_seqs, sched.max_num_batched_tokens, sched.num_steps_in_flight)
    return Machine(
        model=model,
        kv=[],
        platform=platform,
        live=live,
        slots=slots,
        sampler=DeviceSampler(platform, slots, live, model.vocab_size, config.logits_processors),
        batches=Batches(platform, slots, live, staging, model.vocab_size),
    )


@contextmanager
def explained(platform: Platform, doing: str) -> Iterator[None]:
    """Say with numbers what is lacking where memory runs out before the engine runs."""
    try:
        yield
    except RuntimeError as error:
        if not any(sign in str(error) for sign in OUT_OF_MEMORY):
            raise
        free, total = platform.free_and_total()
        raise ConfigError(shortage(doing, free=free, total=total)) from error


def _size_pool(
    config: EngineConfig,
    sched: SchedulerConfig,
    cache: CacheConfig,
    spec: KVSpec,
    runner: DeviceRunner,
    kv_dtype: torch.dtype,
) -> int:
    """Blocks of the pool: asked, or what a step as large as there can be leaves of the memory."""
    sizes = {
        "block_bytes": spec.block_bytes(cache.block_size),
        "max_model_len": sched.max_model_len,
        "max_num_seqs": sched.max_num_seqs,
    }
    if cache.num_kv_blocks is not None or cache.kv_cache_memory_bytes is not None:
        return decide_num_blocks(cache, free_bytes=0, **sizes)
    platform = runner.machine.platform
    runner.kv[:] = make_kv_cache(
        spec, 1, cache.block_size, dtype=kv_dtype, device=platform.device.type
    )
    with explained(platform, f"a step of {sched.max_num_batched_tokens} tokens was tried"):
        use = platform.measure(
            lambda: runner.rehearse(sched.max_num_batched_tokens, sched.max_num_seqs)
        )
    logger.info(
        "GPU memory: %.2f GiB of weights and tables, %.2f of activations, %.2f of others",
        use.loaded / GIB,
        use.activations / GIB,
        use.others / GIB,
    )
    blocks_of_one = -(-sched.max_model_len // cache.block_size) + 1  # and the null block
    budget = kv_budget(
        use,
        config.gpu.gpu_memory_utilization,
        one_request=blocks_of_one * spec.block_bytes(cache.block_size),
    )
    return decide_num_blocks(replace(cache, kv_cache_memory_bytes=budget), free_bytes=0, **sizes)


def _meet_shapes(runner: DeviceRunner, sched: SchedulerConfig) -> None:
    """A chunk of every kind of length, at the beginning and behind a long context: or kernels are
    compiled while somebody waits for them."""
    longest = min(sched.max_num_batched_tokens, sched.max_model_len)
    for num_tokens in CHUNKS:
        if num_tokens <= longest:
            for context in {0, sched.max_model_len - num_tokens}:
                runner.rehearse(num_tokens, 1, context)


def _record(runner: DeviceRunner, config: EngineConfig, sched: SchedulerConfig) -> None:
    sizes = graph_sizes(config.gpu, sched.max_num_seqs)
    if not runner.machine.model.can_be_recorded and sizes:
        logger.info("this model's decode steps are launched call by call: it waits for the device")
        return
    started = time.perf_counter()
    with explained(runner.machine.platform, "decode steps were recorded"):
        runner.capture(sizes)
    if sizes:
        seconds = time.perf_counter() - started
        logger.info("decode steps of %d sizes recorded in %.1f s", len(sizes), seconds)

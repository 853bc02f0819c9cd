"""Builds the worker of one device: threads, weights, KV memory, runner."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

import torch

from engine.config.decide import GIB, Decided, cap_to_pool, decide_max_model_len, decide_num_blocks
from engine.config.engine import EngineConfig
from engine.config.env import default_num_threads
from engine.config.model import ModelInfo
from engine.errors import ConfigError
from engine.kv.groups import FULL
from engine.kv.layout import KVSpec, max_concurrency
from engine.models.decoder import Decoder
from engine.models.load import load_model
from engine.sample.sampler import Sampler
from engine.worker.executor import InprocExecutor
from engine.worker.memory import choose_kv_dtype, free_host_bytes, make_kv_cache
from engine.worker.runner import ModelRunner
from engine.worker.states import States
from engine.worker.warmup import warm_up
from kernels.cpu import prepare
from kernels.cpu.threads import leave_threads_to_kernels, set_threads

logger = logging.getLogger("engine.worker")


def resolve_device(asked: str) -> str:
    """Where the model runs. Raises ``ConfigError`` for a GPU: there is no worker for one yet."""
    if asked == "cuda":
        raise ConfigError(
            "device is 'cuda', but this version computes on the CPU; use 'cpu' or 'auto'"
        )
    return "cpu"


def make_worker(config: EngineConfig, info: ModelInfo) -> tuple[InprocExecutor, Decided]:
    """Load the model, size and make its KV pool, and decide what the engine runs with."""
    device = resolve_device(config.device)
    num_threads = set_threads(config.num_threads or default_num_threads())
    if device == "cpu":
        threading.Thread(target=prepare, name="prepare-kernels").start()
    max_model_len = decide_max_model_len(config.model, info)
    model = load_model(config.model, info, device=device, max_model_len=max_model_len)
    kv_dtype = choose_kv_dtype(config.cache.kv_cache_dtype, model.dtype, device)
    spec = replace(model.kv_spec, dtype_bytes=kv_dtype.itemsize)
    num_blocks = decide_num_blocks(
        config.cache,
        block_bytes=spec.block_bytes(config.cache.block_size),
        free_bytes=free_host_bytes(),
        max_model_len=max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
    )
    sched = cap_to_pool(
        replace(config.scheduler, max_model_len=max_model_len), config.cache, num_blocks
    )
    decided = Decided(
        max_model_len=sched.max_model_len,
        num_kv_blocks=num_blocks,
        block_size=config.cache.block_size,
        vocab_size=model.vocab_size,
        eos_token_ids=info.eos_token_ids,
        device=device,
        scheduler=sched,
    )
    _log_pool(spec, decided, num_threads)
    sampler = Sampler(
        vocab_size=model.vocab_size,
        max_num_seqs=sched.max_num_seqs,
        device=device,
        logits_processors=config.logits_processors,
    )
    states = States(sched.max_num_seqs, max_model_len, decided.block_size)
    kv = make_kv_cache(spec, num_blocks, decided.block_size, dtype=kv_dtype, device=device)
    runner = ModelRunner(model, sampler, states, kv)
    if device == "cpu" and isinstance(model, Decoder) and model.dtype is torch.float32:
        leave_threads_to_kernels()
    warm_up(runner, num_blocks)
    return InprocExecutor(runner), decided


def _log_pool(spec: KVSpec, decided: Decided, num_threads: int) -> None:
    num_usable, block_size = decided.num_kv_blocks - 1, decided.block_size
    logger.info(
        "KV pool: %d blocks of %d tokens, %.2f GiB, for %.2f requests of %d tokens; %d threads",
        num_usable,
        block_size,
        decided.num_kv_blocks * spec.block_bytes(block_size) / GIB,
        max_concurrency(num_usable, [FULL], block_size, decided.max_model_len),
        decided.max_model_len,
        num_threads,
    )

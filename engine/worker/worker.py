"""Builds the worker of one device: threads, weights, KV memory, runner."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

import torch

from engine.config.decide import Decided, cap_to_pool, decide_max_model_len, decide_num_blocks
from engine.config.engine import EngineConfig
from engine.config.env import default_num_threads
from engine.config.model import ModelInfo
from engine.models.decoder import Decoder
from engine.models.load import load_model
from engine.sample.sampler import Sampler
from engine.worker.cuda.runner import DeviceRunner
from engine.worker.cuda.worker import make_cuda_worker
from engine.worker.device import make_platform, resolve_device
from engine.worker.executor import InprocExecutor
from engine.worker.memory import choose_kv_dtype, free_host_bytes, log_pool, make_kv_cache
from engine.worker.runner import ModelRunner
from engine.worker.states import States
from engine.worker.warmup import warm_up
from kernels.bodies import CPU_TENSORS
from kernels.cpu import prepare
from kernels.cpu.threads import leave_threads_to_kernels, set_threads

logger = logging.getLogger("engine.worker")


def make_worker(
    config: EngineConfig, info: ModelInfo
) -> tuple[InprocExecutor | DeviceRunner, Decided]:
    """Load the model, size and make its KV pool, and decide what the engine runs with."""
    device = resolve_device(config.device)
    if device == "cuda":
        return make_cuda_worker(config, info, make_platform())
    CPU_TENSORS.go_to_triton(False)
    num_threads = set_threads(config.num_threads or default_num_threads())
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
        model=str(info.path.absolute()),
    )
    log_pool(spec, decided)
    logger.info("%d threads", num_threads)
    sampler = Sampler(
        vocab_size=model.vocab_size,
        max_num_seqs=sched.max_num_seqs,
        device=device,
        logits_processors=config.logits_processors,
    )
    states = States(sched.max_num_seqs, max_model_len, decided.block_size)
    kv = make_kv_cache(spec, num_blocks, decided.block_size, dtype=kv_dtype, device=device)
    runner = ModelRunner(model, sampler, states, kv)
    if isinstance(model, Decoder) and model.dtype is torch.float32:
        leave_threads_to_kernels()
    warm_up(runner, num_blocks)
    return InprocExecutor(runner), decided

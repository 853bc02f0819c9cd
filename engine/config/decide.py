"""Computes an engine's sizes from the requested options, the model and the measured memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from engine.config.cache import CacheConfig
from engine.config.engine import Device, EngineConfig, ResolvedConfig
from engine.config.kv_groups import FULL, Group, longest_request, request_blocks
from engine.config.model import ModelInfo
from engine.config.option import part
from engine.config.sched import SchedulerConfig, SchedulerOptions
from engine.config.speculative import SpeculativeConfig
from engine.errors import ConfigError

logger = logging.getLogger("engine.config")

GIB = 1 << 30
TOKEN_BUDGET = 8192  # tokens per step


class CpuSteps(NamedTuple):
    """Default token budgets of a step on a CPU, which depend on how it multiplies matrices."""

    most: int  # takes some tenths of a second; larger steps gain little and delay decodes
    mixed: int  # prompt tokens next to decodes: the step takes three to five times as long
    spread: int  # steps over which waiting prompts are spread; any excess is computed too


Products = Literal["tiles", "wide pairs", ""]
"""How a CPU multiplies matrices: bfloat16 in tiles (AMX), bfloat16 in pairs at twice the float32
rate (AVX-512 BF16 from Zen 5 on), or any other way."""
CPU_STEPS: dict[Products, CpuSteps] = {
    "tiles": CpuSteps(2048, 160, 6),
    "wide pairs": CpuSteps(1024, 128, 6),
    "": CpuSteps(512, 48, 12),
}
CPU_CHUNK, GPU_CHUNK = 128, 2048  # tokens of a prompt's smallest chunks in a pipeline
CPU_BLOCK_SIZE = 16
GPU_BLOCK_SIZE = 64  # one tile of keys in the attention kernel


@dataclass(frozen=True, kw_only=True)
class Decided:
    """The sizes and limits that the engine runs with."""

    max_model_len: int
    """Longest prompt plus output, in tokens."""
    num_kv_blocks: int
    """Blocks of the KV pool, the null block included."""
    block_size: int
    """Tokens per block."""
    vocab_size: int
    """Upper limit of token ids, exclusive."""
    eos_token_ids: tuple[int, ...]
    """End-of-text ids from config.json and generation_config.json."""
    device: str
    """"cpu" or "cuda"."""
    scheduler: SchedulerConfig
    """The scheduler's configuration; its max_model_len fits the pool."""
    model: str = ""
    """Directory of the model, or its name on a hub; empty without a model."""
    capabilities: tuple[str, ...] = ()
    """Optional parts of a plan that the worker supports (``engine.messages.step.PARTS``)."""
    kv_groups: tuple[Group, ...] = (FULL,)
    """Groups of layers that share a block table."""
    snapshot_blocks: int = 0
    """Blocks for a copy of a request's recurrent states; 0: the model keeps none."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Sizes that a worker knows after loading its model."""

    vocab_size: int
    """Upper limit of token ids, exclusive."""
    block_bytes: int
    """Bytes of one KV block over all layers of a group."""
    kv_groups: tuple[Group, ...] = (FULL,)
    """Groups of layers; the layers of a group share a block table."""
    snapshot_blocks: int = 0
    """Blocks for a copy of a request's recurrent states; 0: the model keeps none."""
    most_drafts: int | None = None
    """Most drafts per decode that the worker can verify; ``None``: no limit."""


def resolve(
    config: EngineConfig, info: ModelInfo, device: Device, *, products: Products = ""
) -> ResolvedConfig:
    """Set the options that depend on device and model, such as max_model_len and token budgets.

    products: how the CPU multiplies matrices of the model's dtype. Raises ``ConfigError``."""
    is_cpu, requested, ahead = device == "cpu", config.scheduler, config.async_scheduling
    if is_cpu and config.gpu.attention_backend is not None:
        raise ConfigError(
            f"attention_backend is {config.gpu.attention_backend!r} and the device is a CPU, which "
            "has only its own attention; leave it out, or use device='cuda'"
        )
    overlaps = not is_cpu if ahead is None else ahead
    num_stages = config.parallel.pipeline_parallel_size
    scheduler = part(
        SchedulerConfig,
        requested,
        max_num_batched_tokens=decide_token_budget(requested, is_cpu=is_cpu, products=products),
        max_model_len=decide_max_model_len(requested, info),
        max_mixed_prefill_tokens=decide_mixed(requested, is_cpu=is_cpu, products=products),
        num_steps_in_flight=max(num_stages, 2 if overlaps else 1),
        num_mixed_prefill_steps=CPU_STEPS[products].spread,
        min_stage_chunk=decide_chunk(requested, num_stages, is_cpu=is_cpu),
        pipeline_parallel_size=num_stages,
    )
    block_size = config.cache.block_size or (CPU_BLOCK_SIZE if is_cpu else GPU_BLOCK_SIZE)
    check_interval(config.cache.state_snapshot_interval, block_size)
    return part(ResolvedConfig, config, device=device, scheduler=scheduler, block_size=block_size)


def check_interval(interval: int | None, block_size: int) -> None:
    """Raise ``ConfigError`` if ``state_snapshot_interval`` is not a multiple of the block size."""
    if interval is not None and interval % block_size:
        nearest = max(1, round(interval / block_size)) * block_size
        raise ConfigError(
            f"state_snapshot_interval is {interval}, must be a multiple of block_size "
            f"({block_size}): use {nearest}"
        )


def decide(
    config: ResolvedConfig,
    info: ModelInfo,
    facts: ModelFacts,
    measure: Callable[[], int],
    capabilities: tuple[str, ...] = (),
) -> Decided:
    """Decide all sizes, including the number of KV blocks. measure: returns the bytes available for
    the KV pool, called only if no option sets the pool's size. Raises ``ConfigError``."""
    cache, sched = config.cache, config.scheduler
    is_given = cache.num_kv_blocks is not None or cache.kv_cache_memory_bytes is not None
    num_blocks = decide_num_blocks(
        cache,
        block_size=config.block_size,
        block_bytes=facts.block_bytes,
        groups=facts.kv_groups,
        budget_bytes=0 if is_given else measure(),
        max_model_len=sched.max_model_len,
        max_num_seqs=sched.max_num_seqs,
    )
    sched = cap_drafts(sched, facts.most_drafts)
    sched = cap_to_pool(sched, config.block_size, num_blocks, facts.kv_groups)
    return Decided(
        max_model_len=sched.max_model_len,
        num_kv_blocks=num_blocks,
        block_size=config.block_size,
        vocab_size=facts.vocab_size,
        eos_token_ids=info.eos_token_ids,
        device=config.device,
        scheduler=sched,
        model=info.name,
        capabilities=capabilities,
        kv_groups=facts.kv_groups,
        snapshot_blocks=facts.snapshot_blocks,
    )


def cap_drafts(sched: SchedulerConfig, most: int | None) -> SchedulerConfig:
    """The scheduler's configuration with at most ``most`` drafts per decode; ``None``: no limit."""
    options = sched.speculative_config
    if most is None or options is None:
        return sched
    num_drafts = min(most, SpeculativeConfig.of(options).num_speculative_tokens)
    return replace(sched, speculative_config={**options, "num_speculative_tokens": num_drafts})


def decide_token_budget(
    requested: SchedulerOptions, *, is_cpu: bool, products: Products = ""
) -> int:
    """Return the token budget of a step: the requested one, or else the device's default, which is
    at least max_num_seqs."""
    if requested.max_num_batched_tokens is not None:
        return requested.max_num_batched_tokens
    is_small = is_cpu and requested.enable_chunked_prefill
    return max(CPU_STEPS[products].most if is_small else TOKEN_BUDGET, requested.max_num_seqs)


def decide_mixed(requested: SchedulerOptions, *, is_cpu: bool, products: Products = "") -> int:
    """Return the maximum number of prompt tokens in a step that also decodes (0: no limit).

    The default on a GPU is 0: some hundred prompt tokens hardly lengthen its steps."""
    if requested.max_mixed_prefill_tokens is not None:
        return requested.max_mixed_prefill_tokens
    if not (is_cpu and requested.enable_chunked_prefill):
        return 0
    return CPU_STEPS[products].mixed


def decide_chunk(requested: SchedulerOptions, num_stages: int, *, is_cpu: bool) -> int:
    """Return the tokens of the smallest chunks (0: chunks are as large as steps allow) into which
    long prompts are cut, so that all stages of a pipeline compute them at the same time."""
    if num_stages == 1 or not requested.enable_chunked_prefill:
        return 0
    return CPU_CHUNK if is_cpu else GPU_CHUNK


def decide_max_model_len(requested: SchedulerOptions, info: ModelInfo) -> int:
    """Return the requested max_model_len, by default the model's limit. Raises ``ConfigError``
    above the limit in config.json."""
    if requested.max_model_len is None:
        return info.max_position_embeddings
    own = info.stated_positions
    if own is not None and requested.max_model_len > own:
        raise ConfigError(
            f"max_model_len is {requested.max_model_len}, but the model was made for {own} "
            "positions (max_position_embeddings in config.json); lower it to that or less"
        )
    return requested.max_model_len


def decide_num_blocks(
    cache: CacheConfig,
    *,
    block_size: int,
    block_bytes: int,
    budget_bytes: int,
    max_model_len: int,
    max_num_seqs: int,
    groups: Sequence[Group] = (FULL,),
) -> int:
    """Return the number of blocks in the KV pool: as requested, or what fits into the requested or
    available bytes, but no more than max_num_seqs requests of max_model_len can use.

    Raises ``ConfigError`` if the bytes are too few for one such request."""
    per_request = request_blocks(groups, block_size, max_model_len)
    if cache.num_kv_blocks is not None:
        return cache.num_kv_blocks
    budget = cache.kv_cache_memory_bytes
    if budget is None:
        budget = budget_bytes
    blocks = min(budget // block_bytes, per_request * max_num_seqs + 1)
    if blocks < per_request + 1:
        fitting = longest_request(max(0, blocks - 1), groups, block_size)
        shorter = f"lower max_model_len to at most {fitting}, or " if fitting else ""
        raise ConfigError(
            f"one request of max_model_len {max_model_len} needs "
            f"{(per_request + 1) * block_bytes / GIB:.2f} GiB of KV cache, {budget / GIB:.2f} "
            f"GiB are available; {shorter}give more memory "
            "(kv_cache_memory_bytes, memory_utilization)"
        )
    return int(blocks)


def cap_to_pool(
    sched: SchedulerConfig, block_size: int, num_blocks: int, groups: Sequence[Group] = (FULL,)
) -> SchedulerConfig:
    """Lower max_model_len to the longest request that the KV pool can hold. ``sched`` is returned
    unchanged if the pool is large enough.

    Raises ``ConfigError`` if the pool has no room for one token."""
    longest = longest_request(num_blocks - 1, groups, block_size)
    if longest == 0:
        raise ConfigError(
            f"num_kv_blocks is {num_blocks}, but every request needs a block in each of the "
            f"model's {len(groups)} groups of layers, and one block is reserved; set num_kv_blocks "
            f"to at least {len(groups) + 1}"
        )
    room = sched.max_model_len if longest is None else longest + 1  # the last token needs no KV
    if sched.max_model_len <= room:
        return sched
    logger.warning(
        "max_model_len lowered from %d to %d: the KV pool has %d blocks of %d tokens; a request of "
        "the former length takes num_kv_blocks=%d",
        sched.max_model_len,
        room,
        num_blocks - 1,
        block_size,
        request_blocks(groups, block_size, sched.max_model_len - 1) + 1,
    )
    return replace(sched, max_model_len=room)

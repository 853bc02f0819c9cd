"""Sets the options of an engine that pools: what requests share, and how prompts may be split."""

from __future__ import annotations

import logging
from dataclasses import replace

from engine.config.decide import CPU_STEPS, Products, decide_max_model_len
from engine.config.engine import Device, EngineConfig
from engine.config.model import ModelInfo
from engine.config.pooling import PoolingSpec, is_bidirectional
from engine.errors import ConfigError

logger = logging.getLogger("engine.config")


def for_pooling(
    config: EngineConfig,
    info: ModelInfo,
    spec: PoolingSpec,
    device: Device,
    *,
    products: Products = "",
) -> EngineConfig:
    """The configuration with which a model pools. Raises ``ConfigError`` for options that only
    affect generated text.

    A model that looks both ways computes a text in one step, and shares no prefixes. A mean, or the
    vector of the first token, is gathered over a prompt's chunks, all of which are computed."""
    if config.scheduler.speculative_config is not None:
        raise ConfigError(
            f"speculative_config is given, and {info.name} returns vectors, for which no token is "
            "drafted: leave it out"
        )
    sched, cache = config.scheduler, config.cache
    whole = is_bidirectional(info)
    if whole:
        sched = replace(sched, enable_chunked_prefill=False)
        if sched.max_num_batched_tokens is None and device == "cpu":
            longest = decide_max_model_len(sched, info)
            most = max(CPU_STEPS[products].most, longest, sched.max_num_seqs)
            sched = replace(sched, max_num_batched_tokens=most)
    if whole or spec.is_by_token or spec.mode != "last":
        cache = replace(cache, enable_prefix_caching=False)
        logger.info(
            "no prefixes are cached: %s",
            "tokens see later tokens" if whole else "results need every token",
        )
    return replace(config, scheduler=sched, cache=cache)

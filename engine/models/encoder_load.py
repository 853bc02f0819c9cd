"""Loads the encoder of a model directory, without the head that may follow it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from math import lcm, prod
from typing import NamedTuple

import torch

from engine.config.model import ModelConfig, ModelInfo
from engine.errors import ConfigError, ModelError
from engine.layers.linear import is_cpu
from engine.models.assemble import Placement, compute_dtype
from engine.models.encoder import NativeEncoder
from engine.models.encoder_assembly import EncoderAssembly
from engine.models.encoder_sharding import EncoderSlice, check_encoder
from engine.models.encoder_spec import EncoderSpec
from engine.models.encoder_targets import HEADS, encoder_targets
from engine.models.hf_config import HF
from engine.models.opening import open_checkpoint
from engine.models.quant.fields import Format
from engine.models.sharding import Shard
from engine.models.weights import (
    PACKED_AHEAD,
    RandomWeights,
    StoredWeights,
    Weights,
    WeightSource,
)
from engine.parallel.collectives import Collectives

logger = logging.getLogger("engine.models")


class EncoderPlace(NamedTuple):
    """Where an encoder is loaded to. quantization: the format to quantise weights to, or None;
    ranks: compute it together."""

    device: str
    quantization: str | None
    max_model_len: int
    takes_adapters: bool
    ranks: Collectives


def load_encoder(
    family: Callable[[HF], EncoderSpec],
    config: ModelConfig,
    info: ModelInfo,
    form: Format | None,
    place: EncoderPlace,
) -> NativeEncoder:
    """Load an encoder. form: the format of quantised weights, ``None`` for plain ones. Raises
    ``ModelError`` if it cannot be served, ``ConfigError`` for options that it does not support."""
    started = time.perf_counter()
    if place.takes_adapters:
        raise ConfigError(
            f"enable_lora needs a decoder, and {info.architecture} is an encoder: merge the "
            "adapter into the model, or leave enable_lora out"
        )
    spec = encoder_spec(family, info, place.max_model_len)
    invariant = config.batch_invariant is True and not is_cpu(torch.device(place.device))
    if invariant and (form is not None or place.quantization is not None):
        raise ConfigError(
            "batch_invariant=True on a GPU needs weights that are not quantized; leave "
            "quantization out, use another model or device='cpu'"
        )
    placement = Placement(
        device=place.device,
        quantization=place.quantization,
        max_model_len=place.max_model_len,
        batch_invariant=invariant,
        quantize_activations=config.quantize_activations,
        ranks=place.ranks,
    )
    shard = placement.shard
    check_encoder(spec, shard.size)
    if config.load_format == "dummy":
        dtype = compute_dtype(config, info, place.device)
        encoder = _build(EncoderSlice(spec, shard), RandomWeights(config.seed), dtype, placement)
    else:
        with open_checkpoint(info.path) as checkpoint:
            main = None if form else checkpoint.main_dtype()
            dtype = compute_dtype(config, info, place.device, main)
            stored = StoredWeights(checkpoint, encoder_targets(spec), form, HEADS)
            mine = slice_of(spec, shard, stored)
            encoder = _build(mine, stored, dtype, placement, None if form is None else PACKED_AHEAD)
    logger.info(
        "%s, %.1f M parameters%s in %s: loaded in %.2f s",
        info.architecture,
        sum(prod(target.shape) for target in encoder_targets(spec)) / 1e6,
        "" if form is None else f" quantized by {form.name}",
        place.quantization or str(dtype).removeprefix("torch."),
        time.perf_counter() - started,
    )
    return encoder


def encoder_spec(
    family: Callable[[HF], EncoderSpec], info: ModelInfo, max_model_len: int
) -> EncoderSpec:
    """The spec of an encoder for texts of up to ``max_model_len`` tokens. Raises ``ModelError`` if
    config.json has none that is supported."""
    try:
        spec = family(info.hf)
    except ModelError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"{info.path / 'config.json'} cannot be read as {info.architecture}: "
            f"{type(error).__name__}: {error}"
        ) from error
    embedding = spec.embedding
    room = embedding.num_positions - embedding.first_position
    if embedding.num_positions and max_model_len > room:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the model has embeddings for {room} positions; "
            "lower it to that or less"
        )
    return spec


def slice_of(spec: EncoderSpec, shard: Shard, stored: StoredWeights) -> EncoderSlice:
    """The part of an encoder that a rank has. Columns that are stored together stay together.
    Raises ``ConfigError`` if there are too few of them."""
    if shard.size == 1:
        return EncoderSlice(spec)
    downs = (one for one in encoder_targets(spec) if one.name.endswith(".down"))
    unit = lcm(*map(stored.column_unit, downs))
    check_encoder(spec, shard.size, unit)
    return EncoderSlice(spec, shard, unit)


def _build(
    mine: EncoderSlice,
    source: WeightSource,
    dtype: torch.dtype,
    placement: Placement,
    most_ahead: int | None = None,
) -> NativeEncoder:
    with Weights(mine.targets(), source, dtype, most_ahead=most_ahead) as weights:
        return EncoderAssembly(mine, weights, placement).encoder()

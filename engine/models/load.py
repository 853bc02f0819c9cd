"""Loads a model directory: natively if its family is supported, otherwise with transformers."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import replace
from math import lcm, prod

import torch

from engine.config.model import ModelConfig, ModelInfo
from engine.config.pooling import is_bidirectional
from engine.errors import ConfigError, ModelError
from engine.layers.linear import check_quantization, is_cpu
from engine.models.assemble import Placement, assemble, compute_dtype
from engine.models.checkpoint import Checkpoint
from engine.models.decoder import NativeDecoder
from engine.models.encoder_families import encoder_family
from engine.models.encoder_load import EncoderPlace, load_encoder
from engine.models.families import FAMILIES
from engine.models.hf_config import NotNative
from engine.models.kv_scales import kv_scales
from engine.models.mamba_families import MAMBA_FAMILIES
from engine.models.model import Model
from engine.models.opening import open_checkpoint
from engine.models.quant import GENERAL_FORMATS, format_of
from engine.models.quant.fields import Format
from engine.models.quant.modules import is_quantized
from engine.models.seeing_families import SEEING_FAMILIES
from engine.models.sharding import DecoderSlice, Shard, check_size
from engine.models.spec import DecoderSpec
from engine.models.stages import Pipeline, Stage
from engine.models.targets import Target, targets
from engine.models.weights import (
    HEAD,
    PACKED_AHEAD,
    UNREAD,
    RandomWeights,
    StoredWeights,
    Weights,
    WeightSource,
    is_head,
)
from engine.parallel.collectives import Alone, Collectives

logger = logging.getLogger("engine.models")

GENERATORS = ("ForCausalLM", "ForConditionalGeneration")
PACKED_BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.5}
"""Bytes of a number, without scales, in matrices of layers that are quantised while they are read.
"""
UNREAD_OR_SCORE = re.compile(rf"{UNREAD.pattern}|^score\.(weight|bias)$")
"""Tensors that decoders with a classifier do not use: ``engine.models.pooling`` reads it."""


def load_model(  # noqa: PLR0913
    config: ModelConfig,
    info: ModelInfo,
    *,
    device: str,
    max_model_len: int,
    takes_adapters: bool = False,
    pools: bool = False,
    collectives: Collectives | None = None,
    pipeline: Pipeline | None = None,
) -> Model:
    """Load the model of a directory. Raises ``ModelError`` if it cannot be served.

    device: "cpu", "cuda" or "cuda:N". max_model_len: length of the longest sequence, in tokens.
    takes_adapters: requests may use LoRA adapters, for which only native decoders have layers.
    pools: the model needs no output layer. collectives: of the ranks that compute the model
    together, of which each loads its part; pipeline: the stage to load; ``ConfigError`` if the
    model cannot be divided in this way.
    """
    ranks, pipeline = collectives or Alone(), pipeline or Pipeline()
    if pipeline.count > 1:
        spec_of_stages(info, pipeline.count, pools=pools)
    form = format_of(info)
    quantization = quantization_of(config, info, form, device)
    family = encoder_family(info.architecture)
    if family is not None:
        place = EncoderPlace(device, quantization, max_model_len, takes_adapters, ranks)
        return load_encoder(family, config, info, form, place)
    spec = native_spec(info, pools=pools)
    check_form(info, form, is_native=spec is not None)
    if spec is not None:
        # On a CPU, products and attention always sum in the same order.
        invariant = config.batch_invariant is True and not is_cpu(torch.device(device))
        if invariant:
            check_invariant(spec, info, form, quantization or config.output_layer_quantization)
        placement = Placement(
            device=device,
            quantization=quantization,
            max_model_len=max_model_len,
            batch_invariant=invariant,
            output_layer_quantization=config.output_layer_quantization,
            quantize_activations=config.quantize_activations,
            takes_adapters=takes_adapters,
            ranks=ranks,
            pipeline=pipeline,
        )
        return load_decoder(spec, config, info, form, placement)
    if ranks.size > 1:
        raise ConfigError(
            f"tensor_parallel_size is {ranks.size}, but {info.architecture or info.model_type} is "
            "computed by transformers, and only native families can be divided; docs/models.md "
            "lists them, and tensor_parallel_size=1 serves this one"
        )
    if takes_adapters:
        raise ConfigError(
            f"enable_lora needs a native family, and {info.architecture or info.model_type} is "
            "computed by transformers: merge the adapter into the model, or leave enable_lora out"
        )
    check_general_invariance(config, info, device)
    # Imported here, because native families do not need transformers.
    from engine.models.general import load_general

    if quantization is None:  # also if the stored weights have the requested format
        config = replace(config, quantization=None)
    return load_general(config, info, device=device, max_model_len=max_model_len)


def spec_of_stages(info: ModelInfo, count: int, *, pools: bool) -> DecoderSpec:
    """The spec of a model that ``count`` stages compute. Raises ``ConfigError`` if they cannot."""
    is_encoder = encoder_family(info.architecture) is not None
    spec = None if is_encoder else native_spec(info, pools=pools)
    if spec is None:
        raise ConfigError(
            f"pipeline_parallel_size is {count}, but {info.architecture or info.model_type} is "
            f"{'an encoder' if is_encoder else 'computed by transformers'}, and only native "
            "decoders can be divided into stages; docs/models.md lists them, and "
            "pipeline_parallel_size=1 serves this one"
        )
    return spec


def check_form(info: ModelInfo, form: Format | None, *, is_native: bool) -> None:
    """Raise ``ModelError`` if the format of the weights is not supported for this model."""
    if form is None or not is_native or form.name not in GENERAL_FORMATS:
        return
    raise ModelError(
        f"{info.path} has weights quantized by {form.name!r}, which only general families "
        f"support, and {info.architecture or info.model_type} is not one; use the original model"
    )


def check_general_invariance(config: ModelConfig, info: ModelInfo, device: str) -> None:
    """Raise ``ConfigError`` if batch invariance was requested for a model computed by transformers,
    which does not have it. On a CPU, only log this if it was not requested."""
    name = info.architecture or info.model_type
    if config.batch_invariant:
        raise ConfigError(
            f"batch_invariant=True needs a native family, and {name} is computed by transformers, "
            "whose products depend on the number of rows; leave batch_invariant out"
        )
    if config.batch_invariant is None and is_cpu(torch.device(device)):
        logger.info(
            "logits of a request, and so its tokens, may depend on the batch: %s is computed by "
            "transformers, whose products depend on the number of rows",
            name,
        )


def check_invariant(
    spec: DecoderSpec, info: ModelInfo, form: Format | None, quantization: str | None
) -> None:
    """Raise ``ConfigError`` unless this model can be computed batch-invariantly on a GPU."""
    if form is not None or quantization is not None:
        method = quantization if form is None else form.name
        raise ConfigError(
            "batch_invariant=True on a GPU needs weights that are not quantized, and these are "
            f"quantized by {method!r}, whose products depend on the number of rows; use another "
            "model or device='cpu'"
        )
    if spec.moe is not None:
        raise ConfigError(
            "batch_invariant=True on a GPU needs a model without experts, and "
            f"{info.architecture} has experts, whose products depend on the number of rows; use "
            "device='cpu'"
        )


def quantization_of(
    config: ModelConfig, info: ModelInfo, form: Format | None, device: str
) -> str | None:
    """The format to which weights are quantised while they are loaded, if any. Raises
    ``ConfigError`` unless the requested format fits the device and ``form``, the format of stored
    weights."""
    requested = config.quantization
    if form is None:
        check_quantization(requested, torch.device(device))
        return requested
    stored = f"{info.path} has weights quantized by {form.name!r}"
    if config.load_format == "dummy":
        raise ConfigError(
            f'{stored}, which load_format="dummy" cannot make up; use a config.json without '
            "quantization_config"
        )
    if requested in (None, form.name):
        return None
    if requested == "int8" and is_cpu(torch.device(device)):
        return requested
    raise ConfigError(quantized_again(stored, requested))


def quantized_again(stored: str, requested: str) -> str:
    """The error for quantised weights and a ``quantization`` that does not apply to them."""
    return (
        f"{stored}, and quantization={requested!r} would quantize them again; leave "
        "quantization out"
    )


def check_not_quantized_again(config: ModelConfig, checkpoint: Checkpoint, device: str) -> None:
    """Raise ``ConfigError`` if the weights of a GGUF file are quantised and ``quantization`` is
    given. Only int8 is allowed, on a CPU, which makes 8 bits of any weights."""
    requested, types = config.quantization, checkpoint.quantized_types
    if requested is None or not types:
        return
    if requested != "int8" or not is_cpu(torch.device(device)):
        stored = f"{checkpoint.root} has weights of type {', '.join(types)}"
        raise ConfigError(quantized_again(stored, requested))


def native_spec(info: ModelInfo, *, pools: bool = False) -> DecoderSpec | None:
    """The spec for the native decoder; ``None`` if it does not support this model. ``pools``: the
    model needs no output layer."""
    name = of_text(info.architecture) if pools else info.architecture
    family = FAMILIES.get(name) or MAMBA_FAMILIES.get(name) or SEEING_FAMILIES.get(name)
    if info.hf.get("use_bidirectional_attention") and not pools:
        raise ModelError(
            "config.json sets use_bidirectional_attention, so the model is an encoder and cannot "
            'generate text; with runner="pooling" it returns embeddings'
        )
    reason = f"{info.architecture or info.model_type} is not a native family"
    if family is not None:
        try:
            spec = family(info.hf)
            spec = replace(spec, is_causal=not (pools and is_bidirectional(info)))
            return spec if name == info.architecture else without_output_layer(spec)
        except NotNative as error:
            reason = str(error)
        except ModelError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ModelError(
                f"{info.path / 'config.json'} cannot be read as {info.architecture}: "
                f"{type(error).__name__}: {error}"
            ) from error
    logger.info("%s: using transformers' module with paged attention", reason)
    return None


def of_text(architecture: str) -> str:
    """The architecture that generates text from the layers of this one, which may lack an output
    layer."""
    for ending in ("ForSequenceClassification", "ForTokenClassification", "Model"):
        if architecture.endswith(ending):
            return f"{architecture.removesuffix(ending).removesuffix('Text')}ForCausalLM"
    return architecture


def without_output_layer(spec: DecoderSpec) -> DecoderSpec:
    """The spec of a decoder whose checkpoint has no output layer, and whose tensors may be stored
    without the prefix that the whole model gives them."""
    bare = tuple(root.rpartition(".")[0] for root in spec.names.roots)
    names = replace(spec.names, roots=tuple(dict.fromkeys((*spec.names.roots, *bare))))
    return replace(spec, tied=True, names=names)


def load_decoder(
    spec: DecoderSpec,
    config: ModelConfig,
    info: ModelInfo,
    form: Format | None,
    placement: Placement,
) -> NativeDecoder:
    """Load a native decoder. form: the format of quantised weights, ``None`` for plain ones."""
    started, shard = time.perf_counter(), placement.shard
    check_size(spec, shard.size)
    if config.load_format == "dummy":
        dtype = compute_dtype(config, info, placement.device)
        made_up = RandomWeights(config.seed, 0.0 if spec.norm.add_one else 1.0)
        stage = placement.pipeline.stage(spec, sizes_in_memory(dtype, placement))
        mine = DecoderSlice(spec, shard, only=stage)
        decoder = _build(mine, made_up, dtype, placement)
    else:
        with open_checkpoint(info.path) as checkpoint:
            check_not_quantized_again(config, checkpoint, placement.device)
            spec = untie_if_different(spec, checkpoint)
            main = None if form else checkpoint.main_dtype()
            dtype = compute_dtype(config, info, placement.device, main)
            unread = UNREAD if info.architecture.endswith(GENERATORS) else UNREAD_OR_SCORE
            stored = StoredWeights(checkpoint, targets(spec), form, unread)
            stage = placement.pipeline.stage(spec, sizes_in_memory(dtype, placement, stored))
            mine = replace(slice_of(spec, shard, stored), only=stage)
            ahead = PACKED_AHEAD if form is not None else None
            decoder = _build(mine, stored, dtype, placement, ahead)
            scales = kv_scales(checkpoint, spec, mine.kv_heads)
            decoder.kv_scales = [scales[index] for index in stage.layers]
    here = [prod(one.shape) for one in targets(spec) if stage.has(spec, one.name)]
    logger.info(
        "%s%s, %.1f M parameters%s in %s: loaded in %.2f s",
        layers_of(stage, spec),
        info.architecture,
        sum(here) / 1e6,
        "" if form is None else f" quantized by {form.name}",
        placement.quantization or str(dtype).removeprefix("torch."),
        time.perf_counter() - started,
    )
    return decoder


def sizes_in_memory(
    dtype: torch.dtype, placement: Placement, stored: StoredWeights | None = None
) -> Callable[[Target], float]:
    """Returns a function that estimates the bytes of a target in memory."""
    narrow = PACKED_BYTES.get(placement.quantization or "")

    def num_bytes(target: Target) -> float:
        if narrow is not None and target.name[0].isdigit() and len(target.shape) == 2:
            return narrow * prod(target.shape)
        if stored is None:
            return prod(target.shape) * dtype.itemsize
        return stored.num_bytes(target, dtype)

    return num_bytes


def layers_of(stage: Stage, spec: DecoderSpec) -> str:
    """Which layers a stage has, for log lines; "" for all."""
    if stage.count == 1:
        return ""
    return f"layers {stage.layers[0]} to {stage.layers[-1]} of {len(spec.layers)} of "


def slice_of(spec: DecoderSpec, shard: Shard, stored: StoredWeights) -> DecoderSlice:
    """The part of a decoder that a rank has. Columns that are stored together stay together, where
    parts may be of different sizes. Raises ``ConfigError`` if there are too few of them."""
    mine = DecoderSlice(spec, shard)
    if shard.size == 1:
        return mine
    units: dict[str, int] = {}
    for target in targets(spec):
        dimension = mine.dimension_of(target.name)
        if dimension is not None:
            units[dimension] = lcm(units.get(dimension, 1), stored.column_unit(target))
    check_size(spec, shard.size, units)
    return replace(mine, units=units)


def _build(
    mine: DecoderSlice,
    source: WeightSource,
    dtype: torch.dtype,
    placement: Placement,
    most_ahead: int | None = None,
) -> NativeDecoder:
    with Weights(mine.targets(), source, dtype, most_ahead=most_ahead) as weights:
        decoder = assemble(mine, weights, placement)
        decoder.weight_dtype = dtype
        return decoder


def untie_if_different(spec: DecoderSpec, checkpoint: Checkpoint) -> DecoderSpec:
    """The spec, untied if the checkpoint has an output layer that differs from the embedding."""
    stored, ways = checkpoint.tensors, next(targets(spec)).ways  # of the embedding
    if spec.tied and any(is_quantized(head, stored) for head in spec.names.heads):
        return replace(spec, tied=False)
    table = next((way[0].name for way in ways if way[0].name in stored), HEAD)
    head = next((f"{name}.weight" for name in spec.names.heads if f"{name}.weight" in stored), "")
    if not (spec.tied and head and not is_head(table)) or checkpoint.same(table, head):
        return spec
    logger.warning("%s: embedding and output layer differ, so they are not tied", checkpoint.root)
    return replace(spec, tied=False)

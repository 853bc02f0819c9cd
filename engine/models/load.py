"""From a model directory to a model: natively if its family is known, else through transformers."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from math import prod

import torch

from engine.config.model import ModelConfig, ModelInfo
from engine.errors import ConfigError, ModelError
from engine.layers.linear import check_quantization, is_cpu
from engine.models.assemble import Placement, assemble, compute_dtype
from engine.models.checkpoint import Checkpoint
from engine.models.decoder import Decoder
from engine.models.families import FAMILIES
from engine.models.hf_config import NotNative
from engine.models.kv_scales import kv_scales
from engine.models.model import Model
from engine.models.quant import format_of
from engine.models.quant.fields import Format
from engine.models.quant.modules import is_quantized
from engine.models.spec import DecoderSpec
from engine.models.targets import targets
from engine.models.weights import RandomWeights, StoredWeights, Weights, WeightSource

logger = logging.getLogger("engine.models")

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_model(
    config: ModelConfig,
    info: ModelInfo,
    *,
    device: str,
    max_model_len: int,
) -> Model:
    """The model of a directory, ready to run. Raises ``ModelError`` if it cannot be served.

    device: "cpu", "cuda" or "cuda:N". max_model_len: longest sequence there will be, in tokens.
    """
    form = format_of(info)
    quantization = quantization_of(config, info, form, device)
    spec = native_spec(info)
    if spec is not None:
        # On a CPU its products and its attention have one order of sums anyway.
        invariant = config.batch_invariant is True and not is_cpu(torch.device(device))
        if invariant:
            check_invariant(spec, info, form, quantization)
        placement = Placement(
            device=device,
            quantization=quantization,
            max_model_len=max_model_len,
            batch_invariant=invariant,
        )
        return load_decoder(spec, config, info, form, placement)
    if form is not None:
        raise ModelError(
            f"{info.path} holds weights quantized by {form.name!r}, read for native families only, "
            f"and {info.architecture or info.model_type} is not one; give the original model"
        )
    say_what_varies(config, info, device)
    # Only here, so that native families never pay for importing transformers.
    from engine.models.general import load_general

    return load_general(config, info, device=device, max_model_len=max_model_len)


def say_what_varies(config: ModelConfig, info: ModelInfo, device: str) -> None:
    """A model that runs through transformers is not batch-invariant: a ``ConfigError`` if that was
    demanded, and a line in the log where it would be the default."""
    name = info.architecture or info.model_type
    if config.batch_invariant:
        raise ConfigError(
            f"batch_invariant=True needs a native family, and {name} runs through transformers, "
            "whose products differ with the number of rows; leave it out"
        )
    if config.batch_invariant is None and is_cpu(torch.device(device)):
        logger.info(
            "logits of a request may differ in their last bits from batch to batch, and a token "
            "with it: %s runs through transformers, whose products differ with the number of rows",
            name,
        )


def check_invariant(
    spec: DecoderSpec, info: ModelInfo, form: Format | None, quantization: str | None
) -> None:
    """Raise ``ConfigError`` unless a GPU has products for this model that are batch-invariant."""
    if form is not None or quantization is not None:
        method = quantization if form is None else form.name
        raise ConfigError(
            f"batch_invariant=True needs plain weights on a GPU, and these are quantized by "
            f"{method!r}: such products depend on the number of rows; give a plain model, or "
            "device='cpu'"
        )
    if spec.moe is not None:
        raise ConfigError(
            f"batch_invariant=True on a GPU is for models without experts, and {info.architecture} "
            "has some, whose products depend on the number of rows; use device='cpu'"
        )


def quantization_of(
    config: ModelConfig, info: ModelInfo, form: Format | None, device: str
) -> str | None:
    """What plain weights are to be quantised to. Raises ``ConfigError`` if they cannot."""
    requested = config.quantization
    if form is None:
        check_quantization(requested, torch.device(device))
        return requested
    stored = f"{info.path} holds weights quantized by {form.name!r}"
    if config.load_format == "dummy":
        raise ConfigError(
            f'{stored}, and load_format="dummy" makes up plain ones; give a config.json without '
            "its quantization_config"
        )
    if requested in (None, form.name):
        return None
    if requested == "int8" and is_cpu(torch.device(device)):
        return requested
    raise ConfigError(
        f"{stored}, quantization={requested!r} would quantize them again; leave it out"
    )


def native_spec(info: ModelInfo) -> DecoderSpec | None:
    """What the native decoder needs to know, ``None`` if it does not compute this model."""
    family = FAMILIES.get(info.architecture)
    reason = f"{info.architecture or info.model_type} is no native family"
    if family is not None:
        try:
            return family(info.hf)
        except NotNative as error:
            reason = str(error)
        except ModelError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ModelError(
                f"{info.path / 'config.json'} cannot be understood as {info.architecture}: "
                f"{type(error).__name__}: {error}"
            ) from error
    logger.info("%s: running transformers' own module with paged attention", reason)
    return None


def load_decoder(
    spec: DecoderSpec,
    config: ModelConfig,
    info: ModelInfo,
    form: Format | None,
    placement: Placement,
) -> Decoder:
    """A native family's decoder. form: how its weights are quantised, if they are."""
    started = time.perf_counter()
    if config.load_format == "dummy":
        dtype = compute_dtype(config, info, placement.device)
        made_up = RandomWeights(config.seed, 0.0 if spec.norm.add_one else 1.0)
        decoder = _build(spec, made_up, dtype, placement)
    else:
        with Checkpoint(info.path) as checkpoint:
            spec = really_tied(spec, checkpoint)
            main = None if form else checkpoint.main_dtype()
            dtype = compute_dtype(config, info, placement.device, main)
            stored = StoredWeights(checkpoint, targets(spec), form)
            decoder = _build(spec, stored, dtype, placement)
            decoder.kv_scales = kv_scales(checkpoint, spec)
    millions = sum(prod(target.shape) for target in targets(spec)) / 1e6
    logger.info(
        "%s, %.1f M parameters%s in %s: loaded in %.2f s",
        info.architecture,
        millions,
        "" if form is None else f" quantized by {form.name}",
        placement.quantization or str(dtype).removeprefix("torch."),
        time.perf_counter() - started,
    )
    return decoder


def _build(
    spec: DecoderSpec, source: WeightSource, dtype: torch.dtype, placement: Placement
) -> Decoder:
    with Weights(targets(spec), source, dtype) as weights:
        decoder = assemble(spec, weights, placement)
        decoder.weight_dtype = dtype
        return decoder


def really_tied(spec: DecoderSpec, checkpoint: Checkpoint) -> DecoderSpec:
    """Some files say tied but hold two tables that differ; then both tables are used."""
    stored = checkpoint.tensors
    if spec.tied and is_quantized(HEAD.removesuffix(".weight"), stored):
        return replace(spec, tied=False)
    if not (spec.tied and TABLE in stored and HEAD in stored) or checkpoint.same(TABLE, HEAD):
        return spec
    logger.warning("%s: embedding and output layer differ, so they are not tied", checkpoint.root)
    return replace(spec, tied=False)

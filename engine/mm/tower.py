"""The part of a model that turns pictures into vectors, computed by transformers' own module."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from engine.config.model import ModelConfig, ModelInfo
from engine.errors import ModelError
from engine.mm.attention import PACKED
from engine.models.general_support import read_hf_config

logger = logging.getLogger("engine.mm")
TEXT_HALVES = ("language_model", "text_model")  # attributes of the model below its output layer
TEXT_TENSORS = (*TEXT_HALVES, "lm_head")  # names of which may be missing
SCALES = ("scale", "scales", "scale_inv", "SCB")  # last words of tensors of quantized modules

Encode = Callable[[dict[str, torch.Tensor]], torch.Tensor]
"""Encodes the arrays of pictures, joined along their first dimension, to vectors
[1 + L, tokens, H]: the first replace embeddings, the others are added to the outputs of the first L
layers."""


@torch.inference_mode()
def load_tower(
    config: ModelConfig, info: ModelInfo, dtype: torch.dtype, device: torch.device
) -> Encode:
    """Load everything of a model but its text half. Raises ``ModelError``."""
    hf: Any = read_hf_config(config, info)
    text = hf.get_text_config(decoder=True)
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None):
        text.layer_types = []
    for part in (hf, text):  # transformers would need the package of the text half's format
        vars(part).pop("quantization_config", None)
    kind: type[PreTrainedModel] = getattr(transformers, info.architecture)
    with _quiet():
        model = _made(kind, config, info, hf, dtype)
        model.set_attn_implementation(PACKED)
    body: Any = model.model
    for name in TEXT_HALVES:
        if hasattr(body, name):
            setattr(body, name, None)
    model.lm_head = None
    model.to(device).eval()
    count = sum(parameter.numel() for parameter in model.parameters())
    logger.info("%s sees: encoder of %.1f M parameters", info.architecture, count / 1e6)

    # Mistral 3 of transformers fails for a single token: its projector drops lengths of 1.
    merged = getattr(hf, "spatial_merge_size", 0)
    least = merged * hf.vision_config.patch_size if merged else 0

    @torch.inference_mode()
    def encode(arrays: dict[str, torch.Tensor]) -> torch.Tensor:
        given = {
            name: array.to(device, dtype if array.is_floating_point() else None)
            for name, array in arrays.items()
        }
        if least and given["image_sizes"].tolist() == [[least, least]]:
            twice = {name: torch.cat([array, array]) for name, array in given.items()}
            both: Any = body.get_image_features(**twice, return_dict=True)
            return torch.stack([both.pooler_output[0]])
        found: Any = body.get_image_features(**given, return_dict=True)
        layers = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
        return torch.stack(
            [torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]) for parts in layers]
        )

    return encode


def _made(
    kind: type[PreTrainedModel], config: ModelConfig, info: ModelInfo, hf: Any, dtype: torch.dtype
) -> Any:
    """The model without layers in its text half, with the weights of the directory."""
    if config.load_format == "dummy":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            return kind(hf).to(dtype)
    model, report = kind.from_pretrained(
        info.path,
        config=hf,
        dtype=dtype,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are in the report
    )
    names = [name for name in model.state_dict() if not any(part in name for part in TEXT_TENSORS)]
    modules = {name.rpartition(".")[0] for name in names}
    scales = [name for name in report["unexpected_keys"] if name.endswith(SCALES)]
    if quantized := sorted(name for name in scales if name.rpartition(".")[0] in modules):
        raise ModelError(
            f"the encoder of pictures in {info.path} is quantized ({quantized[0]}), which is not "
            "supported: use a model whose text half alone is quantized, or the original with "
            'quantization="int8"; limit_mm_per_prompt={"image": 0} leaves the encoder out'
        )
    needed = [*report["missing_keys"], *map(_shapes, report["mismatched_keys"])]
    missing = sorted(key for key in needed if not any(part in key for part in TEXT_TENSORS))
    if missing:
        raise ModelError(
            f"{info.path} lacks weights of the encoder of pictures: {', '.join(missing[:5])}"
            f"{f' and {len(missing) - 5} more' if len(missing) > 5 else ''}"
        )
    return model


def _shapes(mismatched: tuple[str, torch.Size, torch.Size]) -> str:
    name, found, needed = mismatched
    return f"{name} of {list(needed)} (its shape is {list(found)})"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars, and without warnings of the text half's tensors, which are unused."""
    shown, level = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if shown:
            hf_logging.enable_progress_bar()

"""The natively supported text halves of models of images and text.

config.json of such a model has the text half's under ``text_config``, which may leave out the
defaults of its family's configuration class in transformers. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.models.families import gemma3, llama, mistral, qwen2, qwen3
from engine.models.hf_config import HF, NotNative, with_axes
from engine.models.spec import DecoderSpec

SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
}


def qwen2_5_vl(hf: HF) -> DecoderSpec:
    return qwen2(with_axes(hf, [16, 24, 24], are_interleaved=False))


def qwen3_vl(hf: HF) -> DecoderSpec:
    return qwen3(with_axes(hf, [24, 20, 20], are_interleaved=True))


QWEN2_5_VL = {
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
QWEN3_VL = {
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 128_000,
    "rope_theta": 5e5,
}
GEMMA3 = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "rms_norm_eps": 1e-6,
}
TEXT_HALVES: dict[str, tuple[Callable[[HF], DecoderSpec], HF]] = {
    "gemma3_text": (gemma3, GEMMA3),
    "llama": (llama, SIZES),
    "mistral": (mistral, {**SIZES, "intermediate_size": 14_336}),
    "qwen2": (qwen2, {**SIZES, "vocab_size": 151_936, "intermediate_size": 22_016}),
    # The first name is that of older config.json, which have the sizes at the top.
    "qwen2_5_vl": (qwen2_5_vl, QWEN2_5_VL),
    "qwen2_5_vl_text": (qwen2_5_vl, QWEN2_5_VL),
    "qwen3_vl_text": (qwen3_vl, {**SIZES, **QWEN3_VL}),
}
"""Text halves by ``model_type``, and the sizes that ``text_config`` may leave out."""
# Checkpoints of transformers 5, of older versions, of Idefics3 and SmolVLM, and of Qwen2.5-VL.
ROOTS = ("model.language_model", "language_model.model", "model.text_model", "model")
OUTPUT_LAYERS = ("lm_head", "language_model.lm_head")
# Modules of the encoder of pictures, among those of a checkpoint.
ENCODER_MODULES = frozenset(
    {
        *("vision_tower", "vision_model", "visual", "multi_modal_projector", "connector"),
        *("embed_vision", "image_newline"),
    }
)


def seeing(hf: HF) -> DecoderSpec:
    """The spec of the text half. Raises ``NotNative`` if its family is not in ``TEXT_HALVES``."""
    kind = str(hf.get("model_type"))
    if kind not in TEXT_HALVES:
        raise NotNative(f"the text half is of the family {kind!r}, which is not a native one here")
    family, missing = TEXT_HALVES[kind]
    spec = family({**missing, **hf})
    return replace(spec, names=replace(spec.names, roots=ROOTS, heads=OUTPUT_LAYERS))


SEEING_FAMILIES: dict[str, Callable[[HF], DecoderSpec]] = {
    "Gemma3ForConditionalGeneration": seeing,
    "Idefics3ForConditionalGeneration": seeing,
    "LlavaForConditionalGeneration": seeing,
    "LlavaOnevisionForConditionalGeneration": seeing,
    "Mistral3ForConditionalGeneration": seeing,
    "Qwen2_5_VLForConditionalGeneration": seeing,
    "Qwen3VLForConditionalGeneration": seeing,
    "SmolVLMForConditionalGeneration": seeing,
}

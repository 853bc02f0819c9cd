"""The natively supported text halves of models of images and text.

config.json of such a model has the text half's under ``text_config``, which may leave out the
defaults of its family's configuration class in transformers. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.models.families import llama, mistral, qwen2
from engine.models.hf_config import HF, NotNative
from engine.models.spec import DecoderSpec

SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
}
TEXT_HALVES: dict[str, tuple[Callable[[HF], DecoderSpec], HF]] = {
    "llama": (llama, SIZES),
    "mistral": (mistral, {**SIZES, "intermediate_size": 14_336}),
    "qwen2": (qwen2, {**SIZES, "vocab_size": 151_936, "intermediate_size": 22_016}),
}
"""Text halves by ``model_type``, and the sizes that ``text_config`` may leave out."""
# Checkpoints of transformers 5, of older versions, and of Idefics3 and SmolVLM.
ROOTS = ("model.language_model", "language_model.model", "model.text_model")
OUTPUT_LAYERS = ("lm_head", "language_model.lm_head")


def seeing(hf: HF) -> DecoderSpec:
    """The spec of the text half. Raises ``NotNative`` if its family is not in ``TEXT_HALVES``."""
    kind = str(hf.get("model_type"))
    if kind not in TEXT_HALVES:
        raise NotNative(f"the text half is of the family {kind!r}, which is not a native one here")
    family, missing = TEXT_HALVES[kind]
    spec = family({**missing, **hf})
    return replace(spec, names=replace(spec.names, roots=ROOTS, heads=OUTPUT_LAYERS))


SEEING_FAMILIES: dict[str, Callable[[HF], DecoderSpec]] = {
    "Idefics3ForConditionalGeneration": seeing,
    "LlavaForConditionalGeneration": seeing,
    "LlavaOnevisionForConditionalGeneration": seeing,
    "SmolVLMForConditionalGeneration": seeing,
}

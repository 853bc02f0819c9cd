"""Models of images and text with random weights, whose language half is `mid` of `shapes.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from shapes import SHAPES
from tokenizers import AddedToken, Tokenizer

from engine.assets import BOX_MODEL

MAX_LEN = 16384
IMAGE = "<image>"
VISION: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def _llava(image: int) -> tuple[Any, Any, dict[str, Any]]:
    text = SHAPES["mid"].hf_config(MAX_LEN)
    vision = {**VISION, "model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision | {"projection_dim": 512}, image_token_index=image
    )
    sizes = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
    processing = {
        "processor_class": "LlavaProcessor",
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
        "image_token": IMAGE,
    }
    return config, transformers.CLIPImageProcessorPil(**sizes), processing


def _idefics3(image: int) -> tuple[Any, Any, dict[str, Any]]:
    text = SHAPES["mid"].hf_config(MAX_LEN)
    config = transformers.Idefics3Config(
        text_config=text,
        vision_config={**VISION, "image_size": 512, "patch_size": 16},
        image_token_id=image,
        scale_factor=4,
    )
    sizes = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
    processing = {"processor_class": "Idefics3Processor", "image_seq_len": 64}
    return config, transformers.Idefics3ImageProcessorPil(**sizes), processing


SEEING = {"llava-mid": _llava, "idefics3-mid": _idefics3}
SPECIAL = (
    *(IMAGE, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)


def write_seeing(name: str, path: Path) -> None:
    """Write a model directory in bfloat16, with the tokenizer of the model in the box."""
    path.mkdir(parents=True, exist_ok=True)
    backend = Tokenizer.from_file(str(BOX_MODEL / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    image = backend.token_to_id(IMAGE)
    config, processor, processing = SEEING[name](image)
    torch.manual_seed(1)
    kind = getattr(transformers, config.model_type.capitalize() + "ForConditionalGeneration")
    model = kind(config).to(torch.bfloat16)
    model.save_pretrained(path)
    backend.save(str(path / "tokenizer.json"))
    settings = json.loads((BOX_MODEL / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    settings.setdefault("pad_token", settings.get("eos_token"))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    processor.save_pretrained(path)
    stored = path / "processor_config.json"
    found = json.loads(stored.read_text()) if stored.is_file() else {}
    stored.write_text(json.dumps(found | processing))

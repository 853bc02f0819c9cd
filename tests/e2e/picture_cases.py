"""Prompts with pictures, and transformers' answers to them, computed once in a session."""

from __future__ import annotations

import base64
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from e2e.references import Tally, compare_one
from e2e.seeing_models import IMAGE, START, make_seeing_model, processor_of, reference
from PIL import Image
from transformers import AutoTokenizer
from transformers.image_utils import load_image

from engine.pictures.processing import ImageProcessor

READ = ("input_ids", "attention_mask", "pixel_values", "pixel_attention_mask", "image_sizes")
NUM_NEW = 8


class Prompt(NamedTuple):
    """A text with ``<image>`` for each picture, and the pictures: PIL images or files."""

    text: str
    pictures: Sequence[Image.Image | bytes] = ()


class Answer(NamedTuple):
    """transformers' answer: the prompt's token ids, new tokens, and the margin of each choice."""

    prompt: list[int]
    tokens: list[int]
    margins: list[float]


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """A random picture."""
    dice = np.random.default_rng([width, height, seed])
    pixels = Image.fromarray(dice.integers(0, 256, (height, width, 3), dtype=np.uint8))
    if mode in ("RGBA", "LA"):
        pixels.putalpha(Image.fromarray(dice.integers(0, 256, (height, width), dtype=np.uint8)))
    if mode == "I;16":
        return Image.fromarray(dice.integers(0, 1 << 16, (height, width), dtype=np.uint16))
    return pixels.convert(mode)


def as_file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of a picture file."""
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def as_read(value: Image.Image | bytes) -> Image.Image:
    """A picture as transformers loads it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of transparent palettes
        if isinstance(value, bytes):
            return load_image(base64.b64encode(value).decode())
        return load_image(value)


class Seen:
    """A model that sees, and transformers' answers of it."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self._answers: dict[Any, Answer] = {}

    @property
    def mark(self) -> str:
        """The text that a picture has in a prompt; some models need tokens around it."""
        if self.name.startswith("gemma3"):
            return START
        return f"<fake_token_around_image>{IMAGE}<end_of_utterance>" if self._is_qwen else IMAGE

    @property
    def least_budget(self) -> int:
        """Tokens of a step with which each picture can be computed."""
        return 17 if self.name.startswith("gemma3") else 1

    @property
    def has_window(self) -> bool:
        """Whether all layers have windows, so that no request needs more blocks as it goes on."""
        return self.name.startswith("llava-layers")

    def is_computed_by_transformers(self, prompt: Prompt) -> bool:
        """False for Mistral 3 and one picture of one token, for which transformers fails."""
        if not self.name.startswith("mistral3") or len(prompt.pictures) != 1:
            return True
        tokenizer = AutoTokenizer.from_pretrained(self.path)
        ids = self.inputs(prompt)["input_ids"][0].tolist()
        return ids.count(tokenizer.convert_tokens_to_ids(IMAGE)) > 1

    def given(self, prompt: Prompt) -> dict[str, Any]:
        """The prompt for the engine."""
        data = {"image": list(prompt.pictures)}
        return {"prompt": self._text(prompt), "multi_modal_data": data}

    def inputs(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        """The prompt for transformers' model."""
        images = [as_read(each) for each in prompt.pictures] or None
        read = [*READ, *(("image_grid_thw", "mm_token_type_ids") if self._is_qwen else ())]
        if self.name.startswith("gemma3"):
            read.append("token_type_ids")
        found = processor_of(self.path, self.name)(
            images=images, text=self._text(prompt), return_tensors="pt"
        )
        return {key: found[key] for key in read if key in found}

    def answer(self, prompt: Prompt, num_new: int = NUM_NEW, **options: Any) -> Answer:
        """transformers' answer. options: more of ``generate``."""
        return self.answer_of(None, prompt, num_new, **options)

    def answer_of(
        self,
        change: Callable[[Any], Any] | None,
        prompt: Prompt,
        num_new: int = NUM_NEW,
        **options: Any,
    ) -> Answer:
        """A changed model's answer. change: makes that model of the plain one."""
        contents = [
            each
            if isinstance(each, bytes)
            else (each.size, each.mode, str(each.info), each.tobytes())
            for each in prompt.pictures
        ]
        key = (change, prompt.text, tuple(contents), num_new, tuple(sorted(options.items())))
        if key not in self._answers:
            model = reference(self.path)
            model = model if change is None else change(model)
            self._answers[key] = answered(model, self.inputs(prompt), num_new, **options)
        return self._answers[key]

    def check(
        self, output: Any, prompt: Prompt, tally: Tally, *, index: int = 0, **options: Any
    ) -> None:
        """An output of the engine has transformers' tokens, up to a tie."""
        answer = self.answer(prompt, len(output.outputs[index].token_ids), **options)
        assert output.prompt_token_ids == answer.prompt, prompt.text
        compare_one(answer.tokens, answer.margins, output.outputs[index].token_ids, tally)

    @property
    def _is_qwen(self) -> bool:
        return self.name.startswith("qwen")

    def _text(self, prompt: Prompt) -> str:
        return prompt.text.replace(IMAGE, self.mark)


@torch.inference_mode()
def answered(model: Any, inputs: dict[str, torch.Tensor], num_new: int, **options: Any) -> Answer:
    """transformers' likeliest tokens after the inputs."""
    out = model.generate(
        **inputs,
        **{"eos_token_id": None, **options},
        max_new_tokens=num_new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    margins = []
    for logits in out.logits:
        best = logits[0].float().topk(2).values
        margins.append(float((best[0] - best[1]) / logits[0].abs().max()))
    ids = inputs["input_ids"][0].tolist()
    return Answer(ids, out.sequences[0, len(ids) :].tolist(), margins)


def maker(root: Path) -> Callable[[str], Seen]:
    """Makes the models of ``seeing_models.CASES`` once."""
    return cache(lambda name: Seen(name, make_seeing_model(root / name, name)))


def picture_without_pixels(monkeypatch: pytest.MonkeyPatch) -> Image.Image:
    """A picture that is prepared wrongly from now on, so that it cannot be encoded."""
    make, bad = ImageProcessor.pixels, picture(31, 31)

    def pixels(self: Any, image: Image.Image) -> Any:
        found = make(self, image)
        if image.size != bad.size:
            return found
        (name, array) = next(iter(found.items()))
        return {name: type(array)(array.dtype, [1, 3, 1, 5], array.data[: 15 * 4])}

    monkeypatch.setattr(ImageProcessor, "pixels", pixels)
    return bad

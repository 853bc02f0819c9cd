"""How many tokens a picture takes, from its size alone, against transformers' image processors."""

from __future__ import annotations

from math import ceil, exp, log
from random import Random
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image
from transformers import image_processing_backends
from transformers.models.idefics3 import processing_idefics3
from transformers.models.pixtral import image_processing_pil_pixtral as pixtral
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as qwen2_vl

from engine.errors import RequestError
from engine.pictures.families import Idefics3, Llava, LlavaOnevision, Pixtral, QwenVL

NUM_SIZES = 150
SETTINGS = [
    {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}},
    {"size": {"longest_edge": 100}, "max_image_size": {"longest_edge": 24}},
    {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 128}},
    {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}, "do_resize": False},
    {"max_image_size": {"longest_edge": 32}, "do_image_splitting": False},
]
FRAMES = ("<fake_token_around_image>", "<image>", "<global-img>")


def sizes(seed: int) -> list[tuple[int, int]]:
    print(f"seed {seed}")
    dice = Random(seed)
    fixed = [(1, 1), (4000, 3000), (1, 40), (40, 1), (2, 3), (128, 128), (129, 128), (127, 33)]
    drawn = [
        tuple(ceil(exp(dice.uniform(0, log(most)))) for most in (4000, 3000))
        for _ in range(NUM_SIZES)
    ]
    return [*fixed, *drawn]  # type: ignore[list-item]


def unresized(self: Any, image: np.ndarray, size: Any, **options: Any) -> np.ndarray:
    """An array of the size after resizing, without its pixels."""
    return np.broadcast_to(image[:, :1, :1], (len(image), size.height, size.width))


@pytest.mark.parametrize("settings", SETTINGS, ids=range(len(SETTINGS)))
@pytest.mark.parametrize("name", ["Idefics3", "SmolVLM"])
def test_tiles(name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_processing_backends.PilBackend, "resize", unresized)
    processor = getattr(transformers, f"{name}ImageProcessorPil")(**settings, do_normalize=False)
    hf = {"vision_config": {"patch_size": 8}, "scale_factor": 2}
    family = Idefics3(hf, processor.to_dict())
    most = 0
    for width, height in sizes(len(settings)):
        if not settings.get("do_resize", True) and width * height > 500_000:
            continue
        image = Image.new("RGB", (width, height))
        found = processor(images=[image], return_row_col_info=True, return_tensors="np")
        wanted = text_of(found["rows"][0][0], found["cols"][0][0], found["pixel_values"].shape)
        layout = family.layout(width, height)
        text = "".join("<image>" * part if isinstance(part, int) else part for part in layout)
        assert text == wanted, (width, height)
        most = max(most, text.rindex("<image>") - text.index("<image>"))
    if settings.get("do_resize", True):
        assert family.longest * len("<image>") * 2 > most


def text_of(rows: int, columns: int, shape: tuple[int, ...]) -> str:
    """The text in place of the image token, by transformers."""
    processor = processing_idefics3.Idefics3Processor.__new__(processing_idefics3.Idefics3Processor)
    processor.fake_image_token, processor.image_token, processor.global_image_tag = FRAMES
    processor.image_seq_len = (shape[-1] // 8) * (shape[-2] // 8) // 4
    info = {"rows": [[rows]], "cols": [[columns]]}
    return str(processor.replace_image_token(info, 0))


@pytest.mark.parametrize(
    "settings",
    [
        {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 40}},
        {"size": {"shortest_edge": 32}, "crop_size": {"height": 48, "width": 48}, "do_pad": True},
        {"size": {"height": 24, "width": 40}, "do_center_crop": False},
    ],
    ids=range(3),
)
@pytest.mark.parametrize("strategy", ["default", "full"])
def test_resized_and_cropped(
    settings: dict[str, Any], strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_processing_backends.PilBackend, "resize", resized_by_rule)
    processor = transformers.LlavaImageProcessorPil(**settings, do_normalize=False)
    for kind, additional in (("clip_vision_model", 1), ("siglip_vision_model", 0)):
        vision = {"patch_size": 8, "model_type": kind}
        hf = {"vision_config": vision, "vision_feature_select_strategy": strategy}
        family = Llava(hf, processor.to_dict())
        text = transformers.LlavaProcessor.__new__(transformers.LlavaProcessor)
        text.patch_size, text.num_additional_image_tokens, text.image_token = 8, additional, "i"
        text.vision_feature_select_strategy = strategy
        for width, height in sizes(3)[:40]:
            if max(width, height) > 60 * min(width, height):
                continue
            image = Image.new("RGB", (width, height))
            pixels = processor(images=[image], return_tensors="np")["pixel_values"]
            wanted = len(text.replace_image_token({"pixel_values": pixels}, 0))
            assert family.layout(width, height) == (wanted,)
            assert family.longest == wanted


def resized_by_rule(self: Any, image: np.ndarray, size: Any, **options: Any) -> np.ndarray:
    if not size.shortest_edge:
        return unresized(self, image, size)
    height, width = image.shape[-2:]
    scale = size.shortest_edge / min(height, width)
    shape = (len(image), ceil(height * scale), ceil(width * scale))
    return np.broadcast_to(image[:, :1, :1], shape)


@pytest.mark.parametrize("most", [1, 2, 9])
def test_tiles_without_their_padding(most: int) -> None:
    grid = [[32 * rows, 32 * columns] for rows in range(1, 7) for columns in range(1, 7)]
    settings = {"size": {"height": 32, "width": 32}, "image_grid_pinpoints": grid}
    ratio = f"anyres_max_{most}"
    hf = {"vision_config": {"patch_size": 8, "image_size": 32}, "vision_aspect_ratio": ratio}
    family = LlavaOnevision(hf, settings)
    text = transformers.LlavaOnevisionProcessor.__new__(transformers.LlavaOnevisionProcessor)
    text.image_processor = transformers.LlavaOnevisionImageProcessorPil(**settings)
    text.num_image_tokens, text.image_token, text.vision_aspect_ratio = 16, "i", ratio
    text.vision_feature_select_strategy = "full"
    pixels = [[np.zeros((3, 32, 32))]]
    for width, height in sizes(4):
        if max(width, height) > 192 * min(width, height):
            with pytest.raises(RequestError, match="too long for this model"):
                family.layout(width, height)
            continue
        found = {"pixel_values": pixels, "image_sizes": [[height, width]], "batch_num_images": [1]}
        wanted = len(text.replace_image_token(found, 0))
        assert family.layout(width, height) == (wanted,), (width, height)
        assert wanted <= family.longest


@pytest.mark.parametrize(
    "size",
    [(56 * 56, 28 * 28 * 1280), (32 * 32, 72 * 72), (1000, 1000), (200_000, 300_000)],
)
def test_proportions_are_kept(size: tuple[int, int]) -> None:
    bounds = {"shortest_edge": size[0], "longest_edge": size[1]}
    processor = transformers.Qwen2VLImageProcessorPil(size=bounds, patch_size=8)
    family = QwenVL({}, processor.to_dict())
    for width, height in sizes(size[0]):
        if max(width, height) > 200 * min(width, height):
            with pytest.raises(RequestError, match="at most 200 times as many"):
                family.layout(width, height)
            continue
        (length,) = family.layout(width, height)
        time, rows, columns = family.grid(width, height)
        assert length == time * rows * columns <= family.longest
        assert 4 * length == processor.get_number_of_image_patches(height, width)
        resized = qwen2_vl.smart_resize(height, width, 16, *size)
        assert resized == (16 * rows, 16 * columns), (width, height)


@pytest.mark.parametrize(("longest", "unit"), [(1540, 28), (64, 16), (100, 24)])
def test_rows_with_ends(longest: int, unit: int) -> None:
    patch = {"height": unit, "width": unit}
    family = Pixtral({}, {"size": {"longest_edge": longest}, "patch_size": patch})
    for width, height in sizes(longest):
        shape = np.broadcast_to(np.zeros(1, np.uint8), (3, height, width))
        most, side = (longest, longest), (unit, unit)
        tall, wide = pixtral.get_resize_output_image_size(shape, most, side, "channels_first")
        if not tall or not wide:
            with pytest.raises(RequestError, match="so long that it has no pixels"):
                family.layout(width, height)
            continue
        tokens = [wide // unit, "[IMG_BREAK]"] * (tall // unit)
        assert [*family.layout(width, height)] == [*tokens[:-1], "[IMG_END]"]
        assert (wide // unit + 1) * (tall // unit) <= family.longest

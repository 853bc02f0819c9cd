"""Settings of image processors, options and contents that are wrong: errors at the start, and
before a template loses a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from engine.config.media import MediaConfig
from engine.config.model import read_model_info
from engine.errors import ConfigError, ModelError, RequestTypeError
from engine.pictures.chat import taken
from engine.pictures.families import family_of
from engine.pictures.processing import ImageProcessor

SETTINGS = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 32},
    "crop_size": {"height": 32, "width": 32},
}
VISION = {"model_type": "clip_vision_model", "patch_size": 8}


def start(path: Path, own: Any = None, settings: Any = (), vision: Any = ()) -> int:
    """What a core reads of a model's directory. Returns the tokens of a picture."""
    config = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "vision_config": {**VISION, **dict(vision)},
        "text_config": {"model_type": "llama"},
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "preprocessor_config.json").write_text(json.dumps({**SETTINGS, **dict(settings)}))
    info = read_model_info(path)
    processor = ImageProcessor(info, own)
    family = family_of(info, processor.settings)
    assert set(processor.kinds) == {"pixel_values"}
    return family.num_embedded(40, 30)


@pytest.mark.parametrize(
    "own",
    [
        {"size": "big"},
        {"size": -5},
        {"size": {"edge": 3}},
        {"image_mean": "a"},
        {"resample": 99},
        {"crop_size": {"height": 10**7, "width": 10**7}},
        {"return_tensors": "pt"},
        {1: 2},
    ],
)
def test_wrong_processing_options_stop_the_start(tmp_path: Path, own: Any) -> None:
    with pytest.raises(ConfigError, match="mm_processor_kwargs") as caught:
        start(tmp_path, own)
    assert str(next(iter(own))) in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "vision"),
    [
        ({"size": "a"}, {}),
        ({"size": None}, {}),
        ({"image_processor_type": "PixtralImageProcessor"}, {}),
        ({}, {"patch_size": 0}),
        ({}, {"patch_size": "x"}),
        ({}, {"patch_size": 99}),
    ],
)
def test_wrong_settings_of_a_directory_stop_the_start(
    tmp_path: Path, settings: Any, vision: Any
) -> None:
    with pytest.raises(ModelError, match="limit_mm_per_prompt") as caught:
        start(tmp_path, None, settings, vision)
    assert str(tmp_path) in str(caught.value)


def test_right_settings_start(tmp_path: Path) -> None:
    assert start(tmp_path) == 16
    assert start(tmp_path, {"crop_size": {"height": 64, "width": 64}}) == 64


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"allowed_media_domains": [1]}, "an entry of allowed_media_domains is 1"),
        ({"mm_processor_cache_gb": float("inf")}, "is inf, must be in 0..1048576"),
    ],
)
def test_wrong_options_are_named(options: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        MediaConfig(**options)


@pytest.mark.parametrize("place", ["content", "part", "unknown part"])
def test_a_picture_in_a_wrong_place_is_not_lost(place: str) -> None:
    picture = Image.new("RGB", (5, 5))
    parts: Any = {
        "content": picture,
        "part": [picture],
        "unknown part": [{"type": "p", "p": picture}],
    }
    with pytest.raises(RequestTypeError, match=r'a picture is a part \{"type": "image"'):
        taken([{"role": "user", "content": parts[place]}])

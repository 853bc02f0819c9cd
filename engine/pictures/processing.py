"""transformers' image processors, which make arrays of pictures, without torchvision."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import transformers
from numpy.typing import NDArray
from PIL import Image

from engine.config.model import ModelInfo, read_json
from engine.errors import ConfigError, ModelError
from engine.messages.media import Kinds, PixelArray, Pixels, kinds_of
from engine.pictures.families import TRIAL_SIDE
from engine.pictures.opening import damaged

TRIAL_SIZES = [
    (side * across, side * down)
    for side in (64, 224, 336, 448, 512, 768, 1024, 1536, 2048, 4096)
    for across, down in ((1, 1), (1, 2), (2, 1))
]
NO_SETTINGS = (  # arguments of a call, which this engine chooses
    "data_format", "device", "disable_grouping", "image_processor_type", "input_data_format",
    "return_tensors",
)  # fmt: skip
MASKS = ("pixel_attention_mask",)  # eight bytes for each bit, as the processors make them
UNREAD = ("rows", "cols", "batch_num_images", "num_crops")  # outputs that an encoder does not need


class ImageProcessor:
    """The image processor of a model directory. Thread-safe."""

    def __init__(self, info: ModelInfo, own: Mapping[str, Any] | None = None) -> None:
        """Load it. own: settings in place of those of the directory. Raises ``ModelError`` if
        transformers has no such processor, and ``ConfigError`` for settings
        that it does not have or cannot read."""
        name = _class_name(info)
        kind = getattr(transformers, f"{name}Pil", None)
        if kind is None:
            raise ModelError(
                f"{info.path} names the image processor {name!r}, which this version of "
                "transformers cannot compute without torchvision"
            )
        self._path, self._own = info.path, own or {}
        fixed = _fixed(info, name)
        self._processor = self._loaded(kind, fixed)
        if own:
            known = self._processor.to_dict().keys() | kind.valid_kwargs.__annotations__.keys()
            if unknown := own.keys() - (known - set(NO_SETTINGS)):
                raise ConfigError(
                    f"mm_processor_kwargs has {min(map(str, unknown))!r:.80}, which "
                    f"{kind.__name__} does not have; it has "
                    f"{', '.join(sorted(known - set(NO_SETTINGS)))}"
                )
            self._processor = self._loaded(kind, {**own, **fixed})

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Its settings, defaults included, as plain data."""
        plain: dict[str, Any] = json.loads(json.dumps(self._processor.to_dict(), default=str))
        return plain

    @cached_property
    def key(self) -> bytes:
        """Identifies the settings: equal pictures with equal keys have equal pixels."""
        text = json.dumps([type(self._processor).__name__, self.settings], sort_keys=True)
        return blake2b(text.encode(), digest_size=16).digest()

    @cached_property
    def kinds(self) -> Kinds:
        """Dtypes and dimensions of the arrays that it makes of any picture. Raises ``ConfigError``
        for settings with which it makes none."""
        try:
            return kinds_of(self._arrays(Image.new("RGB", (TRIAL_SIDE, TRIAL_SIDE))))
        except Exception as error:
            raise self._unusable(error) from error

    def pixels(self, image: Image.Image) -> Pixels:
        """The arrays of one picture. Raises ``RequestError`` if it cannot be processed."""
        try:
            return self._arrays(image)
        except Exception as error:
            raise damaged(error) from error

    def _arrays(self, image: Image.Image) -> Pixels:
        found = self._processor(images=[image], return_tensors="np")
        return {
            name: _plain(value.astype(np.uint8) if name in MASKS else np.ascontiguousarray(value))
            for name, value in found.items()
            if name not in UNREAD
        }

    def _loaded(self, kind: Any, settings: Mapping[str, Any]) -> Any:
        try:
            return kind.from_pretrained(self._path, local_files_only=True, **settings)
        except Exception as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> ConfigError:
        why = f"{type(error).__name__}: {error}"
        if self._own:
            return ConfigError(
                f"mm_processor_kwargs is {dict(self._own)!r:.200}, with which the model's image "
                f"processor fails ({why}): correct the values, or leave them out"
            )
        return ModelError(
            f"the image processor of {self._path} fails with its settings ({why}): correct "
            "preprocessor_config.json, or use the model for text only with "
            'limit_mm_per_prompt={"image": 0}'
        )


def _plain(value: NDArray[Any]) -> PixelArray:
    """An array that is contiguous, without a copy."""
    return PixelArray(value.dtype.str, list(value.shape), value.reshape(-1).view(np.uint8).data)


def largest_picture(
    processor: ImageProcessor, num_tokens: Callable[[int, int], int]
) -> tuple[Pixels, int]:
    """The arrays of a picture with the most tokens, of some usual sizes, and their number.
    num_tokens: of a picture's width and height."""
    tokens = {size: num_tokens(*size) for size in TRIAL_SIZES}
    size = max(tokens, key=lambda each: tokens[each])  # the smallest of those with the most
    return processor.pixels(Image.new("RGB", size)), tokens[size]


def _fixed(info: ModelInfo, name: str) -> dict[str, Any]:
    """Settings that transformers' processor of text and pictures takes from elsewhere."""
    if name != "PixtralImageProcessor":
        return {}
    vision = info.hf.get("vision_config") or {}
    side = int(vision.get("patch_size") or 16) * int(info.hf.get("spatial_merge_size") or 1)
    return {"patch_size": {"height": side, "width": side}}


def _class_name(info: ModelInfo) -> str:
    """The name of the processor's class, without the ending that names an implementation."""
    combined = read_json(info.path / "processor_config.json") or {}
    own = read_json(info.path / "preprocessor_config.json") or {}
    nested = combined.get("image_processor")
    settings = nested if isinstance(nested, dict) else own
    name = settings.get("image_processor_type") or settings.get("feature_extractor_type")
    if not isinstance(name, str):
        raise ModelError(f"{info.path / 'preprocessor_config.json'} has no image_processor_type")
    name = name.replace("FeatureExtractor", "ImageProcessor")
    return name.removesuffix("Fast").removesuffix("Pil")

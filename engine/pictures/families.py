"""Model families that see: how many tokens a picture takes, found from its size alone.

The tokens equal those that transformers' processor of the family puts into the prompt. To add a
family, write a subclass of ``VisionFamily`` and add it to ``FAMILIES``. Imports neither Pillow nor
transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, sqrt
from typing import Any, ClassVar

from engine.config.model import ModelInfo
from engine.errors import ModelError
from engine.pictures.errors import refused

MOST_RESIZED_PIXELS = 64 << 20
"""Most pixels that a picture may have after it was resized."""
TRIAL_SIDE = 64  # pixels
LEAST_SHRUNK = 1.1  # OneVision shrinks tiles only by more; a constant of transformers
MOST_QWEN_RATIO = 200  # of the sides of a picture; a constant of transformers' processor
MAX_IDEFICS_SIDE = 4096  # a constant of transformers' processors
Layout = Sequence[str | int]
"""What replaces the image token in a prompt: texts, and numbers of embedded tokens."""
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class VisionFamily:
    """A model that sees: its config.json and the settings of its image processor.

    ``whole``: tokens of a picture attend to each other both ways, so it is computed in one step.
    ``has_axes``: positions of a picture's tokens are along time, height and width.
    """

    hf: Mapping[str, Any]
    settings: Settings
    whole: ClassVar[bool] = False
    has_axes: ClassVar[bool] = False

    @property
    def image_token_id(self) -> int:
        """The token in the place of each embedded one."""
        value = self.hf.get("image_token_id", self.hf.get("image_token_index"))
        return int(self._default_image_token if value is None else value)

    @property
    def prompt_token_id(self) -> int:
        """The token in the place of a picture in a prompt."""
        return self.image_token_id

    @property
    def longest(self) -> int:
        """The most tokens from the first to the last embedded token of a picture."""
        raise NotImplementedError

    def layout(self, width: int, height: int) -> Layout:
        """What replaces the image token of a picture of this size. Raises ``RequestError`` for a
        size that the model cannot take."""
        raise NotImplementedError

    def num_embedded(self, width: int, height: int) -> int:
        """Number of embedded tokens of a picture of this size."""
        return sum(part for part in self.layout(width, height) if isinstance(part, int))

    def grid(self, width: int, height: int) -> tuple[int, ...]:
        """Numbers of embedded tokens along time, height and width with ``has_axes``; else ()."""
        return ()

    @property
    def _default_image_token(self) -> int:
        raise NotImplementedError

    @property
    def _vision(self) -> Mapping[str, Any]:
        return self.hf.get("vision_config") or {}


class Llava(VisionFamily):
    """LLaVA: each picture has the same number of tokens, since it is resized and cropped."""

    @property
    def longest(self) -> int:
        return self._num_tokens

    def layout(self, width: int, height: int) -> Layout:
        shortest = _side(self.settings, "size", "shortest_edge")
        if shortest and self.settings.get("do_resize", True):
            padded = bool(self.settings.get("do_pad"))
            ratio = 1.0 if padded else max(width, height) / min(width, height)
            _check_resized(width, height, int(shortest * shortest * ratio))
        return (self._num_tokens,)

    @property
    def _default_image_token(self) -> int:
        return 32_000

    @property
    def _num_tokens(self) -> int:
        is_cropped = self.settings.get("do_center_crop") and self.settings.get("crop_size")
        name = "crop_size" if is_cropped else "size"
        height, width = (_side(self.settings, name, side) for side in ("height", "width"))
        if not height or not width:
            raise ModelError(
                f"the image processor's {name} is {self.settings.get(name)!r}, must have a height "
                "and a width: pictures of other models of this family are not supported"
            )
        patch = int(self._vision.get("patch_size", 14))
        has_class = self._vision.get("model_type", "clip_vision_model") == "clip_vision_model"
        is_cut = self.hf.get("vision_feature_select_strategy", "default") == "default"
        return (height // patch) * (width // patch) + int(has_class) - int(is_cut)


class LlavaOnevision(VisionFamily):
    """LLaVA-OneVision: a picture in whole, then its tiles without the padding around it, with a
    token at the end of each row of patches."""

    @property
    def longest(self) -> int:
        side = self._patches_a_side
        rows = max(height for height, _ in self._resolutions) // self._size * side
        return side**2 + ceil(LEAST_SHRUNK**2 * self._most_tiles * side**2) + rows

    def layout(self, width: int, height: int) -> Layout:
        best = _best_resolution(width, height, self._resolutions)
        if best is None:
            raise refused(
                f"a picture has {width} x {height} pixels, which is too long for this model: cut "
                "it into pieces"
            )
        side = self._patches_a_side
        rows, columns = (each // self._size * side for each in best)
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        shrunk = sqrt(rows * columns / (self._most_tiles * side**2))
        if shrunk > LEAST_SHRUNK:
            rows, columns = int(rows // shrunk), int(columns // shrunk)
        is_cut = self.hf.get("vision_feature_select_strategy", "full") == "default"
        return (rows * columns + rows + side**2 - int(is_cut),)

    @property
    def _default_image_token(self) -> int:
        return 151_646

    @property
    def _resolutions(self) -> list[list[int]]:
        found = self.hf.get("image_grid_pinpoints") or self.settings["image_grid_pinpoints"]
        return list(found)

    @property
    def _size(self) -> int:
        return _side(self.settings, "size", "height") or _side(
            self.settings, "size", "shortest_edge"
        )

    @property
    def _patches_a_side(self) -> int:
        return int(self._vision.get("image_size", 384)) // int(self._vision.get("patch_size", 14))

    @property
    def _most_tiles(self) -> int:
        return int(
            str(self.hf.get("vision_aspect_ratio", "anyres_max_9")).removeprefix("anyres_max_")
        )


class Idefics3(VisionFamily):
    """Idefics3 and SmolVLM: a large picture is split into tiles, a small one is one tile."""

    FRAME = "<fake_token_around_image>"
    WHOLE = "<global-img>"

    @property
    def longest(self) -> int:
        rows = ceil(self._longest_edge / self._tile) if self._is_split else 1
        # Between two runs are at most a row's name and its frame, each of some tokens.
        return (rows * rows + 1) * (self._tokens_a_tile + 16) if rows > 1 else self._tokens_a_tile

    def layout(self, width: int, height: int) -> Layout:
        rows, columns = self._tiles(width, height)
        num, layout = self._tokens_a_tile, list[str | int]()
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                layout += [f"{self.FRAME}<row_{row}_col_{column}>", num]
            layout.append("\n")
        if rows:
            layout.append("\n")
        return [*layout, f"{self.FRAME}{self.WHOLE}", num, self.FRAME]

    @property
    def _default_image_token(self) -> int:
        return 128_257

    def _tiles(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tiles; (0, 0) for a picture that is not split."""
        if not self._is_split:
            return 0, 0
        if self.settings.get("do_resize", True):
            width, height = _fitted(width, height, self._longest_edge)
        tile, ratio = self._tile, width / height
        if width >= height:
            width = ceil(width / tile) * tile
            height = ceil(int(width / ratio) / tile) * tile
        else:
            height = ceil(height / tile) * tile
            width = ceil(int(height * ratio) / tile) * tile
        _check_resized(width, height, width * height)
        if height <= tile and width <= tile:
            return 0, 0
        return max(1, height // tile), max(1, width // tile)

    @property
    def _is_split(self) -> bool:
        return bool(self.settings.get("do_image_splitting", True))

    @property
    def _tile(self) -> int:
        return _side(self.settings, "max_image_size", "longest_edge") or 364

    @property
    def _longest_edge(self) -> int:
        return _side(self.settings, "size", "longest_edge") or 4 * 364

    @property
    def _tokens_a_tile(self) -> int:
        patch = int(self._vision.get("patch_size", 32))
        return int((self._tile // patch) ** 2 / int(self.hf.get("scale_factor", 2)) ** 2)


class Gemma3(VisionFamily):
    """Gemma 3: each picture has the same number of tokens, in a paragraph of its own."""

    whole = True
    START, END = "<start_of_image>", "<end_of_image>"

    @property
    def longest(self) -> int:
        length, window = self._num_tokens, int(self.hf.get("sliding_window") or 4096)
        if length > window:
            raise ModelError(
                f"a picture has {length} tokens (mm_tokens_per_image), more than the window of "
                f"{window} tokens within which they attend to each other (sliding_window)"
            )
        return length

    @property
    def prompt_token_id(self) -> int:
        return int(self.hf.get("boi_token_index") or 255_999)

    def layout(self, width: int, height: int) -> Layout:
        if self.settings.get("do_pan_and_scan"):
            raise ModelError("do_pan_and_scan is not supported: leave it out")
        return (f"\n\n{self.START}", self._num_tokens, f"{self.END}\n\n")

    @property
    def _default_image_token(self) -> int:
        return 262_144

    @property
    def _num_tokens(self) -> int:
        return int(self.hf.get("mm_tokens_per_image") or 256)


class Pixtral(VisionFamily):
    """Pixtral and Mistral 3: a picture keeps its proportions, and each row ends with a token."""

    ROW_END, END = "[IMG_BREAK]", "[IMG_END]"

    @property
    def longest(self) -> int:
        height, width = self._most
        rows, columns = ceil(height / self._unit), ceil(width / self._unit)
        return rows * (columns + 1)

    def layout(self, width: int, height: int) -> Layout:
        if self.settings.get("do_resize", True):
            most = self._most
            shrunk = max(height / most[0], width / most[1])
            if shrunk > 1:
                width, height = floor(width / shrunk), floor(height / shrunk)
        if not width or not height:
            raise refused(
                "a picture is so long that it has no pixels in its shorter direction once it was "
                "resized for this model: cut it into pieces"
            )
        rows, columns = ceil(height / self._unit), ceil(width / self._unit)
        return (*(columns, self.ROW_END) * (rows - 1), columns, self.END)

    @property
    def _default_image_token(self) -> int:
        return 10

    @property
    def _most(self) -> tuple[int, int]:
        """Most pixels of the height and the width of a picture that was resized."""
        longest = _side(self.settings, "size", "longest_edge")
        return (
            longest or _side(self.settings, "size", "height"),
            longest or _side(self.settings, "size", "width"),
        )

    @property
    def _unit(self) -> int:
        """Pixels along a side of a token."""
        return _side(self.settings, "patch_size", "height")


class QwenVL(VisionFamily):
    """Qwen2.5-VL, Qwen3-VL and Qwen3.5: a picture keeps its proportions, and the positions of its
    tokens are along height and width."""

    has_axes = True

    @property
    def longest(self) -> int:
        unit = self._unit
        least, most = (_side(self.settings, "size", side) for side in self._bounds)
        # A picture of the longest allowed shape is at least one token high.
        longest_row = ceil(sqrt(MOST_QWEN_RATIO * most) / unit)
        raised = ceil(sqrt(MOST_QWEN_RATIO * least) / unit) + 1
        return max(most // unit**2, longest_row, raised + least // unit**2 + 1)

    def layout(self, width: int, height: int) -> Layout:
        _, rows, columns = self.grid(width, height)
        return (rows * columns,)

    def grid(self, width: int, height: int) -> tuple[int, ...]:
        if not self.settings.get("do_resize", True):
            raise ModelError("do_resize=False is not supported for this model: leave it out")
        if max(width, height) / min(width, height) > MOST_QWEN_RATIO:
            raise refused(
                f"a picture has {width} x {height} pixels, and for this model the longer side may "
                f"have at most {MOST_QWEN_RATIO} times as many as the other: cut it into pieces"
            )
        unit = self._unit
        least, most = (_side(self.settings, "size", side) for side in self._bounds)
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit**2 > most:
            shrunk = sqrt(height * width / most)
            rows = max(1, floor(height / shrunk / unit))
            columns = max(1, floor(width / shrunk / unit))
        elif rows * columns * unit**2 < least:
            raised = sqrt(least / (height * width))
            rows, columns = ceil(height * raised / unit), ceil(width * raised / unit)
        return 1, rows, columns

    _bounds = ("shortest_edge", "longest_edge")

    @property
    def _unit(self) -> int:
        """Pixels along a side of a token."""
        return int(self.settings["patch_size"]) * int(self.settings["merge_size"])

    @property
    def _default_image_token(self) -> int:
        return 248_056 if "3_5" in str(self.hf.get("model_type")) else 151_655


def llava(hf: Mapping[str, Any], settings: Settings) -> VisionFamily:
    """The family of LLaVA's class, which Pixtral also has."""
    is_pixtral = (hf.get("vision_config") or {}).get("model_type") == "pixtral"
    return (Pixtral if is_pixtral else Llava)(hf, settings)


FAMILIES: dict[str, Callable[[Mapping[str, Any], Settings], VisionFamily]] = {
    "Gemma3ForConditionalGeneration": Gemma3,
    "Idefics3ForConditionalGeneration": Idefics3,
    "LlavaForConditionalGeneration": llava,
    "LlavaOnevisionForConditionalGeneration": LlavaOnevision,
    "Mistral3ForConditionalGeneration": Pixtral,
    "Qwen2_5_VLForConditionalGeneration": QwenVL,
    "Qwen3VLForConditionalGeneration": QwenVL,
    "Qwen3_5ForConditionalGeneration": QwenVL,
    "Qwen3_5MoeForConditionalGeneration": QwenVL,
    "SmolVLMForConditionalGeneration": Idefics3,
}


def sees(info: ModelInfo) -> bool:
    """Whether a model directory is of a family that sees, and has an image processor's settings."""
    files = ("preprocessor_config.json", "processor_config.json")
    return info.architecture in FAMILIES and any((info.path / name).is_file() for name in files)


def family_of(info: ModelInfo, settings: Settings) -> VisionFamily:
    """The family of a model that reads pictures. settings: of its image processor. Raises
    ``ModelError`` if they and config.json do not say how many tokens a picture has."""
    try:
        family = FAMILIES[info.architecture](info.hf, settings)
        counts = family.longest, family.num_embedded(TRIAL_SIDE, TRIAL_SIDE)
        if min(*counts, family.image_token_id, family.prompt_token_id) < 1:
            raise ValueError("a picture has no tokens")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"config.json and the settings of the image processor in {info.path} do not give the "
            f"tokens of a picture ({type(error).__name__}: {error}): correct them, or use the "
            'model for text only with limit_mm_per_prompt={"image": 0}'
        ) from error
    return family


def _fitted(width: int, height: int, longest: int) -> tuple[int, int]:
    """The size of a picture whose longer side becomes ``longest``, as transformers rounds it: the
    other side is even."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > MAX_IDEFICS_SIDE:
        width, height = MAX_IDEFICS_SIDE, int(MAX_IDEFICS_SIDE / ratio)
    elif height > width and height > MAX_IDEFICS_SIDE:
        height, width = MAX_IDEFICS_SIDE, int(MAX_IDEFICS_SIDE * ratio)
    return max(width, 1), max(height, 1)


def _best_resolution(
    width: int, height: int, resolutions: Sequence[Sequence[int]]
) -> tuple[int, int] | None:
    """Height and width of the resolution that keeps most of a picture and wastes least; ``None`` if
    the picture would vanish in all."""
    best, most, least = None, 0, 0
    for high, wide in resolutions:
        scale = min(wide / width, high / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        wasted = high * wide - kept
        if kept > most or (kept == most and best is not None and wasted < least):
            best, most, least = (high, wide), kept, wasted
    return best


def _side(settings: Settings, name: str, side: str) -> int:
    """A side of a size in the settings; 0 if it has none."""
    size = settings.get(name)
    if isinstance(size, int):
        return size if side in ("height", "width", "longest_edge") else 0
    return int((size or {}).get(side) or 0)


def _check_resized(width: int, height: int, num_pixels: int) -> None:
    if num_pixels > MOST_RESIZED_PIXELS:
        raise refused(
            f"a picture has {width} x {height} pixels, from which the model's image processor "
            f"makes {num_pixels}, and the limit is {MOST_RESIZED_PIXELS}: cut it into pieces that "
            "are less long"
        )

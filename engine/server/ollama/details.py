"""What the served model is made of: sizes and types, as lists of models show them."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from gguf import LlamaFileType
from safetensors import safe_open

from engine.config.model import ModelInfo, read_model_info
from engine.errors import ModelError
from engine.gguf.header import part_files, read_gguf
from engine.gguf.link import gguf_file

Json = dict[str, Any]
TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "K"))
SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
"""Keys of GGUF files, and those of config.json."""
logger = logging.getLogger("engine.server")


class ModelDetails(NamedTuple):
    """A model, as far as its files here describe it; empty texts and 0 for what is unknown."""

    format: str = ""
    family: str = ""
    num_parameters: int = 0
    quantization: str = ""
    num_bytes: int = 0
    modified: float = 0.0  # seconds since the epoch
    sizes: tuple[tuple[str, int], ...] = ()
    """Numbers of layers and the like, by the keys of ``SIZES``."""

    @property
    def digest(self) -> str:
        """64 letters that are others for another model."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def about(self, parent: str = "") -> Json:
        """The fields that Ollama calls ``details``. parent: the base model of an adapter."""
        return {
            "parent_model": parent,
            "format": self.format,
            "family": self.family,
            "families": [self.family] if self.family else [],
            "parameter_size": _shown(self.num_parameters),
            "quantization_level": self.quantization,
        }

    def info(self, max_model_len: int) -> Json:
        """The fields that Ollama calls ``model_info``."""
        family = self.family or "unknown"
        return {
            "general.architecture": family,
            "general.parameter_count": self.num_parameters,
            f"{family}.context_length": max_model_len,
            **{f"{family}.{key}": value for key, value in self.sizes},
        }


def read_details(path: str) -> ModelDetails:
    """Read the files in a model's directory. What cannot be read is logged, and unknown."""
    try:
        info = read_model_info(path)
        file = gguf_file(info.path)
        found = _of_directory(info) if file is None else _of_gguf(file)
    except (ModelError, OSError, ValueError) as error:
        logger.warning("/api/tags has no details of the model: %s", error)
        return ModelDetails()
    given = {key: info.hf.get(name) for key, name in SIZES.items()}
    sizes = tuple((key, value) for key, value in given.items() if isinstance(value, int))
    return found._replace(family=info.model_type.replace("_", ""), sizes=sizes)


def _of_gguf(file: Path) -> ModelDetails:
    header = read_gguf(file)
    by_type = Counter[str]()
    for stored in header.tensors.values():
        by_type[stored.type.name] += stored.num_bytes
    num = sum(prod(stored.shape) for stored in header.tensors.values())
    kind = _file_type(header.metadata) or by_type.most_common(1)[0][0]
    return ModelDetails("gguf", "", num, kind, *_state_of(part_files(file)))


def _file_type(metadata: Json) -> str:
    """The name of a mixture of types, such as Q4_K_M, or an empty text."""
    number = metadata.get("general.file_type")
    with suppress(ValueError):
        if isinstance(number, int):
            return LlamaFileType(number).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    return ""


def _of_directory(info: ModelInfo) -> ModelDetails:
    files = sorted(info.path.glob("*.safetensors"))
    files = [file for file in files if not file.name.startswith("consolidated")]
    kind, num = TYPES.get(info.dtype, info.dtype), 0
    about = info.hf.get("quantization_config")
    if isinstance(about, dict):
        kind = str(about.get("quant_method", "quantized")).upper()  # numbers are packed
    else:
        num = sum(_numbers_in(files))
    return ModelDetails("safetensors", "", num, kind, *_state_of(files))


def _numbers_in(files: list[Path]) -> Iterator[int]:
    """The number of elements of each tensor."""
    for file in files:
        with safe_open(file, framework="numpy") as tensors:
            yield from (prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118  (no dict)


def _state_of(files: list[Path]) -> tuple[int, float]:
    """The bytes of files together, and the time of the last change."""
    states = [file.stat() for file in files]
    return sum(each.st_size for each in states), max((s.st_mtime for s in states), default=0.0)


def time_of(seconds: float) -> str:
    """A time since the epoch, as RFC 3339 has it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _shown(number: int) -> str:
    for unit, letter in UNITS:
        if number >= unit:
            return f"{number / unit:.2f}{letter}" if unit == 1e6 else f"{number / unit:.1f}{letter}"
    return str(number) if number else ""

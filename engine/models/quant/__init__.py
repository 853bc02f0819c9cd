"""Formats of quantised checkpoints, one per file: which tensors store a weight, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.config.model import ModelInfo, read_json
from engine.errors import ModelError
from engine.models.quant.awq import Awq
from engine.models.quant.compressed_tensors import CompressedTensors
from engine.models.quant.fields import Format
from engine.models.quant.fp8 import Fp8
from engine.models.quant.gptq import Gptq
from engine.models.quant.mxfp4 import Mxfp4

FORMATS: dict[str, Callable[[Mapping[str, Any]], Format]] = {
    "awq": Awq.of,
    "compressed-tensors": CompressedTensors.of,
    "fp8": Fp8.of,
    "gptq": Gptq.of,
    "mxfp4": Mxfp4.of,
}
GENERAL_FORMATS = ("mxfp4",)
"""Formats that only models have which transformers' modules compute."""
# Files in which early tools stored what is in config.json today.
OWN_FILES = {"awq": "quant_config.json", "gptq": "quantize_config.json"}


def format_of(info: ModelInfo) -> Format | None:
    """The format of a directory's quantised weights; ``None`` if they are not quantised. Raises
    ``ModelError`` if the format or one of its options is not supported."""
    found = stated(info)
    if found is None:
        return None
    method = str(found.get("quant_method", "")).lower()
    if method not in FORMATS:
        raise ModelError(
            f"{info.path} has weights quantized by {method or 'an unnamed method'!r}; supported: "
            f'{", ".join(FORMATS)}. Use the original model, with quantization="int8" to save '
            "memory"
        )
    try:
        return FORMATS[method](found)
    except ModelError as error:
        raise ModelError(f"{info.path} cannot be read: {error}") from None
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"{info.path} has a quantization_config that cannot be read as {method}: "
            f"{type(error).__name__}: {error}"
        ) from error


def stated(info: ModelInfo) -> Mapping[str, Any] | None:
    """The quantisation config of a directory; ``None`` if it has none."""
    found = info.hf.get("quantization_config") or info.hf.get("compression_config")
    if found is not None and not isinstance(found, dict):
        raise ModelError(
            f"{info.path / 'config.json'}: quantization_config is {found!r}, must be an object"
        )
    if found:
        return found
    for method, file in OWN_FILES.items():
        own = read_json(info.path / file)
        if own is not None:
            return {"quant_method": method, **own}
    return None

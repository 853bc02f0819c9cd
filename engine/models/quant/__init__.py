"""Quantised checkpoints: a file a format, which says what holds a weight and what it stands for."""

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

FORMATS: dict[str, Callable[[Mapping[str, Any]], Format]] = {
    "awq": Awq.of,
    "compressed-tensors": CompressedTensors.of,
    "fp8": Fp8.of,
    "gptq": Gptq.of,
}
# Where the first tools of a method wrote what config.json says today.
OWN_FILES = {"awq": "quant_config.json", "gptq": "quantize_config.json"}


def format_of(info: ModelInfo) -> Format | None:
    """How a directory's weights are quantised; ``None`` if they are not.

    Raises ``ModelError`` naming what is not supported.
    """
    found = stated(info)
    if found is None:
        return None
    method = str(found.get("quant_method", "")).lower()
    if method not in FORMATS:
        raise ModelError(
            f"{info.path} holds weights quantized by {method or 'an unnamed method'!r}; read are "
            f'{", ".join(FORMATS)}. Give the original model, with quantization="int8" for less '
            "memory"
        )
    try:
        return FORMATS[method](found)
    except ModelError as error:
        raise ModelError(f"{info.path} cannot be read: {error}") from None
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"{info.path} states a quantization that cannot be read as {method}: "
            f"{type(error).__name__}: {error}"
        ) from error


def stated(info: ModelInfo) -> Mapping[str, Any] | None:
    """The quantisation config of a directory."""
    found = info.hf.get("quantization_config") or info.hf.get("compression_config")
    if found is not None and not isinstance(found, dict):
        raise ModelError(
            f"{info.path / 'config.json'}: quantization_config is {found!r}, no object"
        )
    if found:
        return found
    for method, file in OWN_FILES.items():
        own = read_json(info.path / file)
        if own is not None:
            return {"quant_method": method, **own}
    return None

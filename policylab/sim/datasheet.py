"""Estimate step times from a model's sizes and a processor's data sheet.

A step takes the larger of two times, reading the weights once and multiplying each token by them,
plus the time to read the KV cache, of which layers with a sliding window read only that, and a
launch cost. A fixed share of the peak rates is assumed (roofline model: Williams, Waterman and
Patterson, 2009).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.sched.predict.profile import Profile, WindowCost
from policylab.sim.kv_groups import windows_of

OF_BANDWIDTH = 0.8  # share of the peak that well-made kernels reach
OF_FLOPS = 0.6
LAUNCH = 1.0e-3  # seconds of an empty step
BYTES = 2  # per number


@dataclass(frozen=True)
class Device:
    """Peak rates from a processor's data sheet: bytes of memory read per second, and dense 16-bit
    operations per second."""

    bandwidth: float
    flops: float


DEVICES = {
    "a100": Device(2.039e12, 312e12),
    "h100": Device(3.35e12, 989e12),
    "h200": Device(4.8e12, 989e12),
    "b200": Device(8.0e12, 2250e12),
    "l40s": Device(0.864e12, 362e12),
}

MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
    },
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    },
    "llama-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    },
}


def from_datasheet(text: str) -> Profile:
    """Returns the profile of step times for ``MODEL@DEVICE``, as in ``llama-8b@h100`` or
    ``path/to/config.json@4xh100``.

    Several devices share weights and cache evenly; communication is not counted. Raises
    ``ConfigError`` for an unknown model or device.
    """
    model, _, device = text.rpartition("@")
    count, is_many, name = device.partition("x")
    if not (is_many and count.isdigit()):
        count, name = "1", device
    if name not in DEVICES or not model or int(count) < 1:
        raise ConfigError(
            f"--profile is {text!r}, must be a file or MODEL@DEVICE; models are "
            f"{', '.join(MODELS)} or the path of a config.json, devices {', '.join(DEVICES)}"
        )
    config = _config(model)
    windows = [] if model in MODELS else windows_of(Path(model))
    return _profile(text, config, windows, DEVICES[name], int(count))


def _config(model: str) -> dict[str, Any]:
    if model in MODELS:
        return MODELS[model]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model {model!r} is none of {', '.join(MODELS)} and no readable config.json: {error}"
        ) from error
    config |= config.get("text_config") or {}  # of a model that also reads images
    missing = [name for name in MODELS["llama-8b"] if name not in config]
    if missing:
        raise ConfigError(f"{path} has no {missing[0]!r}, which is needed to count the weights")
    return config


def _profile(
    name: str, config: dict[str, Any], windows: Sequence[int], device: Device, count: int
) -> Profile:
    """The profile of a model on ``count`` devices. windows: of each layer in tokens, 0 for full
    attention; empty if all layers have full attention."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or hidden // heads
    attention = hidden * head * (2 * heads + 2 * kv_heads)
    weights = layers * (attention + 3 * hidden * config["intermediate_size"])
    output = hidden * config["vocab_size"]
    bandwidth = OF_BANDWIDTH * device.bandwidth * count
    flops = OF_FLOPS * device.flops * count
    reading = BYTES * (weights + output) / bandwidth
    token = 2 * weights / flops
    knee = max(1, round(reading / token))
    cached = 2 * BYTES * kv_heads * head / bandwidth  # in one layer
    pair = 4 * heads * head / flops
    sizes = Counter(windows or [0] * layers)
    num_full = sizes.pop(0, 0)
    #            step             prompt  sequence            decode  context  attention
    charged = [LAUNCH + reading, 0.0, 2 * output / flops, 0.0, cached * num_full, pair * num_full]
    return Profile(
        name=f"{name}, by data sheet",
        is_calibrated=False,
        knots=[knee],
        coefficients=[*charged, 0.0, token],
        windows=[WindowCost(size, cached * num, pair * num) for size, num in sorted(sizes.items())],
        source={"bandwidth": device.bandwidth, "flops": device.flops, "devices": count},
    )

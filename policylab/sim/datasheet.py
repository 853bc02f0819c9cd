"""Estimate step times from a model's sizes and a processor's data sheet.

A step takes the larger of two times, reading the weights once and multiplying each token by them,
plus the time to read the KV cache, of which layers with a sliding window read only that, and a
launch cost. A fixed share of the peak rates is assumed (roofline model: Williams, Waterman and
Patterson, 2009). Several devices are ranks, which divide each layer: then two all-reduces per layer
are added, with the peak rate of the link.
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
from policylab.sim.ranks import ALL_REDUCES, Link

OF_BANDWIDTH = 0.8  # share of the peak that well-made kernels reach
OF_FLOPS = 0.6
LAUNCH = 1.0e-3  # seconds of an empty step
BYTES = 2  # per number


@dataclass(frozen=True)
class Device:
    """Peak rates from a processor's data sheet: bytes of memory read per second, dense 16-bit
    operations per second, and the link to others of its kind in the same machine."""

    bandwidth: float
    flops: float
    link: Link


ALL_REDUCE = 10e-6  # seconds, of few bytes

DEVICES = {
    "a100": Device(2.039e12, 312e12, Link(300e9, ALL_REDUCE)),
    "h100": Device(3.35e12, 989e12, Link(450e9, ALL_REDUCE)),
    "h200": Device(4.8e12, 989e12, Link(450e9, ALL_REDUCE)),
    "b200": Device(8.0e12, 2250e12, Link(900e9, ALL_REDUCE)),
    "l40s": Device(0.864e12, 362e12, Link(32e9, ALL_REDUCE)),  # PCIe
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

    Several devices are the ranks of one engine. Raises ``ConfigError`` for an unknown model or
    device, and for more devices than attention heads.
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
    sizes = Sizes.of(config, windows)
    if int(count) > sizes.num_heads:
        raise ConfigError(
            f"--profile is {text!r}, but {model} has {sizes.num_heads} attention heads: name at "
            "most as many devices"
        )
    return estimate(text, sizes, DEVICES[name], int(count))


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


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model, or of a stage of it, that decide what a step costs."""

    layer: int
    """Weights of a layer."""
    output: int
    """Weights of the output layer; 0 for a stage that has none."""
    hidden: int
    num_heads: int
    num_kv_heads: int
    head: int
    """Numbers of a head."""
    windows: tuple[int, ...]
    """The window of each layer in tokens, 0 for full attention."""

    @classmethod
    def of(cls, config: dict[str, Any], windows: Sequence[int] = ()) -> Sizes:
        """The sizes of a model by its ``config.json``. windows: of each layer, as above; empty if
        all layers have full attention."""
        hidden, num_layers = config["hidden_size"], config["num_hidden_layers"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        head = config.get("head_dim") or hidden // heads
        attention = hidden * head * (2 * heads + 2 * kv_heads)
        layer = attention + 3 * hidden * config["intermediate_size"]
        each = tuple(windows) or (0,) * num_layers
        return cls(layer, hidden * config["vocab_size"], hidden, heads, kv_heads, head, each)

    def kv_bytes(self, num_ranks: int = 1) -> float:
        """Bytes of the keys and values of a token in one layer, on each rank. Ranks that outnumber
        the heads share them."""
        return 2 * BYTES * self.head * self.num_kv_heads / min(num_ranks, self.num_kv_heads)


def estimate(
    name: str, sizes: Sizes, device: Device, num_ranks: int = 1, link: Link | None = None
) -> Profile:
    """The profile of a model whose layers are divided among the devices of ``num_ranks`` ranks.
    link: between them; ``None``: that of devices in one machine."""
    link = link or device.link
    num_layers = len(sizes.windows)
    weights = num_layers * sizes.layer
    bandwidth = OF_BANDWIDTH * device.bandwidth
    flops = OF_FLOPS * device.flops * num_ranks
    reading = BYTES * (weights + sizes.output) / (bandwidth * num_ranks)
    token = 2 * weights / flops
    knee = max(1, round(reading / token))
    cached = sizes.kv_bytes(num_ranks) / bandwidth  # in one layer
    pair = 4 * sizes.num_heads * sizes.head / flops
    # An all-reduce adds the same for each token.
    fixed, one = (link.all_reduce(num_ranks, BYTES * sizes.hidden * tokens) for tokens in (0, 1))
    num_reduces = ALL_REDUCES * num_layers
    launch = LAUNCH + num_reduces * fixed
    spread = num_reduces * (one - fixed)
    of_size = Counter(sizes.windows)
    num_full = of_size.pop(0, 0)
    logits = 2 * sizes.output / flops
    #                step        prompt  sequence decode    context          attention
    charged = [launch + reading, 0.0, logits, 0.0, cached * num_full, pair * num_full]
    return Profile(
        name=f"{name}, by data sheet",
        is_calibrated=False,
        knots=[knee],
        coefficients=[*charged, spread, token + spread],
        windows=[WindowCost(w, cached * num, pair * num) for w, num in sorted(of_size.items())],
        source={"bandwidth": device.bandwidth, "flops": device.flops, "devices": num_ranks},
    )

"""Reads what a library orders: a directory or the bytes of files."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load

from engine.hub.fetch import fetched_adapter
from engine.lora.adapter import Adapter, AdapterError
from engine.lora.files import WEIGHTS, Limits, adapter_of, read_adapter
from engine.lora.loading import Order
from engine.lora.peft_config import CONFIG, load_json


def read_order(order: Order, limits: Limits, download_dir: str | None = None) -> Adapter:
    """Read an adapter and check what can be checked without a model. One that is named by its
    repository is fetched into ``download_dir``, by default the hub's cache. Raises
    ``ConfigError``."""
    if order.files is None and order.within is not None:
        return read_adapter(order.path, order.name, within=Path(order.within), limits=limits)
    if order.files is None:
        path = fetched_adapter(order.path, download_dir)
        return read_adapter(path, order.name, limits=limits)
    if missing := [name for name in (CONFIG, WEIGHTS) if name not in order.files]:
        raise AdapterError(f"adapter {order.name!r} from memory has no {' and no '.join(missing)}")
    try:
        tensors = load(order.files[WEIGHTS])
    except SafetensorError as error:
        raise AdapterError(f"adapter {order.name!r}: {WEIGHTS} is damaged: {error}") from error
    return adapter_of(tensors, load_json(order.files[CONFIG], CONFIG), order.name, limits=limits)

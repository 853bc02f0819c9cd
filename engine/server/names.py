"""The names under which clients request the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from engine.assets import BOX_MODEL
from engine.config.model import is_hub_name
from engine.errors import ConfigError

BOX_NAME = "box"


class ServedNames(NamedTuple):
    """Names of the model: ``listed`` by the server, and ``paths`` that requests may use too."""

    listed: tuple[str, ...]
    paths: tuple[str, ...] = ()

    @property
    def first(self) -> str:
        return self.listed[0]

    def has(self, name: str) -> bool:
        return name in self.listed or name in self.paths


def names_of(model: str, chosen: Sequence[str] = ()) -> ServedNames:
    """The ``chosen`` names; by default the name of the model's repository, ``box`` for the model in
    the package, or the last part of the model's path. Raises ``ConfigError`` for an empty name."""
    if not all(name.strip() for name in chosen):
        raise ConfigError("served_model_name has an empty name: name it, or leave the option out")
    if chosen:
        return ServedNames(tuple(dict.fromkeys(chosen)))
    if is_hub_name(model):
        return ServedNames((model,))
    whole = Path(model).expanduser().absolute()
    if whole == BOX_MODEL.absolute():
        name = BOX_NAME
    else:
        name = whole.name if whole.name not in ("", "..") else whole.resolve().name
    paths = dict.fromkeys((model, str(whole), str(whole.resolve())))
    return ServedNames((name or model,), tuple(paths))

"""The names under which clients request the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from engine.assets import served_name
from engine.config.model import is_hub_name, name_of_gguf
from engine.errors import ConfigError
from engine.gguf.link import is_gguf_path


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
    """Return the ``chosen`` names, by default one: that of the model's repository, that of a model
    which a package contains, or the last part of the model's path, without the ending of a GGUF
    file. Raises ``ConfigError`` for an empty name."""
    if not all(name.strip() for name in chosen):
        raise ConfigError("served_model_name has an empty name: name it, or leave the option out")
    if chosen:
        return ServedNames(tuple(dict.fromkeys(chosen)))
    if is_hub_name(model):
        return ServedNames((model,))
    whole = Path(model).expanduser().absolute()
    own = served_name(whole)
    if own is not None:
        name = own
    elif is_gguf_path(model):
        name = name_of_gguf(whole)
    else:
        name = whole.name if whole.name not in ("", "..") else whole.resolve().name
    paths = dict.fromkeys((model, str(whole), str(whole.resolve())))
    return ServedNames((name or model,), tuple(paths))

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
    """The listed names, the first of which is used in answers; and paths that are accepted too."""

    listed: tuple[str, ...]
    paths: tuple[str, ...] = ()

    @property
    def first(self) -> str:
        return self.listed[0]

    def has(self, name: str) -> bool:
        return name in self.listed or name in self.paths


def names_of(model: str, chosen: Sequence[str] = ()) -> ServedNames:
    """The names from ``--served-model-name``. By default the name of the repository, ``box`` for
    the model in the package, or the last part of a directory's path; the path itself is accepted
    too. Raises ``ConfigError`` for an empty name."""
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

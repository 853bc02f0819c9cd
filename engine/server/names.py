"""The names of the model, as clients write them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from engine.assets import BOX_MODEL
from engine.config.model import is_hub_name
from engine.errors import ConfigError

BOX_NAME = "box"


class ServedNames(NamedTuple):
    """Names that are listed, the first of which is in answers, and paths that are taken as well."""

    listed: tuple[str, ...]
    paths: tuple[str, ...] = ()

    @property
    def first(self) -> str:
        return self.listed[0]

    def has(self, name: str) -> bool:
        return name in self.listed or name in self.paths


def names_of(model: str, chosen: Sequence[str] = ()) -> ServedNames:
    """The names that the user has chosen. Without any: that of a repository, ``box`` for the model
    in the box, or the last part of a directory's path; the path is taken too. Raises
    ``ConfigError`` for a name that is empty."""
    if not all(name.strip() for name in chosen):
        raise ConfigError("served_model_name has an empty name: give one, or leave the option out")
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

"""Dotted paths of a user's own classes and functions."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from engine.errors import ConfigError


def load_dotted(path: str, option: str) -> Any:
    """The object at ``package.module.Name``. Raises ``ConfigError`` saying what is missing.

    ``option`` is where the path was given.
    """
    module, _, name = path.rpartition(".")
    if not (module and name) or module.startswith("."):
        raise ConfigError(f"{option}: {path!r} is no dotted path, as package.module.Name is")
    try:
        return getattr(import_module(module), name)
    except (Exception, SystemExit) as error:  # whatever importing a stranger's module raises
        raise ConfigError(
            f"{option}: cannot load {path!r}: {type(error).__name__}: {error}"
        ) from error


def load_logits_processor(factory: Any) -> Any:
    """A factory of logits processors, given as itself or by its dotted path."""
    found = load_dotted(factory, "logits_processors") if isinstance(factory, str) else factory
    if not callable(found):
        raise ConfigError(
            f"logits_processors has {factory!r}, must be functions, classes or their dotted paths"
        )
    return found

"""Dotted paths of a user's own classes and functions."""

from __future__ import annotations

import difflib
import sys
from importlib import import_module
from typing import Any

from engine.errors import ConfigError


def load_dotted(path: str, option: str) -> Any:
    """The object at ``package.module.Name``. Raises ``ConfigError`` saying what is missing.

    ``option`` is where the path was given.
    """
    module, _, name = path.rpartition(".")
    if not (module and name) or module.startswith("."):
        raise ConfigError(f"{option}: {path!r} is no dotted path like package.module.Name")
    try:
        return getattr(import_module(module), name)
    except (Exception, SystemExit) as error:  # importing third-party code may raise anything
        raise ConfigError(
            f"{option}: cannot load {path!r}: {type(error).__name__}: {error}"
            f"{_way_out(module, name, error)}"
        ) from error


def _way_out(module: str, name: str, error: BaseException) -> str:
    """What a path that leads nowhere may have meant."""
    if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
        return "; is its directory on sys.path?"
    own = vars(sys.modules[module]) if module in sys.modules else {}
    if not isinstance(error, AttributeError) or name in own:
        return ""
    classes = [each for each, value in own.items() if isinstance(value, type)]
    if near := difflib.get_close_matches(name, classes, 1):
        return f"; did you mean '{module}.{near[0]}'?"
    defined = [each for each in classes if own[each].__module__ == module]
    return f"; its classes are: {', '.join(defined)}" if defined else ""


def load_logits_processor(factory: Any) -> Any:
    """A factory of logits processors, given as itself or by its dotted path."""
    found = load_dotted(factory, "logits_processors") if isinstance(factory, str) else factory
    if not callable(found):
        raise ConfigError(
            f"logits_processors has {factory!r}, must be functions, classes or their dotted paths"
        )
    return found

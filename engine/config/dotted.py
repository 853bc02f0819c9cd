"""Loads a user's classes and functions by dotted path."""

from __future__ import annotations

import difflib
import sys
from importlib import import_module
from typing import Any

from engine.errors import ConfigError


def load_dotted(path: str, option: str) -> Any:
    """Import the object at ``package.module.Name``. Raises ``ConfigError`` with the reason.

    option: the option that has the path, for the error.
    """
    module, _, name = path.rpartition(".")
    if not (module and name) or module.startswith("."):
        raise ConfigError(f"{option}: {path!r} is not a dotted path like package.module.Name")
    try:
        return getattr(import_module(module), name)
    except (Exception, SystemExit) as error:  # third-party code may raise anything
        raise ConfigError(
            f"{option}: cannot load {path!r}: {type(error).__name__}: {error}"
            f"{_way_out(module, name, error)}"
        ) from error


def _way_out(module: str, name: str, error: BaseException) -> str:
    """Return a suggestion for a dotted path that cannot be imported; "" without one."""
    if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
        return "; start the command in the directory of the module, or set PYTHONPATH to it"
    own = vars(sys.modules[module]) if module in sys.modules else {}
    if not isinstance(error, AttributeError) or name in own:
        return ""
    classes = [each for each, value in own.items() if isinstance(value, type)]
    if near := difflib.get_close_matches(name, classes, 1):
        return f"; did you mean '{module}.{near[0]}'?"
    defined = [each for each in classes if own[each].__module__ == module]
    return f"; its classes are: {', '.join(defined)}" if defined else ""


def load_logits_processor(factory: Any) -> Any:
    """Return a factory of logits processors, imported if it is given by its dotted path."""
    found = load_dotted(factory, "logits_processors") if isinstance(factory, str) else factory
    if not callable(found):
        raise ConfigError(
            f"logits_processors has {factory!r}, must have functions, classes or dotted paths"
        )
    return found

"""Does a plug-in fit? What is wrong with its options and hooks is said before an engine starts."""

from __future__ import annotations

import difflib
import inspect
import logging
from functools import cache
from types import NoneType
from typing import Any, get_type_hints

from engine.config.check import check_kind, kinds_of
from engine.errors import ConfigError

logger = logging.getLogger("engine.sched")

PLAIN = (bool, int, float, str, NoneType)  # what can be told from its annotation
NEAR = 0.85  # likeness of two names from which on one is taken for a slip of the other


def check_options(cls: type, options: dict[str, Any], source: str) -> None:
    """Raise ``ConfigError`` if the constructor knows no such option, lacks one, or wants another
    type. ``source`` is where they were given."""
    try:
        signature = inspect.signature(cls)
    except (TypeError, ValueError):  # not every constructor has one
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        known = ", ".join(map(_shown, signature.parameters.values())) or "none"
        raise ConfigError(
            f"{cls.__name__} cannot be made with {source} {options}: {error}; its options are: "
            f"{known}"
        ) from error
    hints = _hints(cls)
    for name, value in options.items():
        kinds = kinds_of(hints.get(name, Any))
        if all(kind in PLAIN for kind in kinds):
            check_kind(f"{source}[{name!r}] of {cls.__name__}", value, kinds)


def _shown(parameter: inspect.Parameter) -> str:
    """A parameter as its author wrote it; an annotation may be kept as a string."""
    kind = parameter.annotation
    return str(parameter).replace(repr(kind), kind, 1) if isinstance(kind, str) else str(parameter)


def check_hooks(cls: type, base: type) -> None:
    """Raise ``ConfigError`` for a hook that is missing, cannot be called or takes other arguments.

    A name that is nearly one of the base class is logged: nobody would ever ask for it.
    """
    if problem := _problem(cls, base):
        raise ConfigError(f"{cls.__name__}{problem}")
    for name, meant in _slips(cls, base):
        logger.warning(
            "%s.%s is nothing that the engine asks for; did you mean %s?", cls.__name__, name, meant
        )


def _hints(cls: type) -> dict[str, Any]:
    try:
        return get_type_hints(cls.__init__)  # type: ignore[misc]
    except Exception:  # annotations of a stranger may name anything
        return {}


@cache
def _problem(cls: type, base: type) -> str | None:
    """What is wrong with the first hook that does not fit."""
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        return f" lacks {', '.join(missing)}"
    for name, hook in vars(base).items():
        if name.startswith("_") or not inspect.isfunction(hook) or getattr(cls, name) is hook:
            continue
        own = getattr(cls, name)
        wanted = list(inspect.signature(hook).parameters)[1:]
        if not callable(own):
            return f".{name} is {own!r:.80}, must be a method ({', '.join(wanted)})"
        if inspect.iscoroutinefunction(own) or inspect.isasyncgenfunction(own):
            return f".{name} is async, must be a plain method: a step cannot wait for it"
        if not _takes(own, inspect.getattr_static(cls, name), wanted):
            return f".{name}{inspect.signature(own)} must take ({', '.join(['self', *wanted])})"
    return None


def _takes(own: Any, raw: object, wanted: list[str]) -> bool:
    """Can the method be called with these arguments?"""
    given = wanted if isinstance(raw, staticmethod | classmethod) else ["self", *wanted]
    try:
        inspect.signature(own).bind(*given)
    except TypeError:
        return False
    except ValueError:  # not every callable tells what it takes
        return True
    return True


@cache
def _slips(cls: type, base: type) -> list[tuple[str, str]]:
    """Names of the class that are nearly one of the base class, and which."""
    known = [name for name in dir(base) if not name.startswith("_")]
    own = [name for name in dir(cls) if not name.startswith("_") and name not in known]
    near = [(name, difflib.get_close_matches(name, known, 1, NEAR)) for name in own]
    return [(name, found[0]) for name, found in near if found]

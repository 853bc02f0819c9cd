"""How options become configurations, and what a field may state in addition to its type, default
and doc.

Every option is a field of one class, that of its group. ``EngineArgs`` inherits them all; ``part``
takes those of a group out again.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

# Keys of a field's metadata.
EXAMPLE = "example"  # of a field that is a dict: one, to be shown
READER = "reader"  # the program that reads the option; without it, the core only

# Readers, as metadata.
FRONT_END = {READER: "front end"}  # of programs that use a core, wherever that runs
STARTER = {READER: "starter"}  # of programs that start cores in processes of their own
BOTH = {READER: "both"}  # of core and front end


def options_of(options: type[Any], *readers: dict[str, str]) -> list[str]:
    """Names of the options whose metadata is one of ``readers``."""
    wanted = [reader[READER] for reader in readers]
    return [option.name for option in fields(options) if option.metadata.get(READER) in wanted]


def part(config: type[T], options: object, **decided: Any) -> T:
    """A ``config`` with its fields as ``options`` have them, and ``decided`` in place of some."""
    names = [field.name for field in fields(config)]  # type: ignore[arg-type]
    given = {name: _kept(getattr(options, name)) for name in names if name not in decided}
    return config(**given, **decided)


def _kept(value: Any) -> Any:
    """Plain data that the caller's later changes do not reach."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list):
        return tuple(value)
    return dict(value) if isinstance(value, dict) else value

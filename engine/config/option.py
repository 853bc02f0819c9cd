"""Converts options to configurations, and names the metadata of their fields.

Options are fields of one class per group. ``EngineArgs`` inherits from all groups; ``part`` makes
the configuration of one group.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

# Keys of a field's metadata.
EXAMPLE = "example"  # a value to show in help and errors, for a field that is a dict
READER = "reader"  # the program that reads the option; the core only, if not given

# Values of READER, as metadata.
FRONT_END = {READER: "front end"}  # any program that uses a core
STARTER = {READER: "starter"}  # a program that starts cores in their own processes
BOTH = {READER: "both"}  # core and front end
SHORT = "short"  # another flag, such as -tp
SEVERAL = {"several": True}  # a list whose flag takes several values, and may be repeated


def options_of(options: type[Any], *readers: dict[str, str]) -> list[str]:
    """Return the names of the options that at least one program in ``readers`` uses. ``readers``:
    constants of this module, such as ``FRONT_END``."""
    wanted = [reader[READER] for reader in readers]
    return [option.name for option in fields(options) if option.metadata.get(READER) in wanted]


def part(config: type[T], options: object, **decided: Any) -> T:
    """Make an instance of ``config`` from the fields of ``options``; ``decided`` overrides some."""
    names = [field.name for field in fields(config)]  # type: ignore[arg-type]
    given = {name: _kept(getattr(options, name)) for name in names if name not in decided}
    return config(**given, **decided)


def _kept(value: Any) -> Any:
    """Copy plain data, so that the caller's later changes have no effect: lists become tuples."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list):
        return tuple(value)
    return dict(value) if isinstance(value, dict) else value

"""Finds the commands of ``metronome``: the engine's own, and those of installed packages.

A package adds a command with an entry point of the group ``metronome.commands``, for example:

    [project.entry-points."metronome.commands"]
    simulate = "policylab.cli.simulate"

The entry point names a module, or an object in one, with a docstring whose first line is the help
text, a function ``add_arguments(parser)``, and ``run(parsed)``, which returns the exit status. The
module is imported only when its command is used: the help text is read from its compiled code.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from types import CodeType
from typing import Any, Protocol, cast

from engine.errors import EngineError

GROUP = "metronome.commands"
PACKAGE = "metronome-engine"
OWN = (
    *("generate", "chat", "serve", "core", "top"),
    *("prepare", "models", "quantize", "replay"),
)
NEEDED = ("add_arguments", "run")


class Runnable(Protocol):
    """A module or object that implements a command."""

    def add_arguments(self, parser: Any) -> None:
        """Declare the options on an ``argparse.ArgumentParser``."""

    def run(self, parsed: argparse.Namespace) -> int:
        """Run the command and return its exit status."""


@dataclass(frozen=True)
class Command:
    """A command and the package that it comes from."""

    name: str
    package: str
    place: str
    """Where the command's code is: ``module``, or ``module:object``."""

    @cached_property
    def summary(self) -> str:
        """One-line help text of the command, read without running any code of its package."""
        module, _, inner = self.place.partition(":")
        try:
            text = "" if inner else _docstring(module)
        except Exception as error:  # another package's files may make the import system raise
            return f"cannot be loaded: {_shown(error)} (of {self.package})"
        first = next(iter(text.strip().splitlines()), "")
        return first if self.package == PACKAGE else f"{first} (of {self.package})".strip()

    def load(self) -> Runnable:
        """Import the command. Raises ``EngineError`` if that fails or functions are missing."""
        try:
            found = EntryPoint(self.name, self.place, GROUP).load()
        except Exception as error:  # another package may raise anything
            if self.package == PACKAGE and not isinstance(error, ImportError):
                raise
            raise EngineError(
                f"command {self.name!r} of {self.package} cannot be loaded: {_shown(error)}"
            ) from error
        for name in NEEDED:
            if not callable(getattr(found, name, None)):
                raise EngineError(
                    f"command {self.name!r} of {self.package} cannot be used: {self.place} needs a "
                    f"function {name!r}"
                )
        return cast(Runnable, found)


def own_commands() -> dict[str, Command]:
    """Return the engine's own commands, by name."""
    return {name: Command(name, PACKAGE, f"engine.cli.{name}") for name in OWN}


def all_commands() -> tuple[dict[str, Command], list[Command]]:
    """Return all commands by name, and the commands that are ignored because their name is taken.

    The engine's own commands come first, then packages in the order of the module search path."""
    found, left_out = own_commands(), []
    for command in _installed():
        if command.name in found:
            left_out.append(command)
        else:
            found[command.name] = command
    return found, left_out


def _installed() -> Iterator[Command]:
    for entry in entry_points(group=GROUP):
        package = entry.dist.name if entry.dist is not None else "an unknown package"
        yield Command(entry.name, package, entry.value)


def _docstring(module: str) -> str:
    """Read a module's docstring from its compiled code. Raises ``ImportError`` if there is no such
    module."""
    top, *inner = module.split(".")
    spec = find_spec(top)
    for name in inner:  # each step by its own name, so that no parent package is imported
        places = None if spec is None else spec.submodule_search_locations
        spec = None if places is None else PathFinder.find_spec(name, places)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {module!r}")
    read = getattr(spec.loader, "get_code", None)
    code: CodeType | None = None if read is None else read(spec.name)
    if code is None or code.co_names[:1] != ("__doc__",):
        return ""
    return str(code.co_consts[0])


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

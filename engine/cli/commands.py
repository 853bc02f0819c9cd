"""The commands of ``metronome``: the engine's own, and those that installed packages add.

A package adds a command with an entry point of the group ``metronome.commands``, as this one does
with the commands of its policy lab:

    [project.entry-points."metronome.commands"]
    simulate = "policylab.cli.simulate"

It names a module, or an object in one, with a docstring whose first line is the help text, with
``add_arguments(parser)``, and with ``run(parsed)``, which returns the exit status. It is imported
when its command is used and not before: the help text is read from compiled code.
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
OWN = ("generate", "chat", "serve", "core", "top", "prepare", "bench", "replay")
NEEDED = ("add_arguments", "run")


class Runnable(Protocol):
    """What carries out a command."""

    def add_arguments(self, parser: Any) -> None:
        """Declare the options. ``parser``: an ``argparse.ArgumentParser``."""

    def run(self, parsed: argparse.Namespace) -> int:
        """Carry it out and return the exit status."""


@dataclass(frozen=True)
class Command:
    """A command that may be used, and which package brings it."""

    name: str
    package: str
    place: str
    """``module``, or ``module:object``."""

    @cached_property
    def summary(self) -> str:
        """One line for the help. Nothing of the package is run to get it."""
        module, _, inner = self.place.partition(":")
        try:
            text = "" if inner else _docstring(module)
        except Exception as error:  # whatever another package's files do to the import system
            return f"cannot be loaded: {_shown(error)} (of {self.package})"
        first = next(iter(text.strip().splitlines()), "")
        return first if self.package == PACKAGE else f"{first} (of {self.package})".strip()

    def load(self) -> Runnable:
        """Import it. Raises ``EngineError`` if that fails, or if it is no command."""
        try:
            found = EntryPoint(self.name, self.place, GROUP).load()
        except Exception as error:  # whatever another package does when it is imported
            if self.package == PACKAGE and not isinstance(error, ImportError):
                raise
            raise EngineError(
                f"command {self.name!r} of {self.package} cannot be loaded: {_shown(error)}"
            ) from error
        for name in NEEDED:
            if not callable(getattr(found, name, None)):
                raise EngineError(
                    f"command {self.name!r} of {self.package} cannot be used: {self.place} has no "
                    f"function {name!r}"
                )
        return cast(Runnable, found)


def own_commands() -> dict[str, Command]:
    """The engine's own, by name."""
    return {name: Command(name, PACKAGE, f"engine.cli.{name}") for name in OWN}


def all_commands() -> tuple[dict[str, Command], list[Command]]:
    """The engine's own and those of installed packages, and which of them are left out.

    Where several have the same name, the engine's own comes first, then the package that comes
    first on the search path of modules.
    """
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
    """The docstring of a module, from its compiled code. Raises ``ImportError`` without one."""
    top, *inner = module.split(".")
    spec = find_spec(top)
    for name in inner:  # by its own name alone, so that no package around it need be imported
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

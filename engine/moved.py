"""Finds modules of the policy lab by the names that they had as parts of ``engine``.

Scripts, corpora of cases and printed programs hold those names. Importing one gives what the
module at its new place has, with a ``DeprecationWarning``; this goes with the next release. Nothing
of the lab is imported before that.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "engine.core.simulated": "policylab.simulated",
    "engine.sim": "policylab.sim",
    "engine.verify": "policylab.verify",
}
HERE = ("engine.verify", "engine.verify.testing")
"""Names that type checkers find, too."""
OWN = ("__name__", "__spec__", "__loader__", "__package__", "__path__", "__file__", "__cached__")
"""What a module has as itself, whatever is in it."""


class MovedModules:
    """A finder and loader of the import system for the names in ``MOVED`` and all below them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith("engine.") or name in HERE or new_name(name) is None:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]  # of its duties

    def create_module(self, spec: ModuleSpec) -> None:
        """The import system makes the module."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        place = new_name(name)
        assert place is not None
        moved = import_module(place)
        warnings.warn(f"{name} has moved to {place}", DeprecationWarning, stacklevel=2)
        vars(module).update({key: each for key, each in vars(moved).items() if key not in OWN})


def new_name(name: str) -> str | None:
    """Where a module is now; ``None`` if it has not moved."""
    for old, new in MOVED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None


def find_moved_modules() -> None:
    """Let the import system know the former names.

    Before all other ways to find a module: where the modules were, an upgrade leaves directories
    with compiled files, which would be packages with nothing in them.
    """
    sys.meta_path.insert(0, MovedModules())

"""Imports modules of the policy lab by their former names in ``engine``.

Scripts, corpora of cases and printed programs contain these names. Importing one returns the
contents of the module at its new place, with a ``DeprecationWarning``. The former names will be
removed in the next release.
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
"""Former names that still exist as files, for type checkers."""
OWN = ("__name__", "__spec__", "__loader__", "__package__", "__path__", "__file__", "__cached__")
"""Attributes that every module has, which are not copied."""


class MovedModules:
    """Import finder and loader for the names in ``MOVED`` and their submodules."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith("engine.") or name in HERE or new_name(name) is None:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]  # of its duties

    def create_module(self, spec: ModuleSpec) -> None:
        """Return ``None``, so that the import system creates the module."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        place = new_name(name)
        assert place is not None
        moved = import_module(place)
        warnings.warn(f"{name} has moved to {place}", DeprecationWarning, stacklevel=2)
        vars(module).update({key: each for key, each in vars(moved).items() if key not in OWN})


def new_name(name: str) -> str | None:
    """The new name of a module; ``None`` if it has not moved."""
    for old, new in MOVED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None


def find_moved_modules() -> None:
    """Make the import system find modules by their former names.

    The finder comes before all others, because an upgrade may leave directories with compiled files
    at the old places, which would be imported as empty packages."""
    sys.meta_path.insert(0, MovedModules())

"""Workloads by name. A new kind is a file here and a line in this table."""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Any

from engine.errors import ConfigError
from engine.sim.named import call
from engine.sim.workloads.log_uniform import LogUniform
from engine.sim.workloads.source import Source, Workload

__all__ = ["WORKLOADS", "Source", "Workload", "find_workload"]

WORKLOADS: dict[str, type[Workload]] = {kind.kind: kind for kind in (LogUniform,)}


def find_workload(text: str, **options: Any) -> Workload:
    """``name`` or ``name(option=value, ...)``; ``options`` stand where the text names none.

    Raises ``ConfigError``.
    """
    name, told = call(text, "--workload", "log-uniform(num_requests=1000)")
    kind = WORKLOADS.get(name)
    if kind is None:
        near = difflib.get_close_matches(name, WORKLOADS, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"workload {name!r} is not known; {hint}there are: {', '.join(sorted(WORKLOADS))}"
        )
    told = {**options, **told}
    known = {option.name: option for option in fields(kind)}
    if unknown := told.keys() - known.keys():
        raise ConfigError(
            f"workload {name!r} has no option {min(unknown)!r}; its options are: {', '.join(known)}"
        )
    try:
        return kind(**told)
    except TypeError as error:
        raise ConfigError(f"workload {name!r} cannot be made of {told}: {error}") from error

"""Workloads by name. A new kind is a file here and a line in this table."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any

from engine.errors import ConfigError
from policylab.sim.named import call
from policylab.sim.workloads.agents import Agents
from policylab.sim.workloads.azure_csv import AzureCSV
from policylab.sim.workloads.burstgpt_csv import BurstGPTCSV
from policylab.sim.workloads.closed_loop import ClosedLoop
from policylab.sim.workloads.conversations import Conversations
from policylab.sim.workloads.jsonl import JSONL
from policylab.sim.workloads.log_uniform import LogUniform
from policylab.sim.workloads.mooncake import MooncakeConv, MooncakeSynthetic
from policylab.sim.workloads.mooncake_jsonl import MooncakeJSONL
from policylab.sim.workloads.source import Source, Workload
from policylab.sim.workloads.steps_log import StepsLog
from policylab.sim.workloads.tiers import Tiers
from policylab.sim.workloads.traces import Arxiv, AzureCode, AzureConv
from policylab.sim.workloads.two_users import TwoUsers
from policylab.sim.workloads.vidur_csv import VidurCSV

__all__ = ["WORKLOADS", "Source", "Workload", "find_workload"]

KINDS: Iterable[type[Workload]] = (
    *(LogUniform, AzureConv, AzureCode, Arxiv, MooncakeConv, MooncakeSynthetic),
    *(ClosedLoop, Conversations, Agents, Tiers, TwoUsers),
    *(AzureCSV, BurstGPTCSV, VidurCSV, MooncakeJSONL, StepsLog, JSONL),
)
WORKLOADS: dict[str, type[Workload]] = {kind.kind: kind for kind in KINDS}


def find_workload(text: str, **options: Any) -> Workload:
    """``name`` or ``name(option=value, ...)``; ``options`` stand where the text names none.

    Raises ``ConfigError``.
    """
    name, given = call(text, "--workload", "log-uniform(num_requests=1000)")
    kind = WORKLOADS.get(name)
    if kind is None:
        near = difflib.get_close_matches(name, WORKLOADS, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"workload {name!r} is not known; {hint}there are: {', '.join(sorted(WORKLOADS))}"
        )
    given = {**options, **given}
    known = {option.name: option for option in fields(kind)}
    if unknown := given.keys() - known.keys():
        raise ConfigError(
            f"workload {name!r} has no option {min(unknown)!r}; its options are: {', '.join(known)}"
        )
    for option in known.values():
        is_needed = option.default is MISSING and option.default_factory is MISSING
        if is_needed and option.name not in given:
            raise ConfigError(
                f"workload {name!r} needs {option.name}, as in {name}({option.name}=...)"
            )
    try:
        return kind(**given)
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"workload {name!r} cannot be made of {given}: {error}") from error

"""Workloads by name. A new kind of workload is a class that is added to ``KINDS``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from policylab.sim.named import call, check_options, entry_of
from policylab.sim.workloads.closed_loop import ClosedLoop
from policylab.sim.workloads.csv_files import AzureCSV, BurstGPTCSV, VidurCSV
from policylab.sim.workloads.jsonl import JSONL
from policylab.sim.workloads.kinds_of_files import kind_of_file
from policylab.sim.workloads.log_uniform import LogUniform
from policylab.sim.workloads.mooncake import MooncakeConv, MooncakeSynthetic
from policylab.sim.workloads.mooncake_jsonl import MooncakeJSONL
from policylab.sim.workloads.sessions import Agents, Conversations
from policylab.sim.workloads.source import JobSource, Workload
from policylab.sim.workloads.steps_log import StepsLog
from policylab.sim.workloads.tiers import Tiers
from policylab.sim.workloads.traces import Arxiv, AzureCode, AzureConv
from policylab.sim.workloads.two_users import TwoUsers

__all__ = ["WORKLOADS", "JobSource", "Workload", "find_workload"]

KINDS: Iterable[type[Workload]] = (
    *(LogUniform, AzureConv, AzureCode, Arxiv, MooncakeConv, MooncakeSynthetic),
    *(ClosedLoop, Conversations, Agents, Tiers, TwoUsers),
    *(AzureCSV, BurstGPTCSV, VidurCSV, MooncakeJSONL, StepsLog, JSONL),
)
WORKLOADS: dict[str, type[Workload]] = {kind.kind: kind for kind in KINDS}


def find_workload(text: str, **options: Any) -> Workload:
    """Make the workload described by a text such as ``name(option=value, ...)``, or by the path of
    a file of a known format. ``options`` are defaults for options that the text does not set.

    Raises ``ConfigError`` for unknown names and options and for invalid values."""
    name, given = call(text, "--workload", "log-uniform(num_requests=1000)")
    if name not in WORKLOADS and "(" not in text:
        if Path(text).is_file():
            name, given = kind_of_file(text), {"path": text}
        elif "/" in text or Path(text).suffix:
            raise ConfigError(f"workload {text!r} is neither a known name nor a file")
    kind = entry_of("workload", name, WORKLOADS)
    given = {**options, **given}
    check_options(f"workload {name!r}", given, [option.name for option in fields(kind)])
    for option in fields(kind):
        is_needed = option.default is MISSING and option.default_factory is MISSING
        if is_needed and option.name not in given:
            raise ConfigError(
                f"workload {name!r} needs the option {option.name}, as in {name}({option.name}=...)"
            )
    try:
        return kind(**given)
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"workload {name!r} cannot have the options {given}: {error}") from error

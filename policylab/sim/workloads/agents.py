"""Agents: programs of several steps that share instructions and tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policylab.sim.workloads.sessions import Sessions


@dataclass(frozen=True, kw_only=True)
class Agents(Sessions):
    """A program begins with one of a few system prompts; each of its steps adds what a tool
    returned to all that was before."""

    kind: ClassVar[str] = "agents"
    name: ClassVar[str] = "agent"

    turns: float = 6.0
    think: float = 1.0
    """Seconds that a tool takes, exponential, of this mean."""
    lengths: str = "log-uniform(prompt=(16, 512), output=(16, 128))"
    num_systems: int = 4
    system_tokens: int = 1024

"""Conversations: a reader thinks about each answer, and goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policylab.sim.workloads.sessions import Sessions


@dataclass(frozen=True, kw_only=True)
class Conversations(Sessions):
    """Each prompt is all earlier turns, their answers, and some new text."""

    kind: ClassVar[str] = "conversations"
    name: ClassVar[str] = "conversation"

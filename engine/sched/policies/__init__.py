"""Shipped policies, by name. A new one is a file here and a line in this table."""

from __future__ import annotations

from engine.sched.policies.fcfs import FCFS
from engine.sched.policies.priority import Priority
from engine.sched.policy import Policy

POLICIES: dict[str, type[Policy]] = {"fcfs": FCFS, "priority": Priority}

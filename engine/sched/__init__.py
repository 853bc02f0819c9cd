"""The scheduler decides how many tokens of which requests each step computes. Imports no torch.

The names exported here are all that a custom policy, resource or scheduler needs.
"""

from __future__ import annotations

from engine.kv.retention import Keep
from engine.sched.adapters import AdapterPlaces
from engine.sched.cache_policy import CachePolicy
from engine.sched.columns import Columns, OwnNumbers
from engine.sched.interface import SchedulerInterface
from engine.sched.plugins.checks import keep_hints, require_positive, require_share, wrong_hints
from engine.sched.plugins.orders import newcomers_by
from engine.sched.policy import (
    API_VERSION,
    Admission,
    Defer,
    Limits,
    Policy,
    Ranks,
    Refuse,
    SchedView,
    Verdict,
)
from engine.sched.predict.cost import CostModel, LinearCost, StepShape
from engine.sched.predict.ledger import Ledger
from engine.sched.predict.lengths import LengthHistory, Predictor
from engine.sched.request import Request
from engine.sched.resource import AttachedScheduler, Fit, OnRefuse, Resource
from engine.sched.scheduler import Scheduler
from engine.sched.table import Array

__all__ = [
    "API_VERSION",
    "AdapterPlaces",
    "Admission",
    "Array",
    "AttachedScheduler",
    "CachePolicy",
    "Columns",
    "CostModel",
    "Defer",
    "Fit",
    "Keep",
    "Ledger",
    "LengthHistory",
    "Limits",
    "LinearCost",
    "OnRefuse",
    "OwnNumbers",
    "Policy",
    "Predictor",
    "Ranks",
    "Refuse",
    "Request",
    "Resource",
    "SchedView",
    "Scheduler",
    "SchedulerInterface",
    "StepShape",
    "Verdict",
    "keep_hints",
    "newcomers_by",
    "require_positive",
    "require_share",
    "wrong_hints",
]

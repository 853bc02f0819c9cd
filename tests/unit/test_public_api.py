"""The names that code outside may lean on are the recorded ones."""

import os
from pathlib import Path

from support import source_tree as tree

import engine
import engine.sched

GOLDEN = Path(__file__).parents[1] / "golden" / "api.txt"

# What policies, resources and loops of one's own are written with: classes and functions by module.
PUBLIC = {
    "engine.sched.interface": ("RequestCounts", "PauseState", "SchedulerInterface"),
    "engine.sched.policy": ("Admission", "Limits", "Refuse", "Defer", "SchedView", "Policy"),
    "engine.sched.resource": ("OnRefuse", "Fit", "AttachedScheduler", "Resource"),
    "engine.sched.scheduler": ("Scheduler",),
    "engine.sched.predict.cost": ("StepShape", "CostModel"),
    "engine.sched.predict.lengths": ("LengthHistory", "Predictor"),
    "engine.sched.predict.ledger": ("Ledger",),
    "engine.sched.plugins.checks": ("require_positive", "require_share", "wrong_hints"),
    "policylab.verify.testing": ("check_policy",),
}
# Former places of names, by module.
ALIASES = {"engine.verify.testing": ("check_policy", "policylab.verify.testing")}


def public_api() -> list[str]:
    """The names and signatures that code outside may lean on, one a line."""
    lines = [
        f"{module.__name__}.{name}" for module in (engine, engine.sched) for name in module.__all__
    ]
    for module, names in PUBLIC.items():
        lines += tree.public_signatures(module, names)
    lines += [f"{old}.{name} = {new}.{name}" for old, (name, new) in ALIASES.items()]
    return lines


def test_public_api_is_the_recorded_one() -> None:
    """Changing it is allowed, by accident is not: METRONOME_UPDATE_GOLDEN=1 records it anew."""
    lines = public_api()
    if os.environ.get("METRONOME_UPDATE_GOLDEN"):
        GOLDEN.write_text("\n".join(lines) + "\n", encoding="utf-8")
    recorded = GOLDEN.read_text(encoding="utf-8").splitlines() if GOLDEN.exists() else []
    assert lines == recorded

"""What users wrote with the names that the policy lab had as a part of ``engine`` still works."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import engine
from engine.config.dotted import load_dotted
from policylab.sim.run import Engine
from policylab.sim.workloads import Workload, find_workload
from policylab.sim.workloads.open_loop import OpenLoop
from policylab.simulated import SimulatedHalves
from policylab.verify.testing import check_policy
from policylab.verify.wild import Wild

OLD = ("engine.sim", "engine.verify", "engine.core.simulated")


@pytest.fixture(autouse=True)
def nothing_is_imported_yet() -> Iterator[None]:
    for name in [name for name in sys.modules if name.startswith(OLD)]:
        del sys.modules[name]
    yield


@pytest.mark.parametrize(
    ("module", "name", "found"),
    [
        ("engine.verify.testing", "check_policy", check_policy),
        ("engine.verify.wild", "Wild", Wild),
        ("engine.sim.run", "Engine", Engine),
        ("engine.sim.workloads", "find_workload", find_workload),
        ("engine.sim.workloads", "Workload", Workload),
        ("engine.sim.workloads.open_loop", "OpenLoop", OpenLoop),
        ("engine.core.simulated", "SimulatedHalves", SimulatedHalves),
    ],
)
def test_a_former_name_gives_what_is_at_the_new_place(
    module: str, name: str, found: object
) -> None:
    new = module.replace("engine.core.", "policylab.").replace("engine.", "policylab.")
    with pytest.warns(DeprecationWarning) as seen:
        assert getattr(importlib.import_module(module), name) is found
    mine = [each for each in seen if f"{module} has moved to {new}" in str(each.message)]
    assert len(mine) == 1


@pytest.mark.parametrize(
    "module",
    [
        # docs/policy-guide.md and printed programs, as they were.
        *("engine.sim.compare", "engine.sim.figures", "engine.sim.report", "engine.verify.case"),
        *("engine.verify.draw", "engine.verify.simulation", "engine.verify.pytest_plugin"),
        *("engine.verify.fake", "engine.verify.check", "engine.verify.swarm"),
    ],
)
@pytest.mark.filterwarnings("ignore:engine:DeprecationWarning")
def test_all_former_names_are_there(module: str) -> None:
    moved = importlib.import_module(module.replace("engine.", "policylab."))
    old = importlib.import_module(module)
    assert {name for name in vars(moved) if not name.startswith("__")} <= set(vars(old))


@pytest.mark.filterwarnings("ignore:engine:DeprecationWarning")
def test_dotted_paths_of_before_are_read() -> None:
    """A corpus of cases and a step log name the class of a policy."""
    assert load_dotted("engine.verify.wild.Wild", "scheduling_policy") is Wild


@pytest.mark.filterwarnings("ignore:engine:DeprecationWarning")
def test_directories_that_an_upgrade_leaves_are_no_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sim" / "workloads" / "__pycache__").mkdir(parents=True)
    monkeypatch.setattr(engine, "__path__", [*engine.__path__, str(tmp_path)])
    assert importlib.import_module("engine.sim.workloads").find_workload is find_workload


def test_what_never_was_is_not_found() -> None:
    for name in ("engine.simulation", "engine.core.simulations", "engine.nothing"):
        with pytest.raises(ModuleNotFoundError, match=f"No module named '{name}'"):
            importlib.import_module(name)

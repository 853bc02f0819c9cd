"""A policy is made once, before the model is loaded, and is the one that schedules."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.sched import SchedulerConfig
from engine.errors import ConfigError
from engine.kv.manager import KVManager
from engine.sched.find import choose, make_scheduler
from engine.sched.policies.fcfs import FCFS


class Counted(FCFS):
    num_made = 0

    def __init__(self) -> None:
        type(self).num_made += 1


def test_what_was_chosen_is_not_made_again():
    config = SchedulerConfig(scheduling_policy=Counted)
    chosen = choose(config)
    scheduler = make_scheduler(config, KVManager(8, 4), clock=lambda: 0.0, chosen=chosen)
    assert scheduler.policy is chosen.policy
    assert Counted.num_made == 1


def test_a_module_that_cannot_be_imported_is_named_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_broken_module.py").write_text("class A(\n")
    (tmp_path / "my_raising_module.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for path, error in (
        ("my_broken_module.A", "SyntaxError"),
        ("my_raising_module.A", "ZeroDivisionError"),
        ("my_missing_module.A", "ModuleNotFoundError"),
    ):
        with pytest.raises(ConfigError, match=f"cannot load '{path}': {error}"):
            choose(SchedulerConfig(scheduling_policy=path))

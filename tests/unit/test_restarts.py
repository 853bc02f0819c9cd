"""How often a core that has died is started again."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config.args import EngineArgs
from engine.errors import ConfigError, EngineDeadError
from engine.rpc.restarts import RestartOutcome, Restarts, Starting


class Script:
    """A clock, and starts that succeed or fail as they are told."""

    def __init__(self, **options: Any) -> None:
        self.now = 0.0
        self.fails = False
        self.started: list[int] = []
        self._is_done = threading.Event()
        self.restarts = Restarts(self._start, self._is_done.set, clock=lambda: self.now, **options)

    def die(self, core: int) -> RestartOutcome:
        """The core dies and is started again."""
        assert self.restarts.why_not(core) is None
        self._is_done.clear()
        self.restarts.begin(core, SimpleNamespace(shutdown=lambda: None))  # type: ignore[arg-type]
        assert self.restarts.is_pending and self._is_done.wait()
        (outcome,) = self.restarts.take()
        assert not self.restarts.is_pending and outcome.core == core
        return outcome

    def _start(self, core: int) -> Starting:
        self.started.append(core)
        if self.fails:
            raise EngineDeadError("no memory")
        return Starting(SimpleNamespace(kill=lambda: None), lambda: f"core {core}")  # type: ignore


def test_a_core_is_started_five_times_in_ten_minutes() -> None:
    script = Script()
    for number in range(5):
        script.now = 60.0 * number
        assert script.die(0).client == "core 0"
    script.now = 590.0
    assert script.restarts.why_not(0) == "it was started 5 times in 600 s, the limit"
    assert script.restarts.why_not(1) is None  # another core has starts of its own
    script.now = 601.0  # the first is ten minutes ago
    assert script.die(0).error is None
    assert script.restarts.why_not(0) is not None
    script.restarts.close()


def test_a_start_that_fails_counts_and_says_why() -> None:
    script = Script(most=2)
    script.fails = True
    assert str(script.die(3).error) == "no memory"
    script.fails = False
    assert script.die(3).client == "core 3"
    assert script.restarts.why_not(3) == "it was started 2 times in 600 s, the limit"
    script.restarts.close()


def test_nothing_is_started_once_the_engine_ends() -> None:
    script = Script()
    script.restarts.stop()
    assert script.restarts.why_not(0) == "the engine is ending"
    script.restarts.close()
    assert not script.started


@pytest.mark.parametrize("options", [{}, {"core_address": "ipc:///x/core"}])
def test_only_cores_in_processes_of_our_own_can_be_started_again(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="on_core_death is 'restart', which needs cores"):
        EngineArgs(on_core_death="restart", **options).create_config()


def test_the_option_that_it_replaces_is_named() -> None:
    with pytest.raises(ConfigError, match="set on_core_death"):
        EngineArgs(survive_core_death=True)  # type: ignore[call-arg]

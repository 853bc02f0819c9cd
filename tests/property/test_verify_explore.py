"""Small schedulers in every state they can reach. Three requests are the campaign's."""

import pytest

from engine.sched.request import Request
from engine.sched.scheduler import Scheduler
from tools.clone import clone
from tools.explore import (
    Scenario,
    Spec,
    World,
    Wrong,
    all_scenarios,
    all_specs,
    explore,
    main,
)


@pytest.mark.parametrize(
    ("first", "every"),
    [(0, 3), *(pytest.param(first, 3, marks=pytest.mark.slow) for first in (1, 2))],
)
def test_two_requests_in_every_order(first: int, every: int) -> None:
    scenarios = list(all_scenarios(2, (0,)))[first::every]
    num_states = sum(explore(scenario).num_states for scenario in scenarios)
    assert num_states > 100 * len(scenarios)


def test_priorities_that_preempt() -> None:
    options = (("preempt_for_waiting", True),)
    for first in (2, 4):
        specs = (Spec(1, first, 2, priority=1), Spec(2, 4, 2, priority=0))
        found = explore(Scenario(specs, policy="priority", options=options, seats=1))
        assert found.num_states > 100


def test_all_choices_are_there() -> None:
    """16 requests: 136 pairs, 64 of which are another with the contents exchanged."""
    assert len(all_specs((0,))) == 16
    assert len(all_scenarios(2, (0,))) == 136 - 64
    assert len(all_scenarios(3, (0,))) == 816 // 2


def test_a_copy_goes_its_own_way() -> None:
    scenario = Scenario((Spec(1, 4, 2), Spec(1, 3, 2)))
    world = World(scenario)
    for move in [("add", 0), ("add", 1), ("schedule", 0)]:
        world.do(move, scenario)
    key = world.key()
    other = clone(world)
    assert other.key() == key
    for move in [("settle", 0), ("abort", 0), ("schedule", 0)]:
        other.do(move, scenario)
    assert world.key() == key != other.key()
    assert not {id(req) for req in everybody(world)} & {id(req) for req in everybody(other)}


def everybody(world: World) -> list[Request]:
    return [*world.scheduler.roster.running, *world.scheduler.roster.waiting]


def test_what_is_wrong_is_told_with_the_way_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that loses a request only if it is aborted between two steps in flight."""
    finish = Scheduler.finish_requests

    def lossy(self, request_ids, reason="abort"):
        return [] if self.num_in_flight == 2 else finish(self, request_ids, reason)

    monkeypatch.setattr(Scheduler, "finish_requests", lossy)
    with pytest.raises(Wrong, match=r"\('schedule', 0\), \('schedule', 0\), \('abort', "):
        explore(Scenario((Spec(1, 4, 2), Spec(2, 2, 2))))


def test_a_dead_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "serve", lambda self, offers, step: None)
    with pytest.raises(Wrong, match="steps alone lead to no end"):
        explore(Scenario((Spec(1, 2, 1),)))


def test_the_command_explores_and_counts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scenarios = all_scenarios(
        1,
        (0, 1),
        policy="priority",
        options=(("preempt_for_waiting", True),),
        seats=1,
        budget=2,
        depth=1,
    )
    num_states = sum(explore(scenario).num_states for scenario in scenarios)
    options = ["--policy", "priority", "--seats", "1", "--budget", "2", "--depth", "1"]
    monkeypatch.setattr("sys.argv", ["explore", "--requests", "1", *options])
    main()
    out = capsys.readouterr().out
    assert f"{len(scenarios)} of {len(scenarios)} scenarios" in out
    assert f"complete: {num_states:,} states, no violation" in out

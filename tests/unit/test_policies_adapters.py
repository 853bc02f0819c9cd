"""What policies see of LoRA adapters, and the one that keeps loads few."""

from __future__ import annotations

import pytest
from support.adapters import FakeReader, digest_of, slots_of
from support.simulate import make_request
from support.timed import TimedRun, timed_run

from engine.lora.decide import AdapterSlots
from engine.messages.adapters import AdapterSource
from engine.sched import LinearCost
from engine.sched.policies.adapter_clustering import AdapterClustering
from engine.sched.policies.fcfs import FCFS
from engine.sched.predict.profile import AdapterCost, Profile, ProfileCost


def run_with(policy, max_loras: int, **options) -> tuple[TimedRun, AdapterSlots]:
    slots = AdapterSlots(max_loras)
    return timed_run(policy, resources=(slots,), **options), slots


def load_seconds(run: TimedRun) -> dict[str, float]:
    columns = run.scheduler.view.columns(run.scheduler.view.waiting)
    names = [req.request_id for req in columns.requests]
    return dict(zip(names, columns.load_seconds.tolist(), strict=True))


def test_a_policy_sees_which_adapters_are_loaded_and_used():
    run, _ = run_with(FCFS(), 2, max_num_seqs=3)
    view = run.scheduler.view
    for name, adapter, num_output in (("0", "A", 1), ("1", "B", 9), ("2", "B", 9)):
        run.ask(name, 8, num_output, adapter=adapter)
    run.steps(3)
    places = view.adapters
    assert (list(places.in_slots), list(places.in_use), places.num_slots) == (["A", "B"], ["B"], 2)
    assert (places.num_running("A"), places.num_running("B")) == (0, 2)
    assert [places.place(name) for name in "ABC"] == ["slot", "slot", "host"]
    for name, adapter in (("3", None), ("4", "C"), ("5", "A"), ("6", "C")):
        run.ask(name, 8, adapter=adapter)
    numbers = view.columns(view.waiting).adapter.tolist()
    assert numbers[0] == -1 and numbers[1] == numbers[3] != numbers[2]
    copy = view.cost.load_seconds("host")
    assert copy > 0 and load_seconds(run) == {"3": 0.0, "4": copy, "5": 0.0, "6": copy}


def test_the_time_to_read_an_adapter_is_learnt():
    reader = FakeReader(a="A", b="B", is_slow=True)
    slots = slots_of(reader)
    run = timed_run(FCFS(), resources=(slots,), step_seconds=0.5)
    cost = run.scheduler.view.cost
    copy, guess = cost.load_seconds("host"), cost.load_seconds("disk")
    assert cost.load_seconds("slot") == 0.0 < copy < guess

    request = make_request("0", [7] * 8, 1, adapter="x", adapter_source=AdapterSource("a"))
    run.add(slots.resolved(request))
    assert run.scheduler.view.adapters.place(run.request("0").adapter or "") == "disk"
    number = run.scheduler.view.columns([run.request("0")]).adapter[0]
    run.steps(3)
    reader.finish("a")
    run.drain()
    assert number == 0 and run.scheduler.view.cost.load_seconds("disk") == pytest.approx(2 + copy)
    assert run.scheduler.view.adapters.place(digest_of("A")) == "slot"


def test_a_profile_has_the_costs_of_loads():
    found = AdapterCost(copy=0.25, read=4.0)
    coefficients = [0.0] * 7
    profile = Profile(
        name="x", is_calibrated=True, knots=[], coefficients=coefficients, adapters=found
    )
    cost = ProfileCost(profile)
    cost.observe_read(100.0)
    assert [cost.load_seconds(place) for place in ("slot", "host", "disk")] == [0.0, 0.25, 4.25]


def test_reads_are_averaged():
    cost = LinearCost()
    copy = cost.load_seconds("host")
    for seconds in (1.0, 3.0):
        cost.observe_read(seconds)
    assert cost.load_seconds("disk") == pytest.approx(2.0 + copy)
    for _ in range(200):
        cost.observe_read(5.0)
    assert cost.load_seconds("disk") == pytest.approx(5.0 + copy, rel=1e-3)


def test_loaded_adapters_and_the_base_model_go_first():
    run, _ = run_with(AdapterClustering(max_wait=100.0), 2, max_num_seqs=1)
    run.ask("first", 8, 2, adapter="A")
    run.steps(1)
    for name, adapter in (("0", "B"), ("1", "A"), ("2", "B"), ("3", None), ("4", "A")):
        run.ask(name, 8, adapter=adapter)
    assert run.order() == ["first", "1", "3", "4", "0", "2"]


@pytest.mark.parametrize("policy", [FCFS(), AdapterClustering(max_wait=100.0)])
def test_an_order_by_loads_changes_adapters_less_often(policy):
    run, slots = run_with(policy, 1, max_num_seqs=1)
    for index in range(12):
        run.ask(str(index), 8, adapter="ABC"[index % 3])
    run.drain()
    assert slots.num_loads == (12 if isinstance(policy, FCFS) else 3)


def passed_by(policy) -> int:
    """With one slot, requests of A come all the time: how many start before the one of B?"""
    run, _ = run_with(policy, 1, max_num_seqs=4)
    for index in range(60):
        run.ask(f"A{index}", 8, 3, adapter="A")
        if index == 2:
            run.ask("B", 8, 3, adapter="B")
        run.step()
    run.drain()
    return run.started.index("B")


def test_an_adapter_gets_a_slot_though_others_keep_all_in_use():
    assert passed_by(FCFS()) <= 10, "slots become free after five seconds"
    assert passed_by(AdapterClustering(max_wait=1.0)) < passed_by(FCFS())


def test_other_slots_are_refilled_while_one_becomes_free():
    run, slots = run_with(AdapterClustering(max_wait=2.0), 2, max_num_seqs=8)
    for name in ("A0", "A1", "B0"):
        run.ask(name, 8, 6, adapter=name[0])
    run.steps(1)
    run.ask("C0", 8, 6, adapter="C")
    run.steps(3)
    for name in ("A2", "B1"):
        run.ask(name, 8, 6, adapter=name[0])
    assert set(run.steps(1)[0]) == {"A0", "A1", "B0", "A2"}, "B has the fewest running requests"
    assert run.order()[4:] == ["C0", "B1"] and slots.num_loads == 4

"""Adapters: who may run beside whom, and where each adapter lies."""

from __future__ import annotations

import pytest
from support.data_plane import answer, make_feature_run
from support.simulate import make_request

from engine.errors import ConfigError
from engine.lora.decide import AdapterSlots
from engine.messages.step import NO_ADAPTER


def add(run, request_id, adapter=None, num_output=4, length=10):
    request = make_request(request_id, [7] * length, num_output, adapter=adapter)
    run.add(request)
    return request


@pytest.mark.behaviour(91)
def test_another_adapter_waits_and_is_passed_by_the_base_model():
    slots = AdapterSlots(1)
    run = make_feature_run(resources=[slots])
    requests = [add(run, "0", "A"), add(run, "1", "A"), add(run, "2", "B"), add(run, "3")]
    run.step()
    assert list(run.plans[0]) == ["0", "1", "3"]
    assert run.scheduler.roster.by_id["2"].is_waiting
    run.drain()
    assert list(run.plans[4]) == ["2"], "it runs as soon as the last user of A has finished"
    for request in requests:
        assert run.outputs[request.request_id] == answer(request)
    assert run.outputs["0"] == run.outputs["1"] != run.outputs["3"]


def test_an_idle_adapter_stays_loaded_until_its_slot_is_needed():
    slots = AdapterSlots(2)
    run = make_feature_run(resources=[slots])
    for name in ("A", "B", "A", "C"):
        add(run, name + str(len(run.outputs)), name, num_output=2)
        run.drain()
    assert slots.slot_of == {"A": 0, "C": 1}, "B was used less recently than A"
    assert run.worker.loaded == {0: "A", 1: "C"}


def test_the_worker_hears_who_has_no_adapter():
    run = make_feature_run(resources=[AdapterSlots(1)])
    add(run, "0", "A", num_output=1)
    run.drain()
    base = add(run, "1", num_output=3)
    run.drain()
    assert run.worker.adapter_slots == {0: NO_ADAPTER}
    assert run.outputs["1"] == answer(base)


def test_an_adapter_waits_for_memory():
    """C is as large as A and B together."""
    sizes = {"A": 1, "B": 1, "C": 2}
    slots = AdapterSlots(3, fits=lambda names: sum(sizes[one] for one in names) <= 2)
    run = make_feature_run(resources=[slots])
    requests = [add(run, str(number), name) for number, name in enumerate("ABC")]
    run.step()
    assert list(run.plans[0]) == ["0", "1"]
    run.drain()
    assert list(run.plans[4]) == ["2"]
    add(run, "again", "A")  # in its slot, but without memory
    add(run, "too", "C")
    run.drain()
    assert [run.outputs[one.request_id] for one in requests] == [answer(one) for one in requests]
    first = {
        name: min(n for n, plan in enumerate(run.plans) if name in plan) for name in run.outputs
    }
    assert first["too"] >= first["again"] + 4


SHORT = {
    "slots": {"max_loras": 2},
    "memory": {"max_loras": 3, "fits": lambda names: len(names) < 3},
}


@pytest.mark.parametrize("what", SHORT)
def test_a_request_of_another_adapter_does_not_starve(what):
    now = [0.0]
    run = make_feature_run(resources=[AdapterSlots(**SHORT[what])], clock=lambda: now[0])
    add(run, "other", "B", num_output=200)
    for number in range(40):
        add(run, f"{number}", "A")  # one for each that ends: A is always in use
        add(run, f"base {number}")
        if number == 3:
            late = make_request("late", [7] * 10, 4, adapter="C", arrival_time=now[0])
            run.add(late)
        run.step()
        now[0] += 1.0
    assert run.outputs["late"] == answer(late)
    assert [*map(len, run.outputs.values())].count(4) > 60, "others went on"
    first = next(step for step, plan in enumerate(run.plans) if "late" in plan)
    assert 8 <= first <= 14, "after five seconds, and when the last request of A had ended"


def test_an_aborted_request_gives_its_adapter_back():
    run = make_feature_run(resources=[AdapterSlots(1)])
    add(run, "0", "A")
    add(run, "1", "B")
    run.step()
    run.scheduler.finish_requests("0")
    run.step()
    assert run.plans == [{"0": 10}, {"1": 10}]


def test_no_slot_at_all_is_refused():
    with pytest.raises(ConfigError, match="max_loras is 0, must be at least 1"):
        AdapterSlots(0)

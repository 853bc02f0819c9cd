"""What is kept of each request where steps are: its stays in the queue, their causes, its work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from policylab.sim.history import History, Stay
from policylab.sim.run import Engine, Run, run

TIGHT = Engine(num_blocks=200, max_num_seqs=16)


@pytest.fixture(scope="module")
def pressed() -> Run:
    return run("fcfs", "log-uniform(num_requests=60)", TIGHT, rate=12.3, steps=True)


def test_causes_of_all_stays_are_the_waits_of_the_request(pressed: Run) -> None:
    history, requests = pressed.history, pressed.requests
    assert history is not None and len(history) == len(requests)
    assert requests.counts("num_preempted").any()
    for place, stays in enumerate(history.stays):
        sums: dict[str, float] = {}
        for stay in stays:
            assert sum(stay.causes.values()) == pytest.approx(stay.end - stay.start, abs=1e-9)
            for cause, seconds in stay.causes.items():
                assert cause.startswith("preempted") is stay.is_again
                sums[cause] = sums.get(cause, 0.0) + seconds
        waits = {c: float(column[place]) for c, column in requests.waits.items() if column[place]}
        assert sums == pytest.approx(waits, abs=1e-9)
        again = sum(stay.is_again for stay in stays)
        assert again == requests.counts("num_preempted")[place]


def test_work_adds_up_to_what_steps_computed(pressed: Run) -> None:
    assert pressed.history is not None and pressed.steps is not None
    computed = np.zeros(len(pressed.steps))
    rows = np.zeros(len(pressed.steps))
    for _, first, last, count in pressed.history.work.tolist():
        computed[first : last + 1] += count
        rows[first : last + 1] += 1
    assert computed.tolist() == pressed.steps[:, 3].tolist()
    assert rows.tolist() == pressed.steps[:, 2].tolist()


def test_a_run_file_has_it_and_the_same_seed_gives_the_same_bytes(pressed: Run, tmp_path) -> None:
    first, again = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    pressed.write(first)
    run("fcfs", "log-uniform(num_requests=60)", TIGHT, rate=12.3, steps=True).write(again)
    assert first.read_bytes() == again.read_bytes()
    read = Run.read(first)
    assert read.history is not None and pressed.history is not None
    assert read.history.events == pressed.history.events
    assert read.history.stays == pressed.history.stays
    read.write(again)
    assert first.read_bytes() == again.read_bytes()


def test_a_run_without_steps_keeps_none() -> None:
    few = run("fcfs", "log-uniform(num_requests=10)", Engine(), rate=16.0)
    assert few.history is None
    assert not any(line.startswith((b'{"history"', b'{"work"')) for line in few.lines())


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_make_no_difference_to_what_is_decided(depth: int) -> None:
    """Kept, they are taken one by one; else runs jump over those that repeat."""
    engine = replace(TIGHT, depth=depth)
    kept, plain = (
        run("fcfs", "log-uniform(num_requests=80)", engine, rate=15.0, steps=steps)
        for steps in (True, False)
    )
    assert plain.totals["decisions"] == kept.totals["decisions"]


def test_preemptions_told_together_are_told_apart_by_their_lengths() -> None:
    history = History()
    history.came()
    events = [
        *(("queued", 10.0), ("scheduled", 11.0), ("preempted", 12.0), ("scheduled", 14.0)),
        *(("preempted", 15.0), ("scheduled", 15.5)),
    ]
    waits = {"preempted by b": 0.5, "seats": 1.0, "preempted by a": 2.0}
    history.report(0, events, waits, 10.0)
    assert history.stays[0] == [
        Stay(0.0, 1.0, {"seats": 1.0}),
        Stay(2.0, 4.0, {"preempted by a": 2.0}, True),
        Stay(5.0, 5.5, {"preempted by b": 0.5}, True),
    ]


def test_a_stay_that_no_start_ended_is_over_at_the_end() -> None:
    history = History()
    history.came()
    history.report(0, [("queued", 1.0)], {"KV blocks": 2.0}, 0.0)
    history.ended(0, 3.0)
    assert history.stays[0] == [Stay(1.0, 3.0, {"KV blocks": 2.0})]

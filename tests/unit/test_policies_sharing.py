"""Policies that share: the cache among requests, the engine among users and programs."""

from __future__ import annotations

import pytest
from support.timed import TimedRun, timed_run

from engine.sched.policies.dlpm import DLPM
from engine.sched.policies.fcfs import FCFS
from engine.sched.policies.k_lpm import KLPM
from engine.sched.policies.lpm import LPM
from engine.sched.policies.plas import PLAS
from engine.sched.policies.vtc import VTC

KNOWN = list(range(256))


def warm(policy, **options) -> TimedRun:
    """One seat, and ``KNOWN`` is in the cache."""
    run = timed_run(policy, max_num_seqs=1, **options)
    run.ask("known", [*KNOWN, 0])
    run.drain()
    return run


# -- the cache


def test_lpm_takes_the_longest_match_first():
    run = warm(LPM())
    run.ask("none", 40)
    run.ask("little", [*KNOWN[:32], 7])
    run.ask("much", [*KNOWN, 8])
    run.ask("medium", [*KNOWN[:160], 9])
    assert run.order()[1:] == ["much", "medium", "little", "none"]


def test_k_lpm_gives_every_kth_start_to_the_oldest():
    policy = KLPM(k=3)
    run = warm(policy)
    policy.num_started = 0
    for index in range(3):
        run.ask(f"old{index}", 40)
    for index in range(6):
        run.ask(f"match{index}", [*KNOWN[: 256 - 32 * index], 100 + index])
    order = run.order()[1:]
    assert order[0::3] == ["old0", "old1", "old2"]
    assert order[1:3] + order[4:6] + order[7:9] == [f"match{index}" for index in range(6)]


# -- users


def backlog(policy, weights=None) -> tuple[TimedRun, list[dict[str, int]]]:
    """Two users with forty requests each, the first user's all before the second's.

    Returns the run and the tokens, prompt plus twice output, that each had got after each step.
    """
    run = timed_run(
        policy, max_num_seqs=4, max_num_batched_tokens=64, user_weights=weights or {}, caching=False
    )
    for user, length in (("a", 24), ("b", 16)):
        for index in range(40):
            run.ask(f"{user}{index}", length, 16, user=user)
    served, seen = {"a": 0, "b": 0}, []
    while run.step():
        for req in run.scheduler.view.unfinished:
            assert req.num_preempted == 0
        for name, count in run.plans[-1].items():
            served[name[0]] += count if count > 1 else 2 * count
        waiting = {req.user for req in run.scheduler.view.waiting}
        if waiting == {"a", "b"}:
            seen.append(dict(served))
    return run, seen


def test_vtc_bounds_the_gap_between_two_backlogged_users():
    bound = 2 * max(1 * 24, 2 * 4 * (24 + 16))  # longest prompt; tokens of a full batch
    _, fair = backlog(VTC())
    _, plain = backlog(FCFS())
    assert len(fair) > 100
    assert max(abs(at["a"] - at["b"]) for at in fair) <= bound / 4, "much better than it must be"
    assert max(abs(at["a"] - at["b"]) for at in plain) > bound


def test_vtc_serves_users_by_their_weights():
    _, seen = backlog(VTC(), weights={"a": 3.0})
    assert seen[-1]["a"] / seen[-1]["b"] == pytest.approx(3.0, rel=0.15)


def test_vtc_gives_no_credit_for_being_away():
    run = timed_run(VTC(), max_num_seqs=2, caching=False)
    for index in range(60):
        run.ask(f"a{index}", 16, 8, user="a")
    run.steps(80)
    for index in range(40):
        run.ask(f"b{index}", 16, 8, user="b")
    before = len(run.started)
    run.drain()
    after = run.started[before : before + 20]
    assert 8 <= sum(name.startswith("b") for name in after) <= 13, after


def test_vtc_remembers_the_level_while_nobody_is_there():
    run = timed_run(VTC(), max_num_seqs=1, caching=False)
    for index in range(20):
        run.ask(f"a{index}", 16, 8, user="a")
    run.drain()
    for index in range(10):
        run.ask(f"b{index}", 16, 8, user="b")
        run.ask(f"A{index}", 16, 8, user="a")
    order = run.order()[20:]
    assert 4 <= sum(name.startswith("b") for name in order[:10]) <= 6


def test_dlpm_takes_the_best_match_among_users_in_credit():
    policy = DLPM(quantum=100, output_price=2.0)
    run = warm(policy)
    for index in range(12):
        run.ask(f"a{index}", [*KNOWN, 100 + index], 20, user="a")  # 40 and a few each
    for index in range(12):
        run.ask(f"b{index}", 40, 20, user="b")  # 80 each
    order = run.order()[1:]
    assert order[:3] == ["a0", "a1", "a2"], "matches first, until the credit is spent"
    assert order[3:5] == ["b0", "b1"], "then who has credit left"
    for end in range(6, 16):
        spent = {"a": 0.0, "b": 0.0}
        for name in order[:end]:
            spent[name[0]] += 47 if name[0] == "a" else 80
        assert abs(spent["a"] - spent["b"]) <= 100 + 80


# -- programs


def test_plas_serves_the_program_that_was_served_least():
    run = timed_run(PLAS(), max_num_seqs=1)
    for index in range(3):
        run.ask(f"long{index}", 8, 10, hints={"program": "long"})
        run.drain()
    run.ask("brief", 8, 2, hints={"program": "brief"})
    run.drain()
    run.ask("long again", 8, 2, hints={"program": "long"})
    run.ask("brief again", 8, 2, hints={"program": "brief"})
    run.ask("alone", 8, 2)
    assert run.order()[4:] == ["alone", "brief again", "long again"]


def test_plas_forgets_the_programs_longest_idle():
    policy = PLAS(max_programs=2)
    run = timed_run(policy)
    for name in ("a", "b", "a", "c"):
        run.ask(f"{name}{run.clock.now}", 8, 2, hints={"program": name})
        run.drain()
    assert list(policy.service) == ["a", "c"]

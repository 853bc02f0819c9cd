"""The page of shipped policies says what docstrings, claims and kept figures say, no more and no
less."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import pytest

from engine.sched.policies import POLICIES
from policylab.sim.estimate import chance, corrected, mean_over
from policylab.sim.run import Engine
from tools import policies_table
from tools.policies_claims import CLAIMS, HIGHER, LOWER, Claim
from tools.policies_figures import BASE, outcome, read, with_policies, with_seeds, written
from tools.policies_measure import NUM_SEEDS, simulated
from tools.policies_scenes import SCENES, SHOWN, Scene

TINY = {
    "log-uniform": Scene(
        workload="log-uniform(prompt_tokens=(16, 128), output_tokens=(4, 32))",
        engine=Engine(max_num_seqs=4, num_blocks=40),
        load=1.0,
        shows="few of all sizes",
    )
}
NAMES = (BASE, "residual-sjf")


def kept_figures() -> dict[str, Any]:
    return read(policies_table.RESULTS)


@cache
def tiny(num_seeds: int = 2) -> dict[str, Any]:
    found = simulated(None, NAMES, num_requests=40, num_seeds=num_seeds, scenes=TINY)
    assert found is not None
    return found


def test_the_page_is_what_is_written_of_the_kept_figures() -> None:
    page = policies_table.TARGET.read_text(encoding="utf-8")
    assert page == policies_table.written_page(), "run: python tools/policies_table.py"


def test_every_policy_but_fcfs_has_a_claim() -> None:
    assert CLAIMS.keys() == POLICIES.keys() - {BASE}
    for policy, claims in CLAIMS.items():
        assert claims.claims, policy
        for claim in claims.claims:
            assert claim.direction in (LOWER, HIGHER), policy
            assert claim.figure in (*SHOWN, *SCENES[claim.scene].figures), policy


def test_all_policies_are_measured_on_six_workloads() -> None:
    scenes = kept_figures()["scenes"]
    assert scenes.keys() == SCENES.keys()
    assert len(scenes) == 6
    for scene in scenes.values():
        assert scene["policies"].keys() == POLICIES.keys()


def test_each_policy_does_what_is_claimed_of_it_or_is_said_to_lack_something() -> None:
    kept = kept_figures()
    if kept["seeds"] < NUM_SEEDS:
        pytest.skip(f"{kept['seeds']} seeds are kept, of {NUM_SEEDS}: chance would decide")
    for policy, claims in CLAIMS.items():
        found = [(policies_table.of_claim(kept, policy, each), each) for each in claims.claims]
        is_seen = any(policies_table.verdict(*each) == "as claimed" for each in found)
        assert is_seen or claims.lacks, policy


def test_no_collapse_is_without_a_reason() -> None:
    assert policies_table.NO_REASON not in policies_table.page(kept_figures())


def test_two_policies_on_a_tiny_workload_make_a_page() -> None:
    page = policies_table.page(tiny(), TINY)
    assert "### `log-uniform`: few of all sizes" in page
    assert "from 2 seeds" in page
    (line,) = (each for each in page.splitlines() if each.startswith("| `residual-sjf` | shorter"))
    assert "`ttft.mean` lower, `log-uniform`" in line
    assert line.endswith(("| as claimed |", "| undecided |"))


def test_seeds_are_added_to_those_that_are_kept() -> None:
    one = tiny(1)
    both = simulated(one, NAMES, num_requests=40, num_seeds=2, scenes=TINY)
    assert both == tiny()
    same = simulated(both, NAMES, num_requests=40, num_seeds=2, scenes=TINY)
    assert same == both


def test_a_policy_is_added_to_those_that_are_kept() -> None:
    both = simulated(tiny(), ["hrrn"], num_requests=40, num_seeds=2, scenes=TINY)
    assert both is not None
    found = both["scenes"]["log-uniform"]["policies"]
    assert found.keys() == {*NAMES, "hrrn"}
    assert len(found["hrrn"]["figures"]["ttft.mean"]) == 2


def test_figures_of_other_requests_are_not_mixed() -> None:
    other = {**tiny(), "requests": 41}
    with pytest.raises(SystemExit, match="measure all afresh"):
        with_seeds(tiny(), other)
    with pytest.raises(SystemExit, match="measure all afresh"):
        simulated(tiny(), NAMES, num_requests=41, scenes=TINY)
    with pytest.raises(SystemExit, match="1 seeds were measured, 2 are kept"):
        with_policies(tiny(), tiny(1))


def test_kept_figures_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "policies.json"
    path.write_text(written(tiny()), encoding="utf-8")
    assert read(path) == tiny()


def test_fcfs_does_not_differ_from_itself() -> None:
    base = tiny()["scenes"]["log-uniform"]["policies"][BASE]
    found = outcome(base, "ttft.mean")
    assert found is not None and found.is_equal
    assert policies_table.change(found) == "="


def made(figures: dict[str, list[tuple[float | None, float | None]]]) -> dict[str, Any]:
    return {"overloaded": 0, "figures": figures}


def test_a_difference_is_told_by_the_ratio_of_each_seed() -> None:
    found = outcome(made({"ttft.mean": [(0.5, 1.0), (5.0, 10.0)]}), "ttft.mean")
    assert found is not None
    assert found.by == pytest.approx((-0.5, -0.5, -0.5))
    assert policies_table.change(found) == "-50 ±0 %"
    shares = outcome(made({"attainment": [(0.5, 0.25), (0.75, 0.5)]}), "attainment")
    assert policies_table.change(shares) == "+25 ±0 pt"


def test_a_figure_that_few_seeds_have_is_none() -> None:
    assert outcome(made({"ttft.mean": [(None, 1.0), (2.0, 1.0)]}), "ttft.mean") is None


@pytest.mark.parametrize(
    ("pairs", "direction", "said"),
    [
        ([(1.0, 2.0), (1.1, 2.0)], LOWER, "as claimed"),
        ([(1.0, 2.0), (1.1, 2.0)], HIGHER, "the other way"),
        ([(1.0, 2.0), (3.0, 2.0)], LOWER, "undecided"),
        ([(2.0, 2.0), (3.0, 3.0)], LOWER, "equal"),
        ([(None, 2.0), (None, 2.0)], LOWER, "no figure"),
    ],
)
def test_verdicts(pairs: Any, direction: str, said: str) -> None:
    claim = Claim("log-uniform", "ttft.mean", direction, "")
    assert policies_table.verdict(outcome(made({"ttft.mean": pairs}), "ttft.mean"), claim) == said


@pytest.mark.parametrize("policy", ["ltr", "residual-sjf"])
def test_who_serves_little_gets_a_line_that_says_why(policy: str) -> None:
    kept = tiny()
    scene = kept["scenes"]["log-uniform"]
    slow = made({"tokens_per_second": [(50, 100)] * 2, "recomputed": [(0.6, 0.01)] * 2})
    kept = {**kept, "scenes": {"log-uniform": {**scene, "policies": {**scene["policies"]}}}}
    kept["scenes"]["log-uniform"]["policies"][policy] = slow
    page = policies_table.page(kept, TINY)
    (line,) = (each for each in page.splitlines() if each.startswith(f"* `{policy}`: on"))
    assert "on `log-uniform` it computes 60 % again and serves 0.50" in line
    assert (CLAIMS[policy].costs or policies_table.NO_REASON) in line


def test_a_scene_of_all_at_once_has_no_rate() -> None:
    scenes = {"log-uniform": replace(TINY["log-uniform"], load=inf)}
    found = simulated(None, [BASE], num_requests=10, num_seeds=1, scenes=scenes)
    assert found is not None
    assert found["scenes"]["log-uniform"]["rate"] is None
    assert "all at once;" in policies_table.page(found, scenes)


def test_a_chance_is_that_of_students_interval() -> None:
    """An interval that just holds 0 is a chance of 1 in 20."""
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    touching = [value - mean_over(values).low for value in values]
    assert chance(touching) == pytest.approx(0.05, abs=1e-6)
    assert chance([1.0, -1.0]) == pytest.approx(1.0)
    assert chance([0.0, 0.0]) == 1.0 and chance([2.0]) == 1.0 and chance([2.0, 2.0]) == 0.0
    assert chance([10.0, 10.1, 9.9, 10.0]) == pytest.approx(1.5e-7, rel=0.01)


def test_chances_are_corrected_for_their_number() -> None:
    assert corrected([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert corrected([0.6, 0.7]) == [1.0, 1.0] and corrected([]) == []


def test_claims_that_only_look_decided_alone_are_not_decided_among_many() -> None:
    kept = kept_figures()
    claims = policies_table.all_claims(kept)
    assert len(claims) == 38
    alone = [
        policies_table.verdict(policies_table.of_claim(kept, *each), each[1]) for each in claims
    ]
    among = policies_table.verdicts(kept, claims)
    assert {"undecided among 38", "as claimed"} <= set(among)
    pairs = list(zip(alone, among, strict=True))
    assert all(one == all_ or all_ == "undecided among 38" for one, all_ in pairs)
    (first,) = policies_table.verdicts(kept, claims[:1])
    assert first == alone[0]


def test_fresh_figures_say_which_verdicts_are_lost() -> None:
    kept = kept_figures()
    assert not policies_table.lost_verdicts(kept, kept)
    decided = policies_table.decided_claims(kept)
    policy, claim, _ = decided[0]
    scenes = {**kept["scenes"]}
    scene = {**scenes[claim.scene], "policies": {**scenes[claim.scene]["policies"]}}
    scene["policies"][policy] = made({claim.figure: [(1.0, 2.0), (3.0, 2.0)]})
    fresh = {**kept, "scenes": {**scenes, claim.scene: scene}}
    lost = policies_table.lost_verdicts(kept, fresh)
    assert (policy, claim, "undecided") in lost
    assert all(each[0] == policy for each in lost)

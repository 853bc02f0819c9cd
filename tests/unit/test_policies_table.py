"""The page of shipped policies says what their docstrings say, and what was measured."""

from __future__ import annotations

from engine.sched.policies import POLICIES
from engine.sim.figures import NAMES
from engine.sim.run import Engine, Variant, check
from engine.sim.workloads import find_workload
from tools import policies_table
from tools.policies_claims import CLAIMS
from tools.policies_measure import measured


def test_the_table_of_policies_is_up_to_date() -> None:
    written = policies_table.TARGET.read_text(encoding="utf-8")
    assert written == policies_table.table(), "run: python tools/policies_table.py"


def test_every_policy_but_fcfs_has_a_claim_that_can_be_measured() -> None:
    assert CLAIMS.keys() == POLICIES.keys() - {"fcfs"}
    for name, claim in CLAIMS.items():
        assert claim.figure in NAMES and claim.direction in ("less", "more")
        policy = Variant(name, claim.options) if claim.options else name
        check([policy], find_workload(claim.workload), Engine(**claim.engine))


def test_what_was_measured_becomes_a_page() -> None:
    found = measured(["sarathi", "vtc"], ["two-users"], seeds=2, requests=60, jobs=1)
    page = policies_table.measured(found)
    assert "### `two-users`" in page and "| `fcfs` | 0." in page
    assert [line.split(" | ")[0] for line in page.splitlines() if " `itl.p99` |" in line] == [
        "| `sarathi`"
    ]
    assert found["claims"]["vtc"]["verdict"] in ("holds", "undecided", "the opposite holds")

"""Figures of a run: exact where it can be said by hand, absent where they would mean nothing."""

from __future__ import annotations

from math import inf, isnan, sqrt

import numpy as np
import pytest

from engine.errors import ConfigError
from policylab.sim.estimate import (
    Estimate,
    difference,
    mean_of,
    mean_over,
    quantile_of,
    ranks_around,
    student,
    weighted_quantile,
)
from policylab.sim.figures import NAMES, collapse, figures, period_of
from policylab.sim.job import Job, Span
from policylab.sim.promises import slo
from policylab.sim.records import DONE, REFUSED, Requests
from policylab.sim.run import FORMAT, Run, run
from policylab.sim.steady import (
    AT_ONCE,
    BACKLOG,
    OVERLOADED,
    STEADY,
    Window,
    is_growing,
    warmup,
    window,
)


def made(rows: list[dict], gaps: list[tuple[float, float, int]] = (), **totals: object) -> Run:
    """A run that saw these requests: what ``Job`` takes, and scheduled, first and last."""
    requests = Requests()
    for number, row in enumerate(rows):
        job = {"arrival": 0.0, "num_output": 1, "prompt": (Span("a", row.get("num_prompt", 1)),)}
        job |= {k: v for k, v in row.items() if k in Job.__dataclass_fields__}
        place = requests.add(Job(request_id=f"r{number}", **job))
        for name in ("scheduled", "first", "last", "longest_gap"):
            requests.times(name)[place] = row.get(name, np.nan)
        requests.end(place, row.get("outcome", DONE))
    counts = ("num_scheduled_tokens", "prefix_hits", "num_preemptions", "num_steps")
    known: dict[str, object] = dict.fromkeys(counts, 0)
    known |= {"num_policy_faults": 0, "num_rescued_steps": 0, "kv_peak": 0.5, "counters": {}}
    return Run(
        head={"format": FORMAT, "policy": "made", "engine": {}},
        requests=requests,
        gaps=np.array(gaps, dtype=np.float64).reshape(-1, 3),
        steps=None,
        totals=known | totals,
    )


WHOLE = Window(0.0, 10.0, 0, STEADY)
TWO = [
    {"arrival": 1.0, "scheduled": 1.5, "first": 2.0, "last": 5.0, "num_output": 4},
    {"arrival": 3.0, "scheduled": 3.0, "first": 4.0, "last": 4.0, "num_prompt": 9},
]


def test_latencies_are_what_their_names_say() -> None:
    found = figures(made(TWO, [(3.0, 1.0, 1), (4.5, 1.5, 1), (5.0, 0.5, 1)]), period=WHOLE)
    assert found.value("ttft.mean") == 1.0 and found.value("ttft.p99") == 1.0
    assert found.value("tpot.mean") == (3.0 / 3 + 0.0) / 2
    assert found.value("e2e.mean") == (4.0 + 1.0) / 2
    assert found.value("normalised.p50") == 1.0 and found.value("normalised.mean") == 1.0
    assert found.value("delay.mean") == 0.25
    assert found.value("itl.mean") == 1.0 and found.value("itl.p99") == 1.5
    assert (found.requests_per_second, found.tokens_per_second) == (0.2, 0.5)
    assert found.makespan == 5.0
    assert sorted(found.values()) == sorted(NAMES)
    with pytest.raises(ConfigError, match=r"figure 'ttft' is not known; figures are: ttft\.mean, "):
        found.value("ttft")


def test_warm_up_is_left_out_and_what_ends_after_the_last_arrival_is_not() -> None:
    later = Window(2.0, 3.0, 1, STEADY)
    found = figures(made(TWO), period=later)
    assert found.num_counted == 1 and found.value("e2e.mean") == 1.0
    assert found.requests_per_second == 0.0  # it ended behind the period


def test_an_slo_is_kept_or_not_by_each_request() -> None:
    refused = {"arrival": 4.0, "outcome": REFUSED}
    found = figures(made([*TWO, refused]), period=WHOLE, slo=slo("ttft<2,tpot<0.5"))
    assert (found.kept.num_promised, found.kept.num_kept) == (3, 1)
    assert found.kept.attainment == 1 / 3 and found.kept.goodput == 0.1
    assert found.num_refused == 1
    assert isnan(figures(made(TWO), period=WHOLE).kept.attainment)  # nothing was promised


def test_promises_of_requests_are_their_own() -> None:
    gold = {"tier": "gold", "ttft": 1.0, "longest_gap": 1.0}
    rows = [TWO[0] | gold | {"tbt": 0.9}, TWO[1] | gold, TWO[1] | {"deadline": 0.5}, TWO[1]]
    kept = figures(made(rows), period=WHOLE).kept
    assert (kept.num_promised, kept.num_kept) == (3, 1)
    assert kept.by_tier == {"gold": (2, 1)}


def test_service_is_even_or_not_while_users_wait() -> None:
    """Two users whose requests all wait from the start; one is served first."""

    def rows(order: str) -> list[dict]:
        return [
            {
                "user": user,
                "num_prompt": 100,
                "scheduled": float(place),
                "first": place + 0.5,
                "last": place + 1.0,
                "num_output": 11,
            }
            for place, user in enumerate(order)
        ]

    period = Window(0.0, 8.0, 0, STEADY)
    even = figures(made(rows("abababab")), period=period).service
    uneven = figures(made(rows("aaaabbbb")), period=period).service
    assert even is not None and uneven is not None
    assert even.gap == pytest.approx(100 + 22) and uneven.gap == pytest.approx(3 * 122)
    assert uneven.jain < even.jain
    assert [(user.name, user.num_done, user.output_tokens) for user in even.users] == [
        *(("a", 4, 44), ("b", 4, 44)),
    ]
    assert uneven.users[0].ttft == 2.0 and uneven.users[1].ttft == 6.0
    assert figures(made(TWO), period=WHOLE).service is None  # one user


def test_recomputed_is_what_was_computed_beyond_need() -> None:
    found = figures(made(TWO, num_scheduled_tokens=20, prefix_hits=1), period=WHOLE)
    assert found.recomputed == (20 - (1 + 3 + 9 + 0 - 1)) / 20


def test_a_collapse_is_said() -> None:
    assert collapse("x", 0.2, 90.0, 100.0) is None
    assert collapse("x", 0.3, 90.0, 100.0) == "x collapses: it recomputes 30 % of its tokens"
    both = collapse("x", 0.3, 79.0, 100.0)
    assert both is not None and both.endswith("tokens and serves 0.79 of fcfs's tokens per second")


def test_slowdown_is_against_the_request_alone() -> None:
    found = figures(run("fcfs", "log-uniform(num_requests=20)", rate=1e-3))
    assert found.value("slowdown.mean") == pytest.approx(1.0, abs=1e-6)
    assert sum(each.num_requests for each in found.slowdown) == found.num_counted


def test_a_growing_queue_has_no_means() -> None:
    over = figures(run("fcfs", "log-uniform(num_requests=400)", load=1.5))
    assert over.is_overloaded and over.latency == {} and isnan(over.value("ttft.mean"))
    assert over.slowdown == [] and over.tokens_per_second > 0
    below = figures(run("fcfs", "log-uniform(num_requests=400)", load=0.6))
    assert not below.is_overloaded and below.value("ttft.mean") > 0
    once = figures(run("fcfs", "log-uniform(num_requests=40)", rate=inf))
    assert once.window.state == AT_ONCE and once.window.num_warmup == 0
    assert once.requests_per_second == 40 / once.makespan


# The rule for warm-up and growth


def test_warm_up_ends_where_the_series_levels_off() -> None:
    dice = np.random.default_rng(0)
    rising = np.minimum(1.0, np.arange(1000) / 200) * 10 + dice.normal(0, 0.5, 1000)
    assert 150 <= warmup(rising) <= 260
    assert warmup(np.ones(1000)) == 0 and warmup(np.ones(3)) == 0


def test_a_queue_grows_or_does_not() -> None:
    dice = np.random.default_rng(0)
    noise = dice.normal(0, 5, 1000)
    assert is_growing(32 + 0.1 * np.arange(1000) + noise)
    assert not is_growing(32 + noise) and not is_growing(np.arange(40.0))


def starved(tag: dict[str, object], number: int) -> Run:
    """A run in which this many of 1,000 requests do not end before all have arrived."""
    rows = []
    for place in range(1000):
        is_last = place % (1000 // number) == 0
        took = 5000.0 - place if is_last else 1.0
        row = {"arrival": float(place), "scheduled": place + 0.1, "first": place + took - 0.5}
        rows.append({**row, "last": place + took, "num_output": 2, **(tag if is_last else {})})
    return made(rows)


@pytest.mark.parametrize(
    ("tag", "what"),
    [
        ({"tier": "batch"}, "the number of its requests of tier 'batch'"),
        ({"user": "ann"}, "the number of its requests of user 'ann'"),
        ({"priority": 1}, "the number of its requests of priority '1'"),
        ({"num_prompt": 900}, "the number of its requests with the longest prompts"),
    ],
)
@pytest.mark.parametrize("number", [25, 50])
def test_a_class_that_starves_is_overload(tag: dict[str, object], what: str, number: int) -> None:
    """The queue of all grows by five requests in a hundred or less, which may be chance."""
    found = window(starved(tag, number).requests)
    assert found.state == OVERLOADED and found.growing == what
    assert window(starved({}, number).requests).state == STEADY


def test_a_backlog_has_means_and_lasts_until_the_last_token() -> None:
    """At a rate far above what any scheduler could serve the rate no longer matters."""
    found = [
        figures(run("fcfs", "log-uniform(num_requests=120)", rate=rate)) for rate in (400.0, 2000.0)
    ]
    for each in found:
        assert each.window.state == BACKLOG and each.window.num_warmup == 0
        assert each.num_counted == 120 and each.window.end == each.makespan
        assert each.requests_per_second == pytest.approx(120 / each.makespan)
        assert each.value("ttft.mean") > 0
    assert found[0].requests_per_second == pytest.approx(found[1].requests_per_second, rel=0.05)


def test_the_whole_of_a_run_counts_if_it_is_wanted() -> None:
    over = run("fcfs", "log-uniform(num_requests=200)", load=1.6)
    period = period_of(over)
    assert period.state == OVERLOADED and period.growing == "its queue"
    whole = figures(over, period=period.whole())
    assert whole.window.state == "whole" and not whole.is_overloaded
    assert whole.num_counted == 200 and whole.window.end == whole.makespan
    assert whole.value("e2e.mean") == pytest.approx(whole.mean_e2e)


def test_nearly_half_a_run_of_warm_up_is_short() -> None:
    """The series falls to the very middle: the rule stops at its bound, or right before it."""
    rows = [
        {"arrival": float(n), "first": n + max(0.0, 480 - n), "last": n + max(0.5, 480.0 - n)}
        for n in range(1000)
    ]
    found = window(made(rows).requests)
    assert found.state == STEADY and found.is_short and found.num_warmup < 500


def test_the_period_of_several_runs_is_the_later_one() -> None:
    early, late = Window(1.0, 9.0, 10, STEADY), Window(3.0, 9.0, 30, STEADY)
    assert early.joined(late) == late.joined(early) == late
    over = late._replace(state=OVERLOADED)
    assert early.joined(over).state == STEADY and early.joined(over).start == 3.0
    assert window(Requests()).seconds == 0.0


# Intervals


def test_intervals_hold_the_true_value_nineteen_times_in_twenty() -> None:
    dice = np.random.default_rng(1)
    samples = dice.exponential(1.0, (400, 200))
    for of, true in (
        (mean_of, 1.0),
        (lambda values: mean_over(values.tolist()), 1.0),
        (lambda values: quantile_of(values, 0.9), np.log(10)),
    ):
        held = np.mean([of(values).low <= true <= of(values).high for values in samples])
        assert 0.90 <= held <= 0.99
    pairs = zip(samples[:200, :8], samples[200:, :6], strict=True)
    held = np.mean([difference(a.tolist(), b.tolist()).holds_zero for a, b in pairs])
    assert 0.90 <= held <= 0.99


def test_quantiles_are_values_that_occurred() -> None:
    values = np.array([4.0, 1.0, 3.0, 2.0])
    assert [quantile_of(values, p).value for p in (0.25, 0.5, 0.99, 1.0)] == [1, 2, 4, 4]
    assert quantile_of(values, 0.99).high == inf  # four values cannot bound it
    assert isnan(quantile_of(np.empty(0), 0.5).value)
    assert weighted_quantile(values, np.array([1.0, 97.0, 1.0, 1.0]), 0.97).value == 1.0
    low, high = ranks_around(9500, 0.99)
    assert abs(low / 9500 - 0.988) < 3e-4 and abs(high / 9500 - 0.992) < 3e-4


def test_students_factor() -> None:
    for degrees, factor in ((1, 12.706), (4, 2.776), (19, 2.093), (1000, 1.962)):
        assert student(degrees) == pytest.approx(factor, abs=1e-3)
    assert mean_over([1.0]) == Estimate(1.0, -inf, inf)
    three = mean_over([1.0, 2.0, 3.0])
    assert three.high - 2.0 == pytest.approx(4.303 / sqrt(3), abs=1e-3)

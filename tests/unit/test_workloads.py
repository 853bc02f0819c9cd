"""Workloads: as many, as long, as bursty and as alike as they say, and the same for a seed."""

from __future__ import annotations

import tracemalloc
from collections import Counter, deque
from itertools import islice, pairwise
from math import inf, isinf, log
from statistics import fmean, median

import numpy as np
import pytest

from engine.errors import ConfigError
from policylab.sim.job import END, Job, Span, tokens_of
from policylab.sim.run import Engine, run, scheduler_config
from policylab.sim.workloads import WORKLOADS, Workload, find_workload
from policylab.sim.workloads.arrivals import find_arrivals
from policylab.sim.workloads.describe import Description, as_if_served
from policylab.sim.workloads.draws import RandomDraws
from policylab.sim.workloads.lengths import SHARES, TRACES, Quantiles
from policylab.sim.workloads.reuse import PrefixReuse
from policylab.sim.workloads.sessions import Sessions

MADE_UP = [name for name, kind in sorted(WORKLOADS.items()) if not hasattr(kind, "size")]


def jobs_of(workload: Workload | str, seed: int = 0, rate: float | None = None) -> list[Job]:
    found = find_workload(workload) if isinstance(workload, str) else workload
    return list(as_if_served(found.source(seed, rate)))


def described(workload: str, seed: int = 0) -> Description:
    found = find_workload(workload)
    description = Description(found.block_size)
    for job in as_if_served(found.source(seed)):
        description.add(job)
    return description


# What holds of all kinds


@pytest.mark.parametrize("name", MADE_UP)
def test_a_seed_gives_the_same_jobs_within_what_was_said(name: str) -> None:
    workload = find_workload(name, num_requests=500)
    jobs = jobs_of(workload)
    assert len(jobs) == 500 and len({job.request_id for job in jobs}) == 500
    assert jobs == jobs_of(workload) and jobs != jobs_of(workload, seed=1)
    assert all(earlier.arrival <= later.arrival for earlier, later in pairwise(jobs))
    assert all(1 <= job.num_prompt <= workload.max_prompt for job in jobs)
    assert all(1 <= job.num_output <= workload.max_output for job in jobs)
    assert find_workload(str(workload)) == workload


@pytest.mark.parametrize("name", MADE_UP)
def test_a_rate_stretches_gaps_and_leaves_the_rest(name: str) -> None:
    workload = find_workload(name, num_requests=300)
    if workload.natural_rate is None:
        with pytest.raises(ConfigError, match="has no rate; leave it out"):
            workload.source(0, 2.0)
        return
    slow, fast = jobs_of(workload, rate=0.01), jobs_of(workload, rate=0.02)
    assert {job.request_id: job.prompt for job in slow} == {j.request_id: j.prompt for j in fast}
    assert slow[-1].arrival == pytest.approx(2 * fast[-1].arrival, rel=0.05)
    assert len(fast) / fast[-1].arrival == pytest.approx(0.02, rel=0.25)
    at_once = workload.source(0, inf)
    while not isinf(at_once.next_time):
        job = at_once.take()
        assert job.arrival == 0.0
        at_once.ended(job, 0.0)


@pytest.mark.parametrize("name", ["azure-conv", "mooncake-conv", "conversations", "closed-loop"])
def test_a_source_holds_no_more_for_more_jobs(name: str) -> None:
    peaks = []
    for num_requests in (8_000, 16_000):
        source = find_workload(name, num_requests=num_requests).source(0)
        tracemalloc.start()
        deque(as_if_served(source), maxlen=0)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0] + 500_000 and peaks[1] < 6_000_000


def test_another_option_leaves_all_other_draws_as_they_were() -> None:
    plain = jobs_of("azure-conv(num_requests=200)")
    other = jobs_of("azure-conv(num_requests=100,arrivals='gamma(cv=3)',num_users=5)")
    assert [job.prompt for job in other] == [job.prompt for job in plain[:100]]
    assert [job.num_output for job in other] == [job.num_output for job in plain[:100]]
    assert [job.arrival for job in other] != [job.arrival for job in plain[:100]]


# Lengths


def _hold_lengths(name: str, number: int, tail: float = 0.03) -> None:
    for part, table in zip(("prompt", "output"), TRACES[name], strict=True):
        assert isinstance(table, Quantiles)
        drawn = table.draw(RandomDraws(0).stream(part), number)
        found = np.quantile(drawn, SHARES, method="inverted_cdf")
        for share, listed, value in zip(SHARES, table.values, found, strict=True):
            off = abs(value - listed)
            assert off <= max(1.0, (tail if share > 0.98 else 0.03) * listed), (name, part, share)
        assert drawn.mean() == pytest.approx(table.mean, rel=0.02)
        assert drawn.min() >= 1 and drawn.max() <= table.longest


@pytest.mark.parametrize("name", sorted(TRACES))
def test_lengths_meet_the_quantiles_of_their_trace(name: str) -> None:
    _hold_lengths(name, 200_000, tail=0.1)


def test_scaled_lengths_keep_their_shape() -> None:
    whole, half = (jobs_of(f"azure-conv(scale={scale})") for scale in (1.0, 0.5))
    ratio = fmean(job.num_prompt for job in half) / fmean(job.num_prompt for job in whole)
    assert ratio == pytest.approx(0.5, rel=0.01)
    assert find_workload("azure-conv(scale=0.5)").max_prompt == 7025


# Arrivals


def _dispersions(workload: str, seeds: int) -> tuple[float, float, float, float]:
    """Gap CV, dispersion of counts by the second and by the minute, and the rate; medians."""
    rows = []
    for seed in range(seeds):
        found = described(workload, seed)
        rows.append((found.gap_cv, found.dispersion(1.0), found.dispersion(60.0), found.rate))
    gap_cv, second, minute, rate = (median(column) for column in zip(*rows, strict=True))
    return gap_cv, second, minute, rate


@pytest.mark.slow
def test_arrivals_are_as_bursty_as_those_of_the_traces() -> None:
    gap_cv, second, minute, rate = _dispersions("azure-conv(num_requests=19366)", 20)
    assert gap_cv == pytest.approx(1.09, rel=0.1) and second == pytest.approx(1.39, rel=0.1)
    assert minute == pytest.approx(20.6, rel=0.1) and rate == pytest.approx(5.53, rel=0.02)
    gap_cv, _, minute, rate = _dispersions("azure-code(num_requests=8819)", 20)
    assert gap_cv == pytest.approx(13.2, rel=0.1) and minute == pytest.approx(161, rel=0.1)
    assert rate == pytest.approx(2.57, rel=0.03)


def times(arrivals: str, rate: float = 10.0, number: int = 20_000) -> np.ndarray:
    return np.array(
        list(islice(find_arrivals(arrivals).times(RandomDraws(0), rate, number), number))
    )


@pytest.mark.parametrize(
    ("arrivals", "cv"), [("poisson", 1.0), ("gamma(cv=2.5)", 2.5), ("gamma(cv=0)", 0.0)]
)
def test_gaps_vary_as_asked(arrivals: str, cv: float) -> None:
    gaps = np.diff(times(arrivals))
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-6)


def test_no_request_comes_while_arrivals_are_off() -> None:
    came = times("onoff(on=5,off=20,cv=0)")
    gaps = np.diff(came)
    assert len(came) / came[-1] == pytest.approx(10.0, rel=0.01)
    pauses = gaps[gaps > 1.0]
    assert pauses.sum() / came[-1] == pytest.approx(0.8, abs=0.08)
    assert np.median(gaps) == pytest.approx(0.02, rel=0.4)  # five times as fast while on


def test_a_ramp_rises_over_the_run_and_keeps_its_mean() -> None:
    came = times("ramp(first=0,last=2,cv=0)")
    assert came[-1] == pytest.approx(2000, rel=0.01)
    counts = np.histogram(came, bins=4, range=(0.0, 2000.0))[0]
    assert counts.tolist() == pytest.approx([1250, 3750, 6250, 8750], rel=0.02)


def test_bursts_come_at_the_end_of_each_period() -> None:
    came = times("burst(every=100,seconds=10,times_as_many=9,cv=0)")
    counts = np.bincount((came % 100 // 10).astype(int), minlength=10)
    assert counts[:9].std() < 0.02 * counts[0] and counts[9] == pytest.approx(
        9 * counts[0], rel=0.02
    )
    assert len(came) / came[-1] == pytest.approx(10.0, rel=0.01)


def test_a_rate_keeps_periods_that_were_given_in_seconds_but_plays_a_trace_faster() -> None:
    for rate in (1.0, 4.0):
        came = times("burst(every=100,seconds=10,times_as_many=1e6,cv=0)", rate, 1000)
        assert ((came % 100) >= 90).mean() > 0.98
    own, twice = (jobs_of("azure-code(num_requests=500)", rate=rate) for rate in (2.57, 5.14))
    assert [job.arrival for job in own] == pytest.approx([2 * job.arrival for job in twice])


# What requests share


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "share"),
    [("mooncake-conv(num_requests=12031)", 0.366), ("mooncake-synthetic(num_requests=3993)", 0.64)],
)
def test_an_endless_cache_finds_what_it_found_of_the_trace(workload: str, share: float) -> None:
    found = [described(workload, seed).reuse.share for seed in range(5)]
    assert median(found) == pytest.approx(share, abs=0.015)


def test_prefix_reuse_is_that_of_the_tokens() -> None:
    """Counted by the names of texts, and by their tokens."""
    for name in ("agents", "mooncake-synthetic(scale=0.05)", "log-uniform(shared_prefix=99)"):
        jobs = jobs_of(find_workload(name, num_requests=60), seed=3)
        reuse, known, found = PrefixReuse(16), set(), 0
        for job in jobs:
            reuse.add(job)
            tokens = job.tokens()
            heads = [hash(tuple(tokens[:upto])) for upto in range(16, len(tokens) + 1, 16)]
            found += 16 * sum(head in known for head in heads)
            known.update(heads)
        assert reuse.num_found == found > 0
        assert reuse.num_tokens == sum(job.num_prompt for job in jobs)


def test_a_turn_begins_with_all_that_was_said_and_answered() -> None:
    jobs = jobs_of("conversations(num_requests=400)")
    by_program: dict[str, list[Job]] = {}
    for job in jobs:
        by_program.setdefault(job.program, []).append(job)
    assert 3.0 < len(jobs) / len(by_program) < 5.0
    num_followed = 0
    for turns in by_program.values():
        for before, after in pairwise(turns):
            answer = (Span(f"answer:{before.request_id}", before.num_output - 1),)
            assert after.prompt[:-1] == before.prompt + (answer if before.num_output > 1 else ())
            assert after.arrival > before.arrival + 0.5
            num_followed += 1
    assert num_followed > 200
    answers = {jobs[0].request_id: list(range(2, 2 + jobs[0].num_output))}
    follower = next(job for job in jobs if job.program == jobs[0].program and job is not jobs[0])
    assert len(follower.tokens({})) == follower.num_prompt  # of one that was refused, nothing came
    begin = follower.tokens(answers)
    assert begin[: jobs[0].num_prompt] == jobs[0].tokens()
    assert begin[jobs[0].num_prompt :][: jobs[0].num_output - 1] == answers[jobs[0].request_id][:-1]


def test_sessions_come_as_asked() -> None:
    jobs = jobs_of("conversations(num_requests=4000,arrivals='ramp(first=0,last=2)',think=0)")
    first = [job.arrival for job in jobs if job.request_id.endswith(".1")]
    counts = np.histogram(first, bins=2, range=(0.0, 4000.0))[0]
    assert counts[1] / counts[0] == pytest.approx(3.0, rel=0.2)


@pytest.mark.parametrize(("sigma", "middle", "slow"), [(0.0, 4 * log(2), 0.0), (2.0, 0.54, 0.45)])
def test_pauses_may_have_a_heavy_tail(sigma: float, middle: float, slow: float) -> None:
    """Half of the time is then in the few that are longer than half a minute."""
    workload = find_workload("agents", think=4.0, think_sigma=sigma, turns=20.0, max_context=65536)
    assert isinstance(workload, Sessions)
    sessions = islice(workload.sessions(RandomDraws(1)), 1000)
    pauses = np.array([turn.pause for turns in sessions for turn in turns])
    assert pauses.mean() == pytest.approx(4.0, rel=0.1)
    assert np.median(pauses) == pytest.approx(middle, rel=0.1)
    assert pauses[pauses > 30].sum() / pauses.sum() == pytest.approx(slow, abs=0.15)


@pytest.mark.parametrize("name", ["closed-loop", "conversations", "agents"])
def test_those_that_follow_are_served(name: str) -> None:
    """And their prefix cache has what an endless one would have, but for the last blocks."""
    workload = find_workload(name, num_requests=60, deadlines=(5, 9))
    done = run("fcfs", workload, Engine(num_blocks=4000))
    assert done.requests.names["outcome"] == ["done"] * 60
    reuse = described(str(workload)).reuse
    assert done.totals["prefix_hits"] == pytest.approx(reuse.num_found, rel=0.1)


def test_agents_share_one_of_a_few_beginnings() -> None:
    jobs = jobs_of("agents(num_requests=300,num_systems=3,system_tokens=64)")
    assert {job.prompt[0] for job in jobs} == {Span(f"system {n}", 64) for n in range(3)}
    assert all(job.hints_for()["program"] == job.program for job in jobs)


def test_a_closed_loop_has_as_many_requests_as_clients() -> None:
    source = find_workload("closed-loop(clients=3,think=0,num_requests=10)").source(0)
    living, seen, now = [], [], 0.0
    while source.next_time <= now:
        living.append(source.take())
        if source.next_time > now:
            assert len(living) <= 3
            seen.append(living.pop(0))
            now += 1.0
            source.ended(seen[-1], now)
    while living:
        seen.append(living.pop(0))
        source.ended(seen[-1], now)
    assert Counter(job.user for job in seen) == {"client0": 4, "client1": 3, "client2": 3}


def test_clients_ask_the_same_whatever_the_order_of_answers() -> None:
    found = []
    for newest_first in (True, False):
        source, living, seen = find_workload("closed-loop(num_requests=200)").source(5), [], []
        while source.next_time < inf or living:
            while source.next_time < inf:
                living.append(source.take())
            job = living.pop(-1 if newest_first else 0)
            seen.append((job.request_id, job.prompt, job.num_output))
            source.ended(job, job.arrival + 1.0)
        found.append(sorted(seen))
    assert found[0] == found[1] and len(found[0]) == 200


# Whose they are


def test_users_have_the_shares_that_were_asked_for() -> None:
    jobs = jobs_of("azure-conv(num_requests=5000,num_users=20,user_skew=1)")
    counts = Counter(job.user for job in jobs)
    assert len(counts) == 20
    assert counts["user0"] / counts["user4"] == pytest.approx(5.0, rel=0.25)
    workload = find_workload("arxiv(num_requests=2000,users='ann(share=3),bob(weight=2)')")
    counts = Counter(job.user for job in jobs_of(workload))
    assert counts["ann"] / counts["bob"] == pytest.approx(3.0, rel=0.15)
    assert workload.user_weights == {"ann": 1.0, "bob": 2.0}


def test_adapters_are_zipf_distributed_next_to_the_base_model() -> None:
    text = "log-uniform(num_requests=5000,num_adapters=50,adapter_skew=1.0,base_share=0.2)"
    counts = Counter(job.adapter for job in jobs_of(text))
    assert len(counts) == 51
    assert counts[""] / 5000 == pytest.approx(0.2, rel=0.1)
    assert counts["adapter0"] / counts["adapter4"] == pytest.approx(5.0, rel=0.25)
    job = next(job for job in jobs_of(text) if job.adapter)
    assert job.request(64).adapter == job.adapter
    plain = jobs_of("log-uniform(num_requests=5000)")
    assert [job.num_prompt for job in plain] == [job.num_prompt for job in jobs_of(text)]
    assert {job.request(64).adapter for job in plain} == {None}


def test_weights_of_users_are_those_of_fair_policies() -> None:
    workload = find_workload("arxiv(users='ann,bob(weight=2)')")
    for policy, weights in (("vtc", workload.user_weights), ("fcfs", {})):
        assert scheduler_config(policy, workload, Engine()).user_weights == weights


def test_tiers_say_what_was_promised() -> None:
    tiers = "chat(share=3,ttft=1,tbt=0.1),batch(deadline=60,priority=2,offline=True,hints={'a': 1})"
    jobs = jobs_of(find_workload("log-uniform", num_requests=1000, tiers=tiers))
    by_tier = Counter(job.tier for job in jobs)
    assert by_tier["chat"] / by_tier["batch"] == pytest.approx(3.0, rel=0.25)
    chat, batch = (next(job for job in jobs if job.tier == tier) for tier in ("chat", "batch"))
    assert (chat.ttft, chat.tbt, chat.deadline, chat.priority) == (1.0, 0.1, None, 0)
    assert (batch.ttft, batch.deadline, batch.priority) == (None, 60.0, 2)
    assert chat.hints_for() == {"ttft": 1.0, "tbt": 0.1, "tier": "chat"}
    assert batch.request(9).hints == {"tier": "batch", "offline": True, "a": 1}
    assert batch.request(9).deadline == batch.arrival + 60.0 and chat.request(9).tbt == 0.1


def test_deadlines_and_priorities_of_any_kind() -> None:
    jobs = jobs_of("closed-loop(num_requests=300,clients=300,deadlines=(1,100),num_priorities=3)")
    assert {job.priority for job in jobs} == {0, 1, 2}
    deadlines = [job.deadline or 0.0 for job in jobs]
    assert min(deadlines) >= 1.0 and max(deadlines) <= 100.0
    assert median(deadlines) == pytest.approx(10.0, rel=0.5)


def test_two_users_and_two_tiers() -> None:
    counts = Counter(job.user for job in jobs_of("two-users(flood=4,num_requests=2000)"))
    assert counts["flood"] / counts["calm"] == pytest.approx(4.0, rel=0.15)
    jobs = jobs_of("tiers(chat_share=0.5,ttft=2,tbt=0.5)")
    chats = [job for job in jobs if job.tier == "chat"]
    assert len(chats) == pytest.approx(500, abs=60)
    assert all(job.deadline == 2.0 + 0.5 * (job.num_output - 1) for job in chats)
    assert all(job.hints_for()["offline"] for job in jobs if job.tier == "batch")


def test_given_tokens_are_told_as_they_are() -> None:
    job = Job(
        request_id="a",
        arrival=0.0,
        prompt=(Span("given", 3, 1), Span("made up", 4)),
        num_output=2,
        max_tokens=7,
        texts={"given": [10, 11, 12, 13]},
    )
    add = job.request(100)
    assert add.prompt_token_ids[:3] == [11, 12, 13] and len(add.prompt_token_ids) == 7
    assert add.prompt_token_ids[3:] == tokens_of((Span("made up", 4),))
    assert END not in add.prompt_token_ids and add.max_tokens == 7


def test_a_text_is_the_same_wherever_it_is_read_from() -> None:
    whole = tokens_of([Span("a", 3_000_000)])  # longer than what is drawn at once
    assert len(whole) == 3_000_000 and min(whole) > END
    for start, length in ((0, 1), (1, 40), (2, 40), (2_999_000, 1000)):
        assert tokens_of([Span("a", length, start)]) == whole[start : start + length]
    beginnings = {tuple(tokens_of([Span(f"text {n}", 8)])) for n in range(20_000)}
    assert len(beginnings) == 20_000


# Mistakes


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ("azure", "workload 'azure' is not known; did you mean 'azure-c"),
        ("azure-conv(nonsense=1)", "has no option 'nonsense'; its options are: num_requests"),
        ("azure-conv(scale=0)", "scale is 0, must be 0.0001 or more"),
        ("azure-conv(arrivals='gama(cv=2)')", "'gama' is not known; did you mean 'gamma'"),
        ("azure-conv(arrivals='gamma(cv=-1)')", "gamma: cv is -1, must be 0 or more"),
        ("azure-conv(arrivals='poisson(cv=2)')", r"must be 1; use gamma\(cv=...\)"),
        ("azure-conv(arrivals='ramp(first=0,last=0)')", "are 0, one must be above 0"),
        ("azure-conv(arrivals='burst(every=1,seconds=2)')", "seconds is 2, .* at most 1"),
        ("log-uniform(arrivals='trace')", "'log-uniform' has no arrivals of its own"),
        (
            "log-uniform(prompt_tokens=(0, 4))",
            r"prompt_tokens is \(0, 4\), must be two rising numbers",
        ),
        ("log-uniform(output_tokens=5)", "output_tokens is 5, must be two numbers"),
        ("closed-loop(lengths='fixed(length=3)')", "'fixed' has no option 'length'"),
        ("conversations(max_context=100)", "max_context is 100, must be 512 or more"),
        ("arxiv(users='a(part=1)')", "a has no option 'part'; its options are: share"),
        ("arxiv(users='a(share=0)')", "all shares are 0"),
        ("arxiv(users='a',num_users=3)", "give only one of them"),
        ("arxiv(tiers='a(ttft=-1)')", "ttft of a is -1, must be seconds above 0"),
        ("arxiv(deadlines=(5, 1))", r"deadlines is \(5, 1\), must be two rising numbers"),
        ("arxiv(base_share=0.5)", "set num_adapters"),
        ("arxiv(num_adapters=-1)", "num_adapters is -1"),
        ("two-users(num_users=3)", "two-users has users of its own"),
        ("azure-csv", r"needs the option path, as in azure-csv\(path=...\)"),
    ],
)
def test_workloads_that_cannot_be(workload: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_workload(workload)


def test_a_seed_is_no_negative_number() -> None:
    with pytest.raises(ConfigError, match="seed is -1, must be 0 or more"):
        find_workload("arxiv").source(-1)


def test_periods_too_many_to_draw() -> None:
    with pytest.raises(ConfigError, match=r"periods of 0\.002 s, but at most"):
        next(find_arrivals("onoff(on=0.001,off=0.001)").times(RandomDraws(0), 1e-3, 1000))

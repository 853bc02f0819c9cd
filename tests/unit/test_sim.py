"""Policies on a virtual clock: exact where it can be said, and the same again each time."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import EntryPoint
from itertools import pairwise
from pathlib import Path

import pytest

from engine.cli.main import main
from engine.errors import ConfigError
from engine.messages.requests import AddRequest
from engine.sched import Defer, Limits, Policy, Refuse
from engine.sim.compare import Engine, compare, percentile, simulate
from engine.sim.worker import StepCost
from engine.sim.workload import Job, Workload, dispersion, draw

WORKLOAD = Workload(num_requests=40, prompt_tokens=(8, 100), output_tokens=(2, 40))
ENGINE = Engine(max_num_seqs=8, max_num_batched_tokens=64, num_blocks=40)


def job(name: str, num_prompt: int, num_output: int, gaps: float = 0.0) -> Job:
    prompt = [ord(name)] * num_prompt
    return Job(request_id=name, gaps=gaps, prompt=prompt, num_output=num_output, user="u")


def test_one_request_alone_takes_what_its_steps_cost() -> None:
    cost = StepCost(fixed=1.0, per_seq=0.0, per_token=0.25, per_context=0.0, per_attention=0.0)
    engine = Engine(max_num_seqs=4, max_num_batched_tokens=4, cost=cost)
    figures = simulate("fcfs", [job("a", 6, 3)], WORKLOAD, engine, rate=None)
    chunks = (1.0 + 4 * 0.25) + (1.0 + 2 * 0.25)
    assert figures.ttft == [chunks]
    assert figures.e2e == [chunks + 2 * 1.25] and figures.seconds == figures.e2e[0]
    assert (figures.output_tokens, figures.num_preemptions) == (3, 0)
    assert figures.recompute_share == 0.0
    assert figures.tokens_per_second == 3 / figures.seconds


def test_every_term_of_the_cost_counts() -> None:
    cost = StepCost(fixed=1.0, per_seq=2.0, per_token=4.0, per_context=8.0, per_attention=16.0)
    figures = simulate("fcfs", [job("a", 3, 2)], WORKLOAD, Engine(cost=cost), rate=None)
    first = 1 + 2 + 3 * 4 + 0 + (1 + 2 + 3) * 16
    second = 1 + 2 + 4 + 3 * 8 + 4 * 16
    assert figures.ttft == [first] and figures.e2e == [first + second]


def test_an_idle_engine_waits_for_the_next_request() -> None:
    jobs = [job("a", 4, 2, gaps=1.0), job("b", 4, 2, gaps=50.0)]
    figures = simulate("fcfs", jobs, WORKLOAD, ENGINE, rate=2.0)
    assert figures.seconds > 25.0 and figures.ttft[0] == pytest.approx(figures.ttft[1])
    assert figures.e2e[1] < 0.1


@pytest.mark.parametrize("policy", ["fcfs", "residual-sjf", "vtc", "least-computed", "fastserve"])
def test_all_requests_end_at_their_own_length_under_pressure(policy: str) -> None:
    jobs = draw(WORKLOAD)
    engine = Engine(max_num_seqs=8, max_num_batched_tokens=64, num_blocks=16)
    figures = simulate(policy, jobs, WORKLOAD, engine, rate=None)
    assert len(figures.e2e) == len(figures.ttft) == 40
    assert figures.output_tokens == sum(job.num_output for job in jobs)
    assert figures.num_preemptions > 0 and 0.0 < figures.recompute_share < 0.5
    assert 0.9 < figures.kv_peak <= 1.0 and figures.num_faults == figures.num_refused == 0


def test_overlapped_steps_take_no_longer() -> None:
    jobs = draw(WORKLOAD)
    engine = Engine(max_num_seqs=8, num_blocks=200)
    overlapped = Engine(max_num_seqs=8, num_blocks=200, depth=2)
    synchronous, ahead = (simulate("fcfs", jobs, WORKLOAD, e, None) for e in (engine, overlapped))
    assert ahead.output_tokens == synchronous.output_tokens
    assert ahead.seconds == pytest.approx(synchronous.seconds, rel=0.1)


def test_workloads_are_what_their_options_say() -> None:
    jobs = draw(Workload(num_requests=1000, seed=3, shared_prefix=32))
    assert jobs == draw(Workload(num_requests=1000, seed=3, shared_prefix=32))
    assert jobs != draw(Workload(num_requests=1000, seed=4, shared_prefix=32))
    gaps = [later.gaps - earlier.gaps for earlier, later in pairwise(jobs)]
    assert sum(gaps) / len(gaps) == pytest.approx(1.0, rel=0.1)
    outputs = sorted(job.num_output for job in jobs)
    assert outputs[0] >= 8 and outputs[-1] <= 512
    assert outputs[500] == pytest.approx((8 * 512) ** 0.5, rel=0.15)  # the middle of a log scale
    beginnings = Counter(tuple(job.prompt[:32]) for job in jobs)
    assert 430 < sum(count for count in beginnings.values() if count > 1) < 570
    assert {job.user for job in jobs} == {"user0", "user1", "user2", "user3"}
    assert 0.3 < dispersion(jobs) < 2.0


@pytest.mark.parametrize(
    "options",
    [
        {"num_requests": 0},
        {"num_users": 0},
        {"shared_prefix": -1},
        {"prompt_tokens": (0, 4)},
        {"output_tokens": (9, 4)},
    ],
)
def test_workloads_that_cannot_be_drawn(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Workload(**options)


class Reads(Policy):
    """Remembers what requests tell about themselves."""

    def __init__(self) -> None:
        self.seen: list[AddRequest] = []

    def rank(self, req, view):
        self.seen.append(req.add)
        return (req.arrival,)


def test_true_lengths_are_told_to_an_oracle_alone() -> None:
    for predictor, tells in (("none", False), ("history", False), ("oracle", True)):
        policy = Reads()
        simulate(policy, draw(WORKLOAD), WORKLOAD, Engine(length_predictor=predictor), rate=None)
        assert {bool(add.hints) for add in policy.seen} == {tells}
        assert {add.max_tokens for add in policy.seen} == {40}


class Choosy(Policy):
    def rank(self, req, view):
        return (req.arrival,)

    def on_add(self, req, view):
        if req.num_prompt > 50:
            return Refuse("too long")
        return Defer(view.now + 3.0) if req.num_prompt > 25 else None


def test_the_refused_are_counted_and_the_deferred_end() -> None:
    jobs = draw(WORKLOAD)
    figures = simulate(Choosy, jobs, WORKLOAD, ENGINE, rate=100.0)
    num_long = sum(len(job.prompt) > 50 for job in jobs)
    assert figures.num_refused == num_long > 0 and len(figures.e2e) == 40 - num_long
    assert figures.ttft[-1] >= 3.0
    assert figures.policy == "Choosy"


class Refuses(Choosy):
    def on_add(self, req, view):
        return Refuse("no")


class Idles(Choosy):
    def on_add(self, req, view):
        return None

    def limits(self, view):
        return Limits(max_tokens=0)


class Defers(Choosy):
    def on_add(self, req, view):
        return Defer(1e12)


def test_policies_that_serve_nobody() -> None:
    jobs = draw(WORKLOAD)
    figures = simulate(Refuses, jobs, WORKLOAD, ENGINE, rate=100.0)
    assert (figures.num_refused, figures.tokens_per_second, figures.e2e) == (len(jobs), 0.0, [])
    figures = simulate(Idles, jobs, WORKLOAD, ENGINE, rate=100.0)
    assert len(figures.e2e) == len(jobs) and figures.num_rescued > 0
    with pytest.raises(ConfigError, match="Defers'> never lets its requests end: for 5 s nothing"):
        simulate(Defers, jobs, WORKLOAD, ENGINE, rate=100.0, max_idle_looks=1000)


def test_load_is_measured_against_what_fcfs_can_serve() -> None:
    half = compare(["fcfs"], WORKLOAD, ENGINE, load=0.5)
    over = compare(["fcfs"], WORKLOAD, ENGINE, load=2.0)
    assert half.capacity == over.capacity and over.rate == 4 * half.rate
    assert sum(over.figures[0].ttft) > 3 * sum(half.figures[0].ttft)
    with pytest.raises(ConfigError, match="load is 0, must be above 0"):
        compare(["fcfs"], WORKLOAD, ENGINE, load=0)


def test_percentiles_are_values_that_occurred() -> None:
    assert [percentile([1.0, 2.0, 3.0, 4.0], p) for p in (0.25, 0.5, 0.99, 1.0)] == [1, 2, 4, 4]
    assert percentile([], 0.5) == 0.0


# The command

SMALL = ["--requests", "40", "--prompt-tokens", "8", "100", "--output-tokens", "2", "40"]


def table(capsys: pytest.CaptureFixture[str], *args: str) -> list[str]:
    assert main(["policies", *SMALL, *args]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if not line.startswith("real time")]


def test_the_same_seed_gives_the_same_table(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--policies", "fcfs, residual-sjf,vtc", "--load", "1.5", "--max-num-seqs", "4"]
    first = table(capsys, *args)
    assert table(capsys, *args) == first
    assert table(capsys, *args, "--seed", "1") != first
    text = "\n".join(first)
    assert "40 requests, seed 0" in text and "length predictor: none" in text
    header = first.index("")
    assert first[header + 1].split()[0] == "policy"
    assert [line.split()[0] for line in first[header + 2 : header + 5]] == [
        *("fcfs", "residual-sjf", "vtc"),
    ]
    assert len({len(line) for line in first[header + 1 : header + 5]}) == 1


def test_a_policy_in_the_current_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_mine_alone.py").write_text(
        "from engine import Policy\n"
        "class Newest(Policy):\n"
        "    def rank(self, req, view):\n"
        "        return (-req.arrival,)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    lines = table(capsys, "--policies", "fcfs,of_mine_alone.Newest", "--length-predictor", "oracle")
    assert any(line.startswith("of_mine_alone.Newest ") for line in lines)
    assert any("length predictor: oracle" in line for line in lines)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--policies", "nonsense"], "'nonsense' is not known; there are: andes"),
        (["--policies", "no.where.Policy"], "cannot load 'no.where.Policy'"),
        (["--policies", " , "], "there is no policy to compare"),
        (["--policies", "fcsf"], "did you mean 'fcfs'?"),
        (["--policies", "edf(5)"], "--policies has 'edf(5)', must be a name, or one with options"),
        (["--policies", "edf(a=soon)"], "--policies has 'edf(a=soon)', must be"),
        (["--policies", "fcfs,edf(a=1"], "--policies has 'edf(a=1', must be"),
        (["--policies", "edf(due=5)"], "'due'; its options are: default_deadline: float = 60.0"),
        (["--load", "-1"], "load is -1.0, must be above 0"),
        (["--load", "nan"], "load is nan, must be above 0"),
        (["--load", "inf"], "load is inf, must be above 0, and at most 1000"),
        (["--block-size", "0"], "block_size is 0, must be in 1..1024"),
        (["--num-kv-blocks", "99999999999"], "num_kv_blocks is 99999999999, must be in 2.."),
        (["--max-num-seqs", "99999999999"], "max_num_seqs is 99999999999, must be in 1.."),
        (["--prompt-tokens", "1", "9999999999"], "max_model_len is 10000000511, must be in 1.."),
        (["--requests", "0"], "cannot be drawn"),
        (["--max-num-seqs", "0"], "max_num_seqs is 0"),
        (["--length-predictor", "nobody"], "length_predictor 'nobody' is not known"),
    ],
)
def test_mistakes_are_one_line(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["policies", *args]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and len(printed.err.splitlines()) == 1


def test_a_policy_stands_beside_itself_with_other_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    policies = "fcfs, sarathi(step_tokens=16), sarathi(step_tokens = 256)"
    rows = [line for line in table(capsys, "--policies", policies) if line.startswith("sarathi(")]
    names, figures = zip(*(row.split(maxsplit=1) for row in rows), strict=True)
    assert names == ("sarathi(step_tokens=16)", "sarathi(step_tokens=256)")
    assert figures[0] != figures[1]


class Falls(Policy):
    def rank(self, req, view):
        return (req.nothing,)


def test_a_row_of_a_policy_that_was_left_out_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    lines = table(capsys, "--policies", f"{__name__}.Falls")
    assert "4 wrong answers" in lines[-1] and "left out" in lines[-1]


def installed(monkeypatch: pytest.MonkeyPatch, **plugins: str) -> None:
    entries = [EntryPoint(name, path, "engine.schedulers") for name, path in plugins.items()]
    monkeypatch.setattr("engine.sched.plugins.find.entry_points", lambda group: entries)


def test_the_list_of_policies(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that ship, then those installed; a loop of one's own is none, a broken one says why."""
    installed(
        monkeypatch, mine=f"{__name__}:Falls", loop="engine.sched:Scheduler", gone="no.where:A"
    )
    assert main(["policies", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 24 and any(line.startswith("fcfs ") for line in lines)
    gone, mine = lines[-2:]
    assert gone.startswith("gone ") and "cannot be loaded: ModuleNotFoundError" in gone
    assert mine.startswith("mine ") and not any(line.startswith("loop ") for line in lines)

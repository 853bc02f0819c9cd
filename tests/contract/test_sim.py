"""Policies on a virtual clock: exact where it can be said, and the same again each time."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from engine.cli.main import main
from engine.errors import ConfigError, PolicyError
from engine.messages.requests import AddRequest
from engine.sched import Defer, Limits, Policy, Refuse
from policylab.sim.figures import figures
from policylab.sim.job import Job, Span
from policylab.sim.run import Engine, Run, rate_at, run
from policylab.sim.worker import StepCost
from policylab.sim.workloads import JobSource, Workload
from policylab.sim.workloads.log_uniform import LogUniform

WORKLOAD = LogUniform(num_requests=40, prompt_tokens=(8, 100), output_tokens=(2, 40))
ENGINE = Engine(max_num_seqs=8, max_num_batched_tokens=64, num_blocks=40)
AT_ONCE = float("inf")


@dataclass(frozen=True, kw_only=True)
class Given(Workload):
    """These jobs."""

    kind = "given"
    jobs: tuple[Job, ...]
    natural_rate = 1.0
    max_prompt = 100
    max_output = 40

    def source(self, seed: int, rate: float | None = None) -> JobSource:
        return JobSource(iter(self.jobs))


def job(name: str, num_prompt: int, num_output: int, arrival: float = 0.0) -> Job:
    prompt = (Span(name, num_prompt),)
    return Job(request_id=name, arrival=arrival, prompt=prompt, num_output=num_output)


def e2e(found: Run) -> list[float]:
    return (found.requests.times("last") - found.requests.times("arrival")).tolist()


def ttft(found: Run) -> list[float]:
    return (found.requests.times("first") - found.requests.times("arrival")).tolist()


def test_one_request_alone_takes_what_its_steps_cost() -> None:
    cost = StepCost(fixed=1.0, per_seq=0.0, per_token=0.25, per_context=0.0, per_attention=0.0)
    engine = Engine(max_num_seqs=4, max_num_batched_tokens=4, cost=cost)
    whole = run("fcfs", Given(jobs=(job("a", 6, 3),)), engine)
    chunks = (1.0 + 4 * 0.25) + (1.0 + 2 * 0.25)
    assert ttft(whole) == [chunks] and e2e(whole) == [chunks + 2 * 1.25]
    found = figures(whole)
    assert found.makespan == e2e(whole)[0] and found.recomputed == 0.0
    assert found.num_preemptions == 0 and found.tokens_per_second == 3 / found.makespan


def test_every_term_of_the_cost_counts() -> None:
    cost = StepCost(fixed=1.0, per_seq=2.0, per_token=4.0, per_context=8.0, per_attention=16.0)
    whole = run("fcfs", Given(jobs=(job("a", 3, 2),)), Engine(cost=cost))
    first = 1 + 2 + 3 * 4 + 0 + (1 + 2 + 3) * 16
    second = 1 + 2 + 4 + 3 * 8 + 4 * 16
    assert ttft(whole) == [first] and e2e(whole) == [first + second]


def test_an_idle_engine_waits_for_the_next_request() -> None:
    whole = run("fcfs", Given(jobs=(job("a", 4, 2, 0.5), job("b", 4, 2, 25.0))), ENGINE)
    assert figures(whole).makespan > 25.0
    assert ttft(whole)[0] == pytest.approx(ttft(whole)[1]) and e2e(whole)[1] < 0.1


def test_a_request_ends_where_the_engine_ends_it() -> None:
    engine = Engine(scheduler={"max_model_len": 20})
    whole = run("fcfs", Given(jobs=(job("a", 10, 30), job("b", 30, 5))), engine)
    assert whole.requests.counts("num_output").tolist() == [10, 5]
    assert whole.requests.names["outcome"] == ["done", "refused"]


@pytest.mark.parametrize("policy", ["fcfs", "residual-sjf", "vtc", "least-computed", "fastserve"])
def test_all_requests_end_at_their_own_length_under_pressure(policy: str) -> None:
    engine = Engine(max_num_seqs=8, max_num_batched_tokens=64, num_blocks=16)
    whole = run(policy, WORKLOAD, engine, rate=AT_ONCE)
    found = figures(whole)
    assert found.outcomes == {"done": 40}
    tokens = whole.requests.counts("num_output")
    assert tokens.tolist() == [each.num_output for each in WORKLOAD.source(0)]
    assert len(whole.gaps) and whole.gaps[:, 2].sum() == tokens.sum() - 40
    assert found.num_preemptions > 0 and 0.0 < found.recomputed < 0.6
    assert 0.9 < found.kv_peak <= 1.0 and found.num_refused == 0
    assert not whole.not_own


def test_overlapped_steps_take_no_longer() -> None:
    engine = Engine(max_num_seqs=8, num_blocks=200)
    overlapped = Engine(max_num_seqs=8, num_blocks=200, depth=2)
    synchronous, ahead = (
        figures(run("fcfs", WORKLOAD, e, rate=AT_ONCE)) for e in (engine, overlapped)
    )
    assert ahead.outcomes == synchronous.outcomes
    assert ahead.makespan == pytest.approx(synchronous.makespan, rel=0.1)


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
        run(policy, WORKLOAD, Engine(length_predictor=predictor), rate=AT_ONCE)
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
    whole = run(Choosy, WORKLOAD, ENGINE, rate=100.0)
    num_long = sum(each.num_prompt > 50 for each in WORKLOAD.source(0))
    found = figures(whole)
    assert found.num_refused == num_long > 0 and found.outcomes["done"] == 40 - num_long
    assert max(t for t in ttft(whole) if t == t) >= 3.0
    assert found.policy == "Choosy"


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
    found = figures(run(Refuses, WORKLOAD, ENGINE, rate=100.0))
    assert (found.num_refused, found.tokens_per_second, found.makespan) == (40, 0.0, 0.0)
    idle = run(Idles, WORKLOAD, ENGINE, rate=100.0)
    assert idle.requests.done.all() and "steps were planned by default" in idle.not_own
    with pytest.raises(PolicyError, match="policy Idles has no figures"):
        figures(idle)
    impatient = Engine(max_num_seqs=8, max_num_batched_tokens=64, num_blocks=40, max_idle_looks=999)
    with pytest.raises(PolicyError, match="Defers'> never lets its requests end: for 5 s nothing"):
        run(Defers, WORKLOAD, impatient, rate=100.0)


def test_load_is_measured_against_what_fcfs_can_serve() -> None:
    half, over = (rate_at(load, WORKLOAD, ENGINE) for load in (0.5, 2.0))
    assert over == 4 * half

    def mean(rate: float) -> float:
        return sum(ttft(run("fcfs", WORKLOAD, ENGINE, rate=rate)))

    assert mean(over) > 3 * mean(half)
    with pytest.raises(ConfigError, match="load is 0, must be above 0"):
        rate_at(0, WORKLOAD, ENGINE)


# The command

SMALL = ["--requests", "40", "--prompt-tokens", "8", "100", "--output-tokens", "2", "40"]


def table(capsys: pytest.CaptureFixture[str], *args: str) -> list[str]:
    assert main(["policies", *SMALL, *args]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if not line.startswith("real time")]


def test_the_same_seed_gives_the_same_table(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--policies", "fcfs, residual-sjf,vtc", "--rate", "40", "--max-num-seqs", "4"]
    first = table(capsys, *args)
    assert table(capsys, *args) == first
    assert table(capsys, *args, "--seed", "1") != first
    text = "\n".join(first)
    assert (
        "40 requests, seed 0" in text
        and "prompt_tokens=(8, 100)" in text
        and "length predictor: none" in text
    )
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
    lines = table(
        capsys,
        "--policies",
        "fcfs,of_mine_alone.Newest",
        "--length-predictor",
        "oracle",
        "--rate",
        "40",
    )
    assert any(line.startswith("of_mine_alone.Newest ") for line in lines)
    assert any("length predictor: oracle" in line for line in lines)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--policies", "nonsense"], "'nonsense' is not known; there are: adapter-clustering"),
        (["--policies", "no.where.Policy"], "cannot load 'no.where.Policy'"),
        (["--policies", " , "], "there is no policy to compare"),
        (["--policies", "edf(due=5)"], "'due'; its options are: default_deadline: float = 60.0"),
        (["--load", "inf"], "load is inf, must be above 0 and at most 1000"),
        (
            ["--prompt-tokens", "1", "9999999999"],
            "prompt_tokens is (1, 9999999999), must be two rising numbers",
        ),
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
    lines = table(capsys, "--policies", policies, "--rate", "90")
    rows = [line for line in lines if line.startswith("sarathi(")]
    names, figures = zip(*(row.split(maxsplit=1) for row in rows[:2]), strict=True)
    assert names == ("sarathi(step_tokens=16)", "sarathi(step_tokens=256)")
    assert figures[0] != figures[1]


class Falls(Policy):
    def rank(self, req, view):
        return (req.nothing,)


def installed(monkeypatch: pytest.MonkeyPatch, **plugins: str) -> None:
    entries = [EntryPoint(name, path, "engine.schedulers") for name, path in plugins.items()]
    monkeypatch.setattr("engine.sched.plugins.find.entry_points", lambda group: entries)


def test_the_list_of_policies(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shipped policies come first, then installed ones. A broken one says why."""
    installed(
        monkeypatch, mine=f"{__name__}:Falls", loop="engine.sched:Scheduler", gone="no.where:A"
    )
    assert main(["policies", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 24 and any(line.startswith("fcfs ") for line in lines)
    gone, mine = lines[-2:]
    assert gone.startswith("gone ") and "cannot be loaded: ModuleNotFoundError" in gone
    assert mine.startswith("mine ") and not any(line.startswith("loop ") for line in lines)

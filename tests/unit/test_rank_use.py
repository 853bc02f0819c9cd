"""What an operator sees of the ranks that compute a model: metrics, ``top``, step logs."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console
from support.metric_pages import page_with, stats
from support.rank_threads import run_all, shared_ranks
from support.simulate import make_request, make_scheduler

from engine.cli.main import main
from engine.cli.readings import EngineReading, Page, stats_of
from engine.cli.top import Screen
from engine.config.cache import CacheConfig
from engine.core.group import WorkerGroup, described
from engine.core.rank_use import rank_uses
from engine.core.recording import describe, record
from engine.core.replay import replay
from engine.ipc.plan_stream import PlanWriter
from engine.messages.stats import RankUse, SchedulerStats
from engine.messages.step import StepResult
from engine.observe.guard import Failures
from engine.parallel.collectives import Collectives
from engine.rpc.joined import DeadCounters, sum_of
from engine.sched.scheduler import Scheduler
from engine.server.rank_metrics import rank_metrics
from engine.worker.platform.host import CpuPlatform
from engine.worker.rank import CALL, COLLECT, LAUNCH, NUM_DONE, TIMES, Rank, RankPlace, RankReport
from engine.worker.rank_report import log_sums, name_of_device
from engine.worker.rank_times import StepClock, StepTimes, Waited
from policylab.verify.ranks import LocalRanks

RANKS = [RankUse(0, 0, 10.0, 1.0), RankUse(0, 1, 10.0, 2.5)]


def page_of(of: SchedulerStats) -> str:
    return page_with([*rank_metrics("box", of)])


def test_each_rank_has_metrics_that_top_reads() -> None:
    text = page_of(stats(ranks=RANKS))
    for line in (
        'metronome_rank_step_seconds_total{core="0",model_name="box",rank="1"} 10.0',
        'metronome_rank_wait_seconds_total{core="0",model_name="box",rank="1"} 2.5',
        'metronome_rank_stage_wait_seconds_total{core="0",model_name="box",rank="0"} 0.0',
    ):
        assert line in text
    assert stats_of(Page(text)).ranks == RANKS
    assert page_of(stats()) == ""


def shown(*uses: list[RankUse]) -> str:
    screen = Screen("box", 1.0)
    for at, ranks in enumerate(uses):
        screen.add(EngineReading(float(at), stats(ranks=ranks)))
    console = Console(width=200, markup=False)
    with console.capture() as capture:
        console.print(screen.render())
    assert msgspec.json.encode(screen.figures.as_dict())
    return capture.get()


def test_top_shows_which_share_of_its_steps_each_rank_waits() -> None:
    later = [RankUse(0, 0, 12.0, 1.5), RankUse(0, 1, 12.0, 2.5)]
    rows = [line.split() for line in shown(RANKS, later).splitlines()]
    assert ["rank", "0", "waits", "for", "other", "ranks", "25.0", "%", "12.5", "%"] in rows
    assert ["rank", "1", "waits", "for", "other", "ranks", "0.0", "%", "20.8", "%"] in rows
    assert "stages" not in shown(RANKS, later)


def test_top_knows_cores_that_were_started_again_and_stages() -> None:
    first = [RankUse(0, 0, 9.0, 1.0), RankUse(1, 0, 9.0, 1.0)]
    again = [RankUse(0, 0, 10.0, 1.5), RankUse(1, 0, 2.0, 0.5, 1.0)]
    rows = [line.split() for line in shown(first, again).splitlines()]
    for row in (
        "core 0, rank 0 waits for other ranks 50.0 % 15.0 %",
        "core 1, rank 0 waits for other ranks 25.0 % 25.0 %",
        "core 1, rank 0 waits for other stages 50.0 % 50.0 %",
    ):
        assert row.split() in rows


def test_ranks_of_several_cores_are_listed_and_those_of_dead_ones_are_not() -> None:
    both = sum_of([stats(ranks=RANKS), stats(ranks=[RankUse(1, 0, 1.0, 0.0)])])
    assert both is not None
    assert [(use.core, use.rank) for use in both.ranks] == [(0, 0), (0, 1), (1, 0)]
    counters = DeadCounters()
    counters.update(0, stats(ranks=RANKS))
    counters.add_dead(0)
    found = counters.add_to(stats(ranks=[RankUse(1, 0, 1.0, 0.0)]))
    assert found is not None and [use.core for use in found.ranks] == [1]


def test_a_rank_counts_how_long_it_waits_for_one_that_is_late() -> None:
    group, begun = shared_ranks(2), threading.Event()

    def work(ranks: Collectives) -> None:
        ranks.barrier()
        if ranks.rank == 1:
            begun.wait()
            time.sleep(0.05)
        else:
            begun.set()
        ranks.all_reduce(torch.ones(10))

    run_all(group, work)
    assert group[0].waited_ns >= 50e6


def test_the_start_reports_where_ranks_are_and_what_a_sum_takes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", "engine.core"):
        run_all(shared_ranks(2), lambda ranks: log_sums(ranks, CpuPlatform()))
    (message,) = caplog.messages
    assert re.fullmatch(r"2 ranks add up 4 KiB in [\d.]+ us, 64 KiB in [\d.]+ us", message)
    assert name_of_device(CpuPlatform()).startswith("CPUs ")
    here = RankPlace("a", 7, "CPUs 0-1", 1 << 30)
    gpu = RankPlace("b", 8, "GPU 3, H100", 1 << 29, 40 << 30)
    assert described([here, here])[1] == (
        "rank 1 (process 7, CPUs 0-1) 1.00 GiB of the host's memory"
    )
    assert described([here, gpu])[1] == (
        "rank 1 (process 8 on b, GPU 3, H100) 0.50 GiB of the host's memory, 40.00 GiB of the GPU's"
    )


class Idle:
    """A rank's worker, whose steps take a second, of which it waits a quarter."""

    def __init__(self, waited: Callable[[], Waited]) -> None:
        self.waited = waited

    def launch(self, plan: Any) -> None: ...

    def collect(self, ticket: Any) -> StepResult:
        empty = torch.zeros(0, dtype=torch.int32).numpy()
        return StepResult(0, empty, empty, {}, seconds=1.0)

    def allocate(self, num_blocks: int) -> None: ...

    def check(self) -> None: ...


def carried_out(waited: Callable[[], Waited], num: int) -> dict[int, int]:
    """The words that a rank shows after this many steps."""
    words: dict[int, int] = {}
    reports: list[RankReport] = []
    rank = Rank(Idle(waited), words.__setitem__, reports.append)  # type: ignore[arg-type]
    rank.carry_out(CALL + msgspec.msgpack.encode(["allocate", [1]]))
    plans, scheduler = PlanWriter(), make_scheduler(num_blocks=20)
    for _ in range(num):
        rank.carry_out(LAUNCH + plans.encode(scheduler.schedule()))
        rank.carry_out(COLLECT)
    assert not reports[0].kind
    return words


def test_a_rank_shows_its_times_since_the_start() -> None:
    so_far = iter([Waited(7_000_000), *(Waited(7_000_000 + 250 * each) for each in range(1, 4))])
    words = carried_out(lambda: next(so_far), 3)
    assert StepTimes(*(words[TIMES + each] for each in range(3))) == (3 * 10**9, 750, 0)


def test_a_rank_whose_waits_cannot_be_read_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> Waited:
        raise ArithmeticError("the clock has stopped")

    assert carried_out(fails, 3)[NUM_DONE] == 7  # messages that it has carried out
    assert TIMES not in carried_out(fails, 3)
    assert "rank_times has failed: ArithmeticError" in caplog.text


def test_a_group_whose_waits_cannot_be_read_has_none() -> None:
    def fails() -> Waited:
        raise ArithmeticError("the clock has stopped")

    group = WorkerGroup(Idle(fails), LocalRanks([], Random(0), None))  # type: ignore[arg-type]
    failures = Failures()
    read = rank_uses(group, 0, failures)
    assert read() == read() == []
    assert list(failures.counters().values()) == [1]
    group = WorkerGroup(Idle(Waited), LocalRanks([], Random(0), None))  # type: ignore[arg-type]
    assert rank_uses(group, 2, failures)() == [RankUse(2, 0, 0.0, 0.0)]


def test_a_clock_of_steps_begins_when_the_engine_is_ready() -> None:
    so_far = iter([Waited(5, 1), Waited(9, 4)])
    clock = StepClock(lambda: next(so_far))
    clock.add(9.0)
    clock.begin()
    clock.add(2.0)
    assert clock.read() == StepTimes(2 * 10**9, 4, 3)


def test_a_core_with_one_worker_has_no_ranks() -> None:
    assert rank_uses(Idle(Waited), 0, Failures())() == []  # type: ignore[arg-type]


def test_a_step_log_has_the_times_of_ranks_and_is_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "steps"
    scheduler = make_scheduler(num_blocks=20)
    header = describe(scheduler.config, CacheConfig(), scheduler.kv, 0)

    def make(clock: Callable[[], float]) -> Scheduler:
        return make_scheduler(num_blocks=20, clock=clock)

    recorded = record(log, header, make, lambda: 0.0)
    recorded.rank_uses = lambda: RANKS
    recorded.add_request(make_request("a", [1, 2, 3], 4))
    while recorded.has_unfinished_requests():
        plan = recorded.schedule()
        tokens = torch.full((int(plan.samples.sum()),), 7, dtype=torch.int32).numpy()
        result = StepResult(plan.step, tokens, plan.samples, {}, seconds=0.6)
        recorded.update_from_output(plan, result)
    recorded.shutdown()
    outcome = replay(log)
    assert outcome.difference is None and outcome.num_steps == 4
    assert [tuple(each) for each in outcome.ranks] == [(10.0, 1.0, 0.0), (10.0, 2.5, 0.0)]
    assert main(["replay", str(log)]) == 0
    assert "rank 1: 10.00 s in steps, 25.0 % waiting for other ranks\n" in capsys.readouterr().out

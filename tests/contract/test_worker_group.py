"""A group of workers in processes of their own, and what becomes of it when one of them fails."""

import multiprocessing.resource_tracker as resource_tracker
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.digest_ranks import MEMORY, DigestGroup, Fault
from support.live_core import cpu_seconds, wait_until
from support.patience import WAIT_SECONDS
from support.processes import children, is_spawned, open_files, state_of
from support.simulate import Run, expected, make_scheduler, random_requests

from engine.core.group import WorkerGroup
from engine.errors import ConfigError, RankError

SEED = int(os.environ.get("METRONOME_SEED", random.randrange(1 << 30)))
BLOCKS = 60


@contextmanager
def a_group(**fields) -> Iterator[WorkerGroup]:
    """A group, of which nothing is left afterwards."""
    resource_tracker.ensure_running()
    DigestGroup(size=1)().shutdown()  # what Python starts once is there now
    before = children(), open_files()
    group = None
    try:
        group = DigestGroup(num_blocks=BLOCKS, block_size=4, **fields)()
        yield group
    finally:
        if group is not None:
            group.shutdown()
    assert children() <= before[0]
    assert open_files() <= before[1]


def run_with(group: WorkerGroup, *, depth: int = 1, **options) -> Run:
    scheduler = make_scheduler(num_blocks=BLOCKS, block_size=4, **options)
    return Run(scheduler, group, depth)


def compute(run: Run, num: int = 12) -> None:
    requests = random_requests(random.Random(SEED), num)
    for request in requests:
        run.add(request)
    run.drain()
    for request in requests:
        wanted = expected(request.prompt_token_ids, len(run.outputs[request.request_id]))
        assert run.outputs[request.request_id] == wanted


@pytest.mark.behaviour(79)
@pytest.mark.parametrize(("size", "is_late", "depth"), [(1, False, 1), (3, True, 2)])
def test_a_group_computes_what_one_worker_does(size: int, is_late: bool, depth: int) -> None:
    print(f"METRONOME_SEED={SEED}")
    with a_group(size=size, is_late=is_late) as group:
        assert group.measure() == (MEMORY - (size - 1)) // size, "the least memory decides"
        compute(run_with(group, depth=depth))
        assert group.call("noted", 3, "x") == ["noted", 3, "x"]


@pytest.mark.slow
def test_a_rank_that_is_late_delays_the_others_and_changes_nothing() -> None:
    with a_group(fault=Fault("late", seconds=0.002)) as group:
        compute(run_with(group))


DEATHS = {
    "raise": r"rank 1 \(process \d+\) raised ArithmeticError: a wire has come loose",
    "SIGKILL": r"rank 1 \(process \d+\) was killed by SIGKILL",
    "other token": r"rank 1 computed other tokens than rank 0 in one of the last \d steps",
}


@pytest.mark.parametrize(("kind", "size"), [("raise", 3), ("SIGKILL", 2), ("other token", 2)])
def test_a_rank_that_fails_in_a_step_ends_the_group(kind: str, size: int) -> None:
    method = "collect" if kind == "other token" else "launch"
    with a_group(size=size, fault=Fault(kind, method=method, after=5)) as group:
        with pytest.raises(RankError, match=DEATHS[kind]) as caught:
            compute(run_with(group))
        if kind == "raise":
            assert "in strike" in str(caught.value.__cause__)
        with pytest.raises(RankError, match=DEATHS[kind]):  # and again
            group.call("noted")


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_group() -> None:
    fault = Fault("SIGSTOP", after=5)
    with a_group(fault=fault, hang_timeout=1.0) as group:
        message = r"rank 1 \(process \d+\) has not answered for 1 s .* \(core_hang_timeout\)"
        with pytest.raises(RankError, match=message):
            compute(run_with(group))


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_rank_that_dies_while_nothing_is_computed_is_reported_at_once(number: int) -> None:
    """A rank ignores SIGTERM, which a service manager sends to all processes of the engine."""
    heard: list[RankError] = []
    with a_group() as group:
        (pid,) = (pid for pid in children() if is_spawned(pid))
        group.on_failure(heard.append)
        os.kill(pid, number)
        if number == signal.SIGTERM:
            compute(run_with(group))
            assert not heard
            return
        assert wait_until(lambda: heard)
        assert "was killed by SIGKILL" in str(heard[0])
        with pytest.raises(RankError, match="was killed by SIGKILL"):
            compute(run_with(group))
        later: list[RankError] = []
        group.on_failure(later.append)
        assert later == heard


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("refuse", "load"),
        pytest.param("raise", "allocate", marks=pytest.mark.slow),
        pytest.param("SIGKILL", "load", marks=pytest.mark.slow),
    ],
)
def test_a_start_that_fails_says_which_rank_and_why(kind: str, method: str) -> None:
    message = {**DEATHS, "refuse": "there is no room for 7 heads"}[kind]
    error = ConfigError if kind == "refuse" else RankError
    fault = Fault(kind, method=method)
    with a_group(fault=fault, is_loaded=False) as group, pytest.raises(error, match=message):
        group.load()
        group.measure()
        group.allocate(BLOCKS)


def test_a_call_that_fails_on_all_ranks_ends_nothing_and_on_one_it_ends_the_group() -> None:
    with a_group(fault=Fault("raise", method="call", after=2)) as group:
        assert group.call("noted") == ["noted"]
        with pytest.raises(RankError, match="noted has failed on rank 1: ArithmeticError: a wire"):
            group.call("noted")
    message = "noted has failed on rank 0 and not on rank 1: a wire"
    fault = Fault("raise", rank=0, method="call")
    with a_group(fault=fault) as group, pytest.raises(RankError, match=message):
        group.call("noted")


def test_a_group_ends_its_processes_whatever_its_own_worker_raises() -> None:
    fault = Fault("raise", rank=0, method="shutdown")
    with a_group(fault=fault) as group:
        with pytest.raises(ArithmeticError):
            group.shutdown()
        assert not any(map(is_spawned, children()))


def test_a_group_that_waits_takes_no_processor_time() -> None:
    with a_group() as group:
        compute(run_with(group))
        (pid,) = (pid for pid in children() if is_spawned(pid))
        assert wait_until(lambda: state_of(pid) == "S", WAIT_SECONDS) is not None
        began = cpu_seconds(pid)
        time.sleep(0.5)
        assert cpu_seconds(pid) - began < 0.05

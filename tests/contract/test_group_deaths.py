"""What clients hear of a rank that dies or hangs in a core's process, and that nothing is left."""

import os
import random
import signal
import time
from dataclasses import replace

import pytest
from support.digest_ranks import DigestGroup, Fault, GroupBuild
from support.live_core import pid_of
from support.patience import SOON_SECONDS
from support.processes import nothing_left, ranks_of, tree_of
from support.simulate import make_request
from support.spawned import fake_config

from engine.core.client import CoreClient
from engine.errors import EngineDeadError
from engine.rpc.launch import start_core, start_cores

SEED = int(os.environ.get("METRONOME_SEED", random.randrange(1 << 30)))


def build(**fields) -> GroupBuild:
    return GroupBuild(worker=DigestGroup(**fields))


def work(client: CoreClient) -> None:
    for _ in range(100_000):
        client.step()
    raise AssertionError("it goes on")


@pytest.mark.parametrize("is_idle", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_clients_hear_at_once_which_rank_was_killed(is_idle: bool) -> None:
    with nothing_left() as started:
        client = start_core(fake_config(), build())
        started.update(tree_of(pid_of(client)))
        (rank,) = ranks_of(pid_of(client))
        client.add(make_request("a", [1], 500))
        client.step()
        if is_idle:
            client.abort(["a"])
            client.call("echo", 1)
        os.kill(rank, signal.SIGKILL)
        began = time.monotonic()
        message = rf"RankError: rank 1 \(process {rank}\) was killed by SIGKILL"
        with pytest.raises(EngineDeadError, match=message):
            work(client)
        assert time.monotonic() - began < SOON_SECONDS
        client.shutdown()


@pytest.mark.slow
def test_clients_hear_where_a_rank_has_raised() -> None:
    print(f"METRONOME_SEED={SEED}")
    after = random.Random(SEED).randint(2, 30)
    with nothing_left() as started:
        client = start_core(fake_config(), build(size=3, fault=Fault("raise", 2, after=after)))
        started.update(tree_of(pid_of(client)))
        client.add(make_request("a", [1], 500))
        with pytest.raises(EngineDeadError, match=r"rank 2 .* raised Arithmetic") as info:
            work(client)
        assert "in strike" in str(info.value.__cause__)
        client.shutdown()


def test_ranks_that_end_after_a_report_are_not_the_cause() -> None:
    fault = Fault("lost another", 2, after=9)
    with nothing_left() as started:
        client = start_core(fake_config(), build(size=4, fault=fault))
        started.update(tree_of(pid_of(client)))
        client.add(make_request("a", [1], 500))
        with pytest.raises(EngineDeadError, match=r"rank 2 .* raised RankError: another rank has"):
            work(client)
        client.shutdown()


@pytest.mark.slow
def test_clients_hear_which_rank_has_stopped() -> None:
    config = fake_config(core_hang_timeout=3.0)
    with nothing_left() as started:
        client = start_core(config, build(fault=Fault("SIGSTOP", after=9), hang_timeout=2.0))
        started.update(tree_of(pid_of(client)))
        client.add(make_request("a", [1], 500))
        with pytest.raises(EngineDeadError, match=r"rank 1 .* has not answered for 2 s"):
            work(client)
        client.shutdown()


@pytest.mark.slow
def test_a_start_that_fails_names_the_rank() -> None:
    config = fake_config()
    with pytest.raises(
        EngineDeadError, match=r"initialization failed: RankError: rank 1 .*SIGKILL"
    ):
        start_core(config, build(fault=Fault("SIGKILL", method="load")))
    assert not tree_of(os.getpid())[2:]


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_ranks_end_with_their_core(number: int) -> None:
    with nothing_left() as started:
        client = start_core(fake_config(), build())
        started.update(tree_of(pid_of(client)))
        client.add(make_request("a", [1], 500))
        client.step()
        os.kill(pid_of(client), number)
        if number == signal.SIGKILL:
            with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
                work(client)
        client.shutdown()


@pytest.mark.slow
def test_a_rank_of_one_core_ends_that_core_only() -> None:
    config = fake_config(data_parallel_size=2, multiprocess=True)
    with nothing_left() as started:
        client = start_cores(replace(config, num_threads=1), build())
        for core in client.pids:
            started.update(tree_of(core))
        (rank,) = ranks_of(client.pids[1])
        for name in "abcdef":
            client.add(make_request(name, [ord(name)] * 20, 40))
        os.kill(rank, signal.SIGKILL)
        ends: dict[str, str] = {}
        while client.has_unfinished():
            for batch in client.step():
                ends |= {batch.request_ids[end.index]: str(end.message) for end in batch.finished}
        failed = {name for name, message in ends.items() if "rank 1" in message}
        assert 0 < len(failed) < 6, ends
        client.shutdown()

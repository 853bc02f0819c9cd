"""What only watches may fail; requests may not."""

from __future__ import annotations

import io
import logging
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.fakes import FakeClient, FakeClock, counting, fake_session
from support.simulate import random_requests

from engine import AsyncLLMEngine, SamplingParams
from engine.config.cache import CacheConfig
from engine.config.sched import SchedulerConfig
from engine.core.engine_core import EngineCore
from engine.core.inproc_client import InprocClient
from engine.core.recording import describe, record
from engine.core.replay import replay
from engine.errors import ConfigError
from engine.kv.manager import KVManager
from engine.messages.requests import FinishedRequest
from engine.observe.guard import Failures, ObserverGuard
from engine.observe.logs import LossyHandler
from engine.observe.steplog import StepLog
from engine.sched.interface import SchedulerInterface
from engine.sched.plugins.find import make_scheduler
from engine.worker.profiler import TorchProfiler
from policylab.verify.fake import DigestWorker

NUM_BLOCKS, BLOCK_SIZE = 40, 4
OPTIONS = {"max_num_batched_tokens": 24, "max_num_seqs": 5, "max_model_len": 64}


@contextmanager
def files_end_at(num_bytes: int) -> Iterator[None]:
    """A disk with room for so much in each file, for this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def run(path: Path | None, failures: Failures, num_requests: int = 600) -> list[object]:
    """All outputs of a run that is recorded at the path."""
    config, clock = SchedulerConfig(**OPTIONS), FakeClock()
    kv = KVManager(NUM_BLOCKS, BLOCK_SIZE)

    def make(own: object) -> SchedulerInterface:
        return make_scheduler(config, kv, clock=clock, seed=7)

    scheduler = make(clock)
    if path is not None:
        header = describe(config, CacheConfig(block_size=BLOCK_SIZE), kv, seed=7)
        scheduler = record(path, header, make, clock, failures)
    core = EngineCore(scheduler, DigestWorker(NUM_BLOCKS, BLOCK_SIZE), 2)
    outputs: list[object] = []
    for request in random_requests(random.Random(5), num_requests):
        scheduler.add_request(request)
        outputs.append(core.step())
    while core.has_work:
        outputs.append(core.step())
    scheduler.shutdown()
    return outputs


@pytest.fixture(scope="module")
def unrecorded() -> list[object]:
    return run(None, Failures())


@pytest.mark.parametrize("room", [10, 70_000, 100_000])
def test_a_full_disk_ends_the_step_log_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, room: int, unrecorded: list[object]
) -> None:
    path, failures = tmp_path / "steps.log", Failures()
    with files_end_at(room):
        outputs = run(path, failures)
    assert outputs == unrecorded
    assert failures.counters() == {"observer_failures.step_log": 1}
    (line,) = [each for each in caplog.messages if "step_log" in each]
    assert "File too large" in line and str(path) in line and "requests go on" in line
    if room > 70_000:  # what there was room for can be replayed, as it is
        assert 0 < path.stat().st_size <= room
        assert replay(path).difference is None
        assert sum(1 for _ in StepLog(path)) > 500


def test_a_disk_that_is_full_from_the_start(
    caplog: pytest.LogCaptureFixture, unrecorded: list[object]
) -> None:
    failures = Failures()
    assert run(Path("/dev/full"), failures) == unrecorded
    assert failures.counters() == {"observer_failures.step_log": 1}
    (line,) = caplog.messages
    assert "No space left on device" in line


def test_a_log_that_breaks_off_anywhere_is_read_up_to_there(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    run(whole, Failures(), num_requests=8)
    data = whole.read_bytes()
    header = len(data) - sum(8 + length for length in lengths(data))
    ends = [header]
    for length in lengths(data):
        ends.append(ends[-1] + 8 + length)
    for number, end in enumerate(ends):
        part.write_bytes(data[:end])
        assert sum(1 for _ in StepLog(part)) == number
        assert replay(part).difference is None
        part.write_bytes(data[: end + 5])
        assert sum(1 for _ in StepLog(part, allow_truncated=True)) == number
        assert replay(part, allow_truncated=True).difference is None


def lengths(data: bytes) -> list[int]:
    """The lengths of a step log's records, without their eight bytes of length and checksum."""
    place, found = len(b"metronome step log\n"), []
    while place < len(data):
        found.append(int.from_bytes(data[place : place + 4], "little"))
        place += 8 + found[-1]
    return found[1:]  # the first is the header


@pytest.mark.parametrize("error", [RuntimeError("mine"), SystemExit(3), KeyboardInterrupt()])
async def test_an_observer_of_the_users_may_raise_anything(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(finished: FinishedRequest) -> None:
        raise error

    told: list[str] = []
    engine = AsyncLLMEngine(fake_session(FakeClient(counting)))
    engine.add_observer(broken)
    engine.add_observer(lambda finished: told.append(finished.request_id))
    for name in ("a", "b", "c"):
        async for output in engine.generate([5, 5], SamplingParams(max_tokens=2), name):
            last = output
        assert len(last.outputs[0].token_ids) == 2
    assert told == ["a", "b", "c"]
    (num,) = [num for name, num in engine.failures.counters().items() if "broken" in name]
    assert num == 3
    (line,) = [each for each in caplog.messages if "broken" in each]
    assert type(error).__name__ in line and "\n" not in line
    engine.shutdown()


def test_failures_are_in_the_statistics() -> None:
    failures = Failures()
    config, clock = SchedulerConfig(**OPTIONS), FakeClock()
    scheduler = make_scheduler(config, KVManager(NUM_BLOCKS, BLOCK_SIZE), clock=clock, seed=7)
    core = EngineCore(scheduler, DigestWorker(NUM_BLOCKS, BLOCK_SIZE), 2)
    client = InprocClient(
        core, fake_session(FakeClient(counting)).client.decided, failures=failures
    )
    failures.add("step_log")
    failures.add("step_log")
    for stats in (client.stats(), client.latest_stats()):
        assert stats is not None and stats.counters["observer_failures.step_log"] == 2


def test_a_guard_stops_only_what_is_to_stop(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures()
    once, always = (
        ObserverGuard(failures, name, "x", stops=name == "once") for name in ("once", "always")
    )
    for guard in (once, always):
        assert guard.run(divmod, 7, 2) == (3, 1)
        for _ in range(3):
            assert guard.run(divmod, 1, 0) is None
    assert once.run(divmod, 7, 2) is None and always.run(divmod, 7, 2) == (3, 1)
    assert failures.counters() == {
        "observer_failures.once": 1,
        "observer_failures.always": 3,
    }
    assert [each.split(" has failed")[0] for each in caplog.messages] == ["once", "always"]


class Full(io.StringIO):
    """A file on a disk that is full."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("state", ["full", "closed"])
def test_a_log_that_nobody_can_read_raises_nothing(
    state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = Full()
    if state == "closed":
        stream.close()
    logger = logging.Logger("of this test")
    logger.addHandler(LossyHandler(stream))
    logger.error("a line")
    assert capsys.readouterr().err == ""


def test_a_trace_that_is_not_whole_is_no_trace(tmp_path: Path) -> None:
    failures = Failures()
    profiler = TorchProfiler(str(tmp_path), failures)
    for room in (0, 1000):
        profiler.start()
        torch.ones(4) + 1
        with files_end_at(room), pytest.raises(ConfigError, match="could not be written"):
            profiler.stop()
    assert list(tmp_path.iterdir()) == []
    assert failures.counters() == {"observer_failures.profiler": 2}
    profiler.start()
    torch.ones(4) + 1
    assert len(profiler.stop()) == 1

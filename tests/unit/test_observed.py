"""What AsyncLLMEngine tells of itself: health, finished requests, what steps brought."""

import asyncio
import contextvars
import threading

import pytest
from support.fakes import FakeClient, FakeClock, counting, fake_session

from engine import AsyncLLMEngine, SamplingParams
from engine.errors import EngineDeadError
from engine.messages.requests import FinishedRequest
from engine.observe.histograms import Histogram

ASKED: contextvars.ContextVar[str] = contextvars.ContextVar("asked")


async def read(engine: AsyncLLMEngine, name: str, params: SamplingParams, prompt: int = 2) -> None:
    ASKED.set(name)
    async for _ in engine.generate([5] * prompt, params, name):
        pass


async def test_health_is_progress(gate: threading.Semaphore) -> None:
    """A core that hangs in a step is noticed in time, and is well again behind it."""
    engine = AsyncLLMEngine(fake_session(FakeClient(counting, pace=gate.acquire)))
    await engine.check_health()
    reader = asyncio.create_task(read(engine, "a", SamplingParams(max_tokens=2)))
    await asyncio.sleep(0.05)
    with pytest.raises(TimeoutError, match=r"not answered within 0\.1 s"):
        await engine.check_health(0.1)
    gate.release(2)
    await reader
    await engine.check_health()
    engine.shutdown()
    with pytest.raises(EngineDeadError):
        await engine.check_health()


async def test_a_dead_core_is_not_healthy() -> None:
    client = FakeClient(counting)
    client.dies_at = 1
    engine = AsyncLLMEngine(fake_session(client))
    with pytest.raises(EngineDeadError):
        await read(engine, "a", SamplingParams(max_tokens=2))
    with pytest.raises(EngineDeadError):
        await engine.check_health()


async def test_observers_are_told_of_each_end_in_its_context(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also of aborted requests, and of those whose reader left. Observers' errors end nothing."""
    told: dict[str, FinishedRequest] = {}
    contexts = {}

    def observer(finished: FinishedRequest) -> None:
        told[finished.request_id] = finished
        contexts[finished.request_id] = ASKED.get()

    def broken(finished: FinishedRequest) -> None:
        raise RuntimeError("an observer of mine")

    pace = threading.Event()
    engine = AsyncLLMEngine(fake_session(FakeClient(counting, pace=lambda: pace.wait(0.01))))
    engine.add_observer(broken)
    engine.add_observer(observer)
    long = SamplingParams(max_tokens=200, output_kind="delta")
    leaver = asyncio.create_task(read(engine, "left", long))
    aborted = asyncio.create_task(read(engine, "aborted", long))
    await read(engine, "whole", SamplingParams(max_tokens=3, n=2), prompt=7)
    await engine.abort("aborted")
    await aborted
    leaver.cancel()
    await asyncio.gather(leaver, return_exceptions=True)
    await engine.check_health()  # behind the command that drops it
    assert contexts == {name: name for name in ("whole", "aborted", "left")}
    assert {name: each.finish_reason for name, each in told.items()} == {
        "whole": "length", "aborted": "abort", "left": "abort",
    }  # fmt: skip
    whole = told["whole"]
    assert (whole.num_prompt_tokens, whole.num_output_tokens, whole.params.n) == (7, 6, 2)
    assert whole.metrics.finished_time == whole.metrics.last_token_time
    assert "an observer of mine" in caplog.text
    engine.shutdown()


async def test_what_steps_bring_is_measured() -> None:
    """The fake core has a step each quarter of a second, on its own clock."""
    engine = AsyncLLMEngine(fake_session(FakeClient(counting, clock=FakeClock())))
    latencies = engine.measure()
    assert engine.measure() is latencies
    await read(engine, "a", SamplingParams(max_tokens=5, n=2), prompt=3)
    await read(engine, "b", SamplingParams(max_tokens=4, output_kind="delta"))
    first, between = latencies.first_token.counted(), latencies.between_tokens.counted()
    assert (sum(first.counts), first.total) == (2, 0.5)
    assert (sum(between.counts), between.total) == (4 + 3, 7 * 0.25)
    steps = latencies.step_tokens.counted()
    assert (sum(steps.counts), steps.total) == (5 + 4, 3 + 10 + 2 + 4)
    counts = engine.counts
    assert (counts.prompt_tokens, counts.generation_tokens) == (5, 14)
    engine.shutdown()


def test_a_histogram_forgets_nothing() -> None:
    """However many values it has been given, and whether or not they were counted yet."""
    histogram = Histogram([1.0, 2.0])
    for each in range(10_000):
        histogram.add((0.5, 1.0, 1.5, 3.0)[each % 4])
        if each % 3333 == 0:
            assert sum(histogram.counted().counts) == each + 1
    counted = histogram.counted()
    assert counted.counts == [5000, 2500, 2500] and counted.total == 15_000.0

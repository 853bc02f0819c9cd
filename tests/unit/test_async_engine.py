"""AsyncLLMEngine on a scripted core: many tasks, slow readers, cancellation, death."""

import asyncio
import threading
from typing import Any

import pytest
from support.fakes import FakeClient, counting, fake_session
from support.patience import WAIT_SECONDS

from engine import AsyncLLMEngine, RequestOutput, SamplingParams
from engine.errors import EngineDeadError, RequestError

PARAMS = SamplingParams(max_tokens=4)


async def collect(
    async_engine: AsyncLLMEngine, name: str, params: SamplingParams = PARAMS
) -> list[RequestOutput]:
    return [output async for output in async_engine.generate([5, 6], params, name)]


def new_engine(fake: FakeClient) -> AsyncLLMEngine:
    return AsyncLLMEngine(fake_session(fake))


async def test_a_hundred_at_once() -> None:
    """126: exact counts; cancelling some disturbs nobody; ids can be used again."""
    async_engine = new_engine(FakeClient(counting))
    params = [
        SamplingParams(max_tokens=1 + i % 7, output_kind=("cumulative", "delta", "final")[i % 3])
        for i in range(100)
    ]
    for _ in range(2):
        tasks = [
            asyncio.create_task(collect(async_engine, str(i), p)) for i, p in enumerate(params)
        ]
        await asyncio.sleep(0)
        for task in tasks[::10]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for i, result in enumerate(results):
            if i % 10 == 0:
                assert isinstance(result, asyncio.CancelledError)
                continue
            assert isinstance(result, list)
            if params[i].output_kind == "delta":
                tokens = [t for output in result for t in output.outputs[0].token_ids]
            else:
                tokens = result[-1].outputs[0].token_ids
            assert tokens == list(range(10, 11 + i % 7))
            assert [output.finished for output in result].count(True) == 1
    async_engine.shutdown()


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final"])
async def test_slow_reader_gets_several_steps_at_once(kind: Any) -> None:
    """122: merged, none lost, finished once."""
    async_engine = new_engine(FakeClient(counting))
    stream = async_engine.generate([5], SamplingParams(max_tokens=50, output_kind=kind), "id")
    outputs = []
    async for output in stream:
        outputs.append(output)
        await asyncio.sleep(0.01)
    assert len(outputs) < 50
    tokens = [t for o in outputs for t in o.outputs[0].token_ids]
    if kind != "delta":
        tokens = outputs[-1].outputs[0].token_ids
    assert tokens == list(range(10, 60))
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    async_engine.shutdown()


async def test_leaving_the_loop_aborts(gate: threading.Semaphore) -> None:
    fake = FakeClient(counting, pace=gate.acquire)
    async_engine = new_engine(fake)
    gate.release(2)
    stream = async_engine.generate([5], SamplingParams(max_tokens=50), "id")
    await anext(stream)
    await stream.aclose()
    gate.release(1)
    again = async_engine.generate([5], SamplingParams(max_tokens=1), "id")
    gate.release(5)
    assert (await anext(again)).outputs[0].token_ids == [10]
    await again.aclose()
    assert fake.aborted == ["id"] and not fake.live
    async_engine.shutdown()


async def test_abort_answers_the_reader(gate: threading.Semaphore) -> None:
    async_engine = new_engine(FakeClient(counting, pace=gate.acquire))
    task = asyncio.create_task(collect(async_engine, "id", SamplingParams(max_tokens=50)))
    await asyncio.sleep(0)
    gate.release(10)
    await async_engine.abort(["id", "nobody"])
    assert (await task)[-1].outputs[0].finish_reason == "abort"
    async_engine.shutdown()


async def test_bad_requests_are_refused_alone(gate: threading.Semaphore) -> None:
    fake = FakeClient(counting, pace=gate.acquire)
    fake.fails_on["large"] = RequestError("can never fit")
    async_engine = new_engine(fake)
    task = asyncio.create_task(collect(async_engine, "a"))
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match="'a' is in use"):
        await collect(async_engine, "a")
    gate.release(100)
    with pytest.raises(RequestError, match="can never fit"):
        await collect(async_engine, "large")
    with pytest.raises(RequestError, match="no tokenizer"):
        await anext(async_engine.generate("text", PARAMS, "b"))
    assert len((await task)[-1].outputs[0].token_ids) == 4
    async_engine.shutdown()


async def test_death_reaches_everybody(gate: threading.Semaphore) -> None:
    """110: those who wait and those who come later, with the cause."""
    fake = FakeClient(counting, pace=gate.acquire)
    fake.dies_at = 2
    async_engine = new_engine(fake)
    tasks = [asyncio.create_task(collect(async_engine, str(i))) for i in range(3)]
    await asyncio.sleep(0)
    gate.release(10)
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, EngineDeadError) and "the fake core died" in str(result)
    for call in (collect(async_engine, "later"), async_engine.abort("0")):
        with pytest.raises(EngineDeadError, match="the fake core died"):
            await call
    async_engine.shutdown()  # waits for the thread, which may still be letting go of the core
    assert not async_engine.is_running and fake.is_shut_down


async def test_shutdown_ends_what_is_read(gate: threading.Semaphore) -> None:
    fake = FakeClient(counting, pace=gate.acquire)
    async_engine = new_engine(fake)
    task = asyncio.create_task(collect(async_engine, "a"))
    await asyncio.sleep(0)
    gate.release(1)
    for _ in range(2):
        async_engine.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await task
    with pytest.raises(EngineDeadError, match="shut down"):
        await collect(async_engine, "b")
    assert fake.is_shut_down


async def test_idle_engine_sleeps() -> None:
    fake = FakeClient(counting)
    async_engine = new_engine(fake)
    await collect(async_engine, "a", SamplingParams(max_tokens=3))
    await asyncio.sleep(0.05)
    assert fake.num_steps == 3  # no step was asked of a core with nothing to do
    assert await async_engine.reset_prefix_cache()
    async_engine.shutdown()


async def test_who_waits_for_a_call_hears_of_a_shutdown(gate: threading.Semaphore) -> None:
    """Asked while a step ran, during which the engine was shut down."""
    async_engine = new_engine(FakeClient(counting, pace=gate.acquire))
    reader = asyncio.create_task(collect(async_engine, "a"))
    await asyncio.sleep(0.05)  # the thread is in its first step
    call = asyncio.create_task(async_engine.reset_prefix_cache())
    await asyncio.sleep(0)
    closing = asyncio.create_task(asyncio.to_thread(async_engine.shutdown))
    await asyncio.sleep(0.05)
    gate.release()
    for task in (call, reader):
        with pytest.raises(EngineDeadError, match="shut down"):
            await asyncio.wait_for(task, WAIT_SECONDS)
    await closing


async def test_who_waits_behind_the_command_that_kills_hears_of_it(
    gate: threading.Semaphore,
) -> None:
    fake = FakeClient(counting, pace=gate.acquire)
    fake.fails_on["b"] = EngineDeadError("gone")
    async_engine = new_engine(fake)
    tasks = [asyncio.create_task(collect(async_engine, "a"))]
    await asyncio.sleep(0.05)
    tasks.append(asyncio.create_task(collect(async_engine, "b")))
    tasks.append(asyncio.create_task(async_engine.reset_prefix_cache()))
    await asyncio.sleep(0)
    gate.release()
    for task in tasks:
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(task, WAIT_SECONDS)


async def test_a_request_the_policy_chokes_on_fails_alone() -> None:
    fake = FakeClient(counting)
    fake.fails_on["bad"] = KeyError("weight")
    async_engine = new_engine(fake)
    other = asyncio.create_task(collect(async_engine, "a"))
    with pytest.raises(KeyError, match="weight"):
        await collect(async_engine, "bad")
    assert (await other)[-1].finished
    async_engine.shutdown()


async def test_of_two_that_come_with_one_id_the_first_is_served(gate: threading.Semaphore) -> None:
    """Also if both come in one turn of the loop, and the second gives up before it hears of it."""
    fake = FakeClient(counting, pace=gate.acquire)
    async_engine = new_engine(fake)
    tasks = [asyncio.create_task(collect(async_engine, "a")) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[2]
    with pytest.raises(RequestError, match="'a' is in use"):
        await tasks[1]
    gate.release(100)
    assert (await tasks[0])[-1].outputs[0].token_ids == [10, 11, 12, 13]
    assert (await collect(async_engine, "a"))[-1].finished and not fake.aborted
    async_engine.shutdown()


async def test_a_death_is_logged_once_with_its_cause_and_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server uses this report to end; a core in the same process reports, too."""
    fake = FakeClient(counting)
    fake.dies_at = 2
    async_engine = new_engine(fake)
    reported = asyncio.Event()
    loop = asyncio.get_running_loop()
    async_engine.on_death(lambda: loop.call_soon_threadsafe(reported.set))
    with pytest.raises(EngineDeadError):
        await collect(async_engine, "a")
    await asyncio.wait_for(reported.wait(), WAIT_SECONDS)
    (record,) = [each for each in caplog.records if each.levelname == "CRITICAL"]
    assert "the fake core died" in record.getMessage()
    late: list[bool] = []
    async_engine.on_death(lambda: late.append(True))
    assert late == [True]  # of an engine that has died already


async def test_a_shutdown_is_no_death(caplog: pytest.LogCaptureFixture) -> None:
    async_engine = new_engine(FakeClient(counting))
    reported: list[bool] = []
    async_engine.on_death(lambda: reported.append(True))
    await collect(async_engine, "a")
    async_engine.shutdown()
    assert not reported and not caplog.records


async def test_questions_that_never_cease_do_not_hide_a_death() -> None:
    """A probe each moment: the engine never rests, and so never looks whether the core lives."""
    fake = FakeClient(counting)
    async_engine = new_engine(fake)
    reported = threading.Event()
    async_engine.on_death(reported.set)
    await async_engine.check_health(WAIT_SECONDS)

    def dead(name: str, *args: Any) -> Any:
        raise EngineDeadError("gone")

    fake.call = dead  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError, match="gone"):
        await async_engine.check_health(WAIT_SECONDS)
    assert reported.wait(WAIT_SECONDS)
    assert not async_engine.is_running

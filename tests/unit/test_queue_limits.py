"""When a server's queue is full: how long a request would wait, and who is refused."""

from __future__ import annotations

import asyncio

import pytest
from support.fakes import FakeClient, counting, fake_session

from engine import AsyncLLMEngine, SamplingParams
from engine.errors import ConfigError, RefusedError
from engine.frontend.pace import QueueLimits, QueuePace
from engine.observe.stats_log import TokenCounts


def busy(pace: QueuePace, num_waiting: int, gap: float, starts: int = 60) -> float:
    """So many wait; requests start at this pace as others end. Returns the time."""
    time = 0.0
    for _ in range(num_waiting):
        pace.arrive()
    for _ in range(starts):
        time += gap
        pace.arrive()
        pace.start(time)
        if pace.num_running > pace.num_seats > 0:
            pace.leave(has_started=True)
    return time


def test_the_wait_follows_from_the_pace_of_late_starts() -> None:
    pace = QueuePace()
    busy(pace, 10, 0.5)
    assert pace.estimated_wait() == pytest.approx(5.0)
    assert pace.estimated_wait(num_arriving=2) == pytest.approx(6.0)


def test_starts_that_nobody_waits_for_show_no_pace() -> None:
    pace = QueuePace()
    busy(pace, 0, 30.0)
    for _ in range(100):
        pace.arrive()
    assert pace.estimated_wait() == 0.0


def test_empty_seats_are_taken_at_once_and_are_no_pace_of_full_ones() -> None:
    pace = QueuePace()
    pace.num_seats = 8
    busy(pace, 0, 0.0, starts=8)  # all seats, in one step
    for _ in range(20):
        pace.leave(has_started=True)
        pace.arrive()
        pace.arrive()
        pace.start(10.0 + pace.num_waiting)  # one a second, as others end
    assert pace.num_queued() == pace.num_waiting == 20
    assert pace.estimated_wait() == pytest.approx(20.0, rel=0.2)
    for _ in range(8):
        pace.leave(has_started=True)
    assert pace.num_queued() == 12


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ((10, None), "10 requests are waiting, the limit is 10"),
        ((99, 4.0), "would wait 5.0 s, the limit is 4"),
    ],
)
def test_a_refusal_names_value_and_limit_and_how_long(
    limits: tuple[int, float | None], said: str
) -> None:
    pace = QueuePace()
    busy(pace, 10, 0.5)
    with pytest.raises(RefusedError, match=said) as error:
        QueueLimits(pace, TokenCounts(), *limits).check(0)
    assert error.value.retry_after == pytest.approx(5.0)


async def test_a_request_too_many_is_refused_before_the_core_is_asked() -> None:
    fake = FakeClient(counting, pace=lambda: None)
    engine = AsyncLLMEngine(fake_session(fake))
    engine.limit_queue(2)
    params = SamplingParams(max_tokens=2)
    readers = [await engine.open([5], params, str(i)) for i in range(2)]
    with pytest.raises(RefusedError, match="2 requests are waiting"):
        await engine.open([5], params, "2")
    assert engine.counts.refused == 1
    with pytest.raises(ConfigError, match="before the first request"):
        engine.limit_queue(3)
    for reader in readers:
        while not (await reader.next()).finished:
            pass
        reader.close()
    again = await engine.open([5], params, "3")
    again.close()
    engine.shutdown()


async def test_readers_that_are_given_up_hear_it_while_the_core_hangs() -> None:
    hang = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait() -> None:
        asyncio.run_coroutine_threadsafe(hang.wait(), loop).result()

    fake = FakeClient(counting, pace=wait)
    engine = AsyncLLMEngine(fake_session(fake))
    params = SamplingParams(max_tokens=50, output_kind="delta")
    readers = [await engine.open([5], params, str(i)) for i in range(3)]
    assert engine.give_up(ValueError("too slow"), ["1"]) == 1
    with pytest.raises(ValueError, match="too slow"):
        await readers[1].next()
    assert engine.give_up(ValueError("the end")) == 2 and engine.give_up(ValueError("again")) == 0
    for reader in (readers[0], readers[2]):
        with pytest.raises(ValueError, match="the end"):
            await reader.next()
    for reader in readers:
        reader.close()
    hang.set()
    await engine.stats()  # the thread goes on
    assert not fake.live
    engine.shutdown()


async def test_what_a_reader_has_not_taken_is_counted_until_it_is() -> None:
    engine = AsyncLLMEngine(fake_session(FakeClient(counting)))
    reader = await engine.open([5], SamplingParams(max_tokens=50, output_kind="delta"), "id")
    while not reader.stream.is_finished:
        await asyncio.sleep(0.001)
    assert engine.unread_bytes()["id"] >= 50 * 8
    assert len((await reader.next()).outputs[0].token_ids) == 50
    assert engine.unread_bytes() == {}
    reader.close()
    engine.shutdown()


async def test_a_sink_takes_outputs_in_place_of_a_reader_that_waits() -> None:
    """Outputs that it does not take wait for the reader, in order."""
    engine = AsyncLLMEngine(fake_session(FakeClient(counting)))
    taken: list[int] = []

    def sink(output: object) -> bool:
        tokens = output.outputs[0].token_ids  # type: ignore[attr-defined]
        if len(taken) % 7 == 6:
            return False
        taken.extend(tokens)
        return not output.finished  # type: ignore[attr-defined]

    reader = await engine.open([5], SamplingParams(max_tokens=40, output_kind="delta"), "id")
    while True:
        output = await reader.next(sink)
        if output.finished and taken[-1:] == output.outputs[0].token_ids[-1:]:
            break
        taken += output.outputs[0].token_ids
        if output.finished:
            break
    assert taken == list(range(10, 50))
    reader.close()
    engine.shutdown()


def test_time_in_which_nobody_waits_is_no_pace() -> None:
    pace = QueuePace(num_seats=4)
    for _ in range(6):
        pace.arrive()
    for second in range(4):
        pace.start(float(second))
    pace.leave(has_started=False)
    pace.leave(has_started=False)  # they gave up, and nothing comes for an hour
    for _ in range(4):
        pace.leave(has_started=True)
    for n in range(6):
        pace.arrive()
        assert QueueLimits(pace, TokenCounts(), 99, 5.0).check(0) is None
        pace.start(3600.0 + n)
        pace.leave(has_started=True)

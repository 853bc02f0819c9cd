"""Pausing, and requests of several clients at one core."""

from __future__ import annotations

import logging
import time

import pytest
from support.fakes import FakeClock, FakeDecided, scheduled_session
from support.simulate import expected, granted, make_request, make_run

from engine.async_engine import AsyncLLMEngine
from engine.core.engine_core import EngineCore
from engine.core.inproc_client import InprocClient
from engine.core.polling import PARKED_SECONDS
from engine.errors import ConfigError, RequestTypeError
from engine.llm_engine import LLMEngine
from engine.messages.params import SamplingParams
from engine.sched.interface import PauseState, RequestCounts, SchedulerInterface
from policylab.verify.fake import CountingWorker


@pytest.mark.behaviour(114)
def test_each_client_gets_its_own() -> None:
    run = make_run()
    for name, client in (("a", 1), ("b", 1), ("c", 2)):
        run.scheduler.add_request(make_request(name, [ord(name)] * 4, 2, client_index=client))
    plan = run.scheduler.schedule()
    outputs = run.scheduler.update_from_output(plan, run.worker.launch(plan))
    assert {client: out.request_ids for client, out in outputs.items()} == {1: ["a", "b"], 2: ["c"]}
    run.scheduler.finish_requests("b")
    plan = run.scheduler.schedule()
    outputs = run.scheduler.update_from_output(plan, run.worker.launch(plan))
    ends = {client: [end.reason for end in out.finished] for client, out in outputs.items()}
    assert ends == {1: ["length"], 2: ["length"]} and outputs[1].request_ids == ["a"]


@pytest.mark.behaviour(115)
def test_pause_of_new_lets_running_go_on_and_holds_the_waiting() -> None:
    run = make_run()
    run.add(make_request("a", [1] * 8, 8))
    run.step()
    run.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    run.add(make_request("b", [2] * 8, 8))
    for _ in range(3):
        run.step()
    assert run.scheduler.get_request_counts() == RequestCounts(running=1, waiting=1)
    assert len(run.outputs["a"]) == 4 and run.outputs["b"] == []
    run.scheduler.set_pause_state(PauseState.UNPAUSED)
    run.drain()
    assert run.outputs["b"] == expected([2] * 8, 8)
    assert set(run.scheduler.make_stats().wait_seconds) <= {"paused", "next step"}


@pytest.mark.behaviour(115)
@pytest.mark.parametrize("depth", [1, 2])
def test_pause_of_all_plans_nothing_and_settles_what_is_on_its_way(
    depth: int,
) -> None:
    run = make_run(depth=depth)
    run.add(make_request("a", [1] * 8, 8))
    run.launch()
    run.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert run.scheduler.schedule().is_empty
    run.settle()
    assert len(run.outputs["a"]) == 1
    assert run.scheduler.schedule().is_empty
    assert run.scheduler.get_request_counts() == RequestCounts(running=1, waiting=0)
    run.scheduler.set_pause_state(PauseState.UNPAUSED)
    plan = run.scheduler.schedule()
    assert granted(run.scheduler, plan) == {"a": 1}
    run.flight.append((plan, run.worker.launch(plan)))
    run.drain()
    assert run.outputs["a"] == expected([1] * 8, 8)


def test_a_pause_is_no_stall(caplog: pytest.LogCaptureFixture) -> None:
    run = make_run(stalled_steps=3)
    run.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    run.add(make_request("a", [1] * 8, 2))
    with caplog.at_level(logging.WARNING, logger="engine.sched"):
        for _ in range(10):
            assert not run.step()
    assert caplog.text == "" and run.scheduler.make_stats().num_rescued_steps == 0


def test_pause_and_resume_by_the_engine() -> None:
    engine = LLMEngine(scheduled_session(FakeClock()))
    engine.pause()
    engine.add_request("a", [1] * 4, SamplingParams(max_tokens=4))
    assert all(engine.step() == [] for _ in range(5))
    engine.resume()
    outputs = [output for _ in range(4) for output in engine.step()]
    assert outputs[-1].finished
    engine.pause("new")
    engine.add_request("b", [2] * 4, SamplingParams(max_tokens=4))
    assert engine.step() == []
    engine.abort_request("b")
    (output,) = engine.step()
    assert output.outputs[0].finish_reason == "abort"
    assert output.metrics is not None and set(output.metrics.waits) <= {"paused", "next step"}
    with pytest.raises(ConfigError, match="'some' is not known; there are: new, all"):
        engine.pause("some")  # type: ignore[arg-type]
    engine.shutdown()


def test_a_paused_engine_leaves_the_processor_to_others() -> None:
    engine = LLMEngine(scheduled_session(FakeClock()))
    engine.pause()
    engine.add_request("a", [1] * 4, SamplingParams(max_tokens=4))
    begun, used = time.monotonic(), time.process_time()
    for _ in range(50):
        engine.step()
    assert time.monotonic() - begun >= 50 * PARKED_SECONDS[0]
    assert time.process_time() - used < 50 * PARKED_SECONDS[0]
    engine.shutdown()


async def test_pause_and_resume_by_the_async_engine() -> None:
    engine = AsyncLLMEngine(scheduled_session(FakeClock()))
    await engine.pause()
    stream = engine.generate([1] * 4, SamplingParams(max_tokens=4), "a")
    await engine.resume()
    outputs = [output async for output in stream]
    assert outputs[-1].finished
    stats = await engine.stats()
    assert stats is not None and stats.num_scheduled_tokens == 4 + 4 - 1
    assert await engine.reset_prefix_cache(reset_running=True)
    engine.shutdown()


def test_a_scheduler_that_knows_no_pause_says_so() -> None:
    class Own(SchedulerInterface):
        add_request = schedule = update_from_output = finish_requests = None  # type: ignore
        get_request_counts = has_finished_requests = None  # type: ignore

    client = InprocClient(EngineCore(Own(), CountingWorker()), FakeDecided())  # type: ignore
    with pytest.raises(ConfigError, match="cannot pause: Own cannot be paused"):
        client.call("pause")


@pytest.mark.behaviour(65)
def test_a_forced_reset_sends_the_running_back_in_their_order() -> None:
    engine = LLMEngine(scheduled_session(FakeClock()))
    for name in "abc":
        engine.add_request(name, [ord(name)] * 20, SamplingParams(max_tokens=6))
    engine.step()
    assert not engine.reset_prefix_cache()
    assert engine.reset_prefix_cache(reset_running=True)
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {o.request_id: o for o in engine.step() if o.finished}
    for name in "abc":
        assert finished[name].outputs[0].token_ids == expected([ord(name)] * 20, 6)
        metrics = finished[name].metrics
        assert metrics is not None and metrics.num_preemptions == 1
        assert [event for event, _ in metrics.events][-2:] == ["preempted", "scheduled"]


@pytest.mark.behaviour(104)
def test_an_id_that_is_no_string_is_refused_and_the_engine_lives() -> None:
    engine = LLMEngine(scheduled_session(FakeClock()))
    with pytest.raises(RequestTypeError, match="request_id must be a str, got int: 7"):
        engine.add_request(7, [1] * 4)  # type: ignore[arg-type]
    assert issubclass(RequestTypeError, TypeError)
    engine.add_request("7", [1] * 4, SamplingParams(max_tokens=2))
    while engine.has_unfinished_requests():
        engine.step()


@pytest.mark.behaviour(20)
def test_the_worker_knows_what_to_mask_until_min_tokens() -> None:
    """Ids that would end the request travel with it; a stop that is sampled anyway is ignored."""
    params = SamplingParams(min_tokens=5, stop_token_ids=[42], max_tokens=16)
    run = make_run()
    run.add(make_request("a", [1] * 4, 16, params=params, eos_token_ids=[2]))
    plan = run.scheduler.schedule()
    (new,) = plan.new
    assert new.stop_token_ids == [2, 42] and new.params.min_tokens == 5
    for position in range(1, 7):
        result = run.worker.launch(plan)
        result.token_ids[:] = 42
        outputs = run.scheduler.update_from_output(plan, result)[0]
        assert bool(outputs.finished) == (position == 5), position
        if outputs.finished:
            assert outputs.finished[0].stop_reason == 42
            break
        plan = run.scheduler.schedule()

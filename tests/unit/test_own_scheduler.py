"""A scheduler of one's own has to write six methods; the others say what it cannot do."""

from __future__ import annotations

import pytest
from support.fakes import FakeDecided
from support.simulate import expected, make_request, make_scheduler

from engine.config.sched import SchedulerConfig
from engine.core.engine_core import EngineCore
from engine.core.inproc_client import InprocClient
from engine.errors import ConfigError
from engine.kv.manager import KVManager
from engine.sched.interface import PauseState, SchedulerInterface
from engine.sched.plugins.find import find_scheduler
from examples.schedulers.one_at_a_time import OneAtATime
from policylab.verify.fake import DigestWorker


class Wraps(SchedulerInterface):
    """Only what must be there, by another scheduler."""

    def __init__(self, inner):
        self._inner = inner

    def add_request(self, add):
        return self._inner.add_request(add)

    def schedule(self):
        return self._inner.schedule()

    def update_from_output(self, plan, result):
        return self._inner.update_from_output(plan, result)

    def finish_requests(self, request_ids, reason="abort"):
        return self._inner.finish_requests(request_ids, reason)

    def get_request_counts(self):
        return self._inner.get_request_counts()

    def has_finished_requests(self):
        return self._inner.has_finished_requests()


def test_six_methods_are_enough_to_serve():
    scheduler = Wraps(make_scheduler())
    core = EngineCore(scheduler, DigestWorker(1000, 16))
    client = InprocClient(core, FakeDecided())
    client.add(make_request("a", [1, 2, 3], 4))
    assert (scheduler.get_num_unfinished_requests(), scheduler.has_unfinished_requests()) == (
        1,
        True,
    )
    tokens = []
    while scheduler.has_requests():
        tokens += [token for out in client.step() for token in out.token_ids]
    assert tokens == expected([1, 2, 3], 4)
    assert scheduler.get_num_unfinished_requests() == 0
    client.shutdown()


def test_one_that_shares_nothing_with_ours_serves_and_aborts():
    """Its requests are its own; what the engine reads of it is what the interface says."""
    kv = KVManager(100, 16)
    config = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=2, max_model_len=100)
    scheduler = OneAtATime(config, kv, None, clock=float)
    client = InprocClient(EngineCore(scheduler, DigestWorker(1000, 16), depth=2), FakeDecided())
    prompts = {"a": [1, 2, 3], "gone": [4] * 20, "c": [5] * 40, "again": [5] * 40}
    for name, prompt in prompts.items():
        client.add(make_request(name, prompt, 6))
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    ends = {}
    for _ in range(100):
        for out in client.step():
            rest = iter(out.token_ids)
            for name, count in zip(out.request_ids, out.counts or [1] * 9, strict=False):
                tokens[name] += [next(rest) for _ in range(count)]
            ends |= {out.request_ids[end.index]: end.reason for end in out.finished}
        if tokens["gone"] and "gone" not in ends:
            client.abort(["gone"])
        if not client.num_unfinished():
            break
    assert ends == {"a": "length", "gone": "abort", "c": "length", "again": "length"}
    for name in ("a", "c", "again"):
        assert tokens[name] == expected(prompts[name], 6)
    assert kv.num_free == kv.num_usable
    client.shutdown()


def test_what_it_did_not_write_is_said_or_nothing():
    scheduler = Wraps(make_scheduler())
    with pytest.raises(NotImplementedError, match="Wraps cannot be paused"):
        scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert scheduler.reset_prefix_cache() is False
    assert scheduler.take_outputs() == {}
    assert scheduler.make_stats() is None
    scheduler.wake("nobody")
    scheduler.shutdown()


def test_whoever_is_ended_is_still_to_be_told_to_the_worker():
    scheduler = Wraps(make_scheduler())
    scheduler.add_request(make_request("a", [1, 2, 3], 4))
    scheduler.schedule()
    scheduler.finish_requests("a")
    assert not scheduler.has_unfinished_requests() and scheduler.has_requests()
    scheduler.schedule()
    assert not scheduler.has_requests()


class Lacks(Wraps):
    schedule = SchedulerInterface.schedule
    add_request = SchedulerInterface.add_request


def test_what_it_lacks_is_named():
    with pytest.raises(ConfigError, match="Lacks lacks the methods add_request, schedule"):
        find_scheduler(Lacks)
    assert find_scheduler(Wraps) is Wraps
    assert find_scheduler(SchedulerConfig().scheduler_cls).__name__ == "Scheduler"

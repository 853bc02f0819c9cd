"""Several simulated cores: conversations find what their earlier turns have left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from engine.errors import ConfigError
from engine.messages.requests import AddRequest
from engine.messages.wire import CacheNews
from engine.rpc.balance import Balancer
from policylab.sim.balanced import Balanced, Router, run_balanced
from policylab.sim.run import Engine
from policylab.sim.workloads.sessions import Conversations

TALKS = Conversations(num_requests=300, turns=12.0, think=2.0, max_context=2000)
ENGINE = Engine(num_blocks=400, max_num_seqs=16)
BIG = replace(ENGINE, num_blocks=1600, max_num_seqs=64, max_num_batched_tokens=2048)


class InTurn:
    """Each core in turn."""

    def __init__(self) -> None:
        self._num = 0

    def choose(self, request: AddRequest) -> int:
        self._num += 1
        return self._num % 4

    def start(self, request_id: str) -> None: ...

    def end(self, request_id: str) -> None: ...

    def update(self, core: int, news: CacheNews) -> None: ...


def balanced(
    router: Callable[[], Router] = lambda: Balancer(4, 16), front_ends: int = 1
) -> Balanced:
    made = run_balanced(
        router, TALKS, ENGINE, num_cores=4, num_front_ends=front_ends, seed=3, rate=8.0
    )
    assert len(made.ttft) == 300 and min(made.ttft) > 0.0 and made.seconds > max(made.ttft)
    return made


def test_conversations_hit_as_often_as_with_one_pool() -> None:
    one = run_balanced(lambda: Balancer(1, 16), TALKS, BIG, num_cores=1, seed=3, rate=8.0)
    by_events, in_turn = balanced(), balanced(InTurn)
    assert by_events.hit_rate >= 0.95 * one.hit_rate
    assert in_turn.hit_rate < 0.8 * by_events.hit_rate
    assert by_events.ttft_at(99) <= in_turn.ttft_at(99)
    assert set(by_events.cores) == {0, 1, 2, 3}
    assert balanced().ttft == by_events.ttft


def test_two_front_ends_do_not_need_to_know_of_each_other() -> None:
    assert balanced(front_ends=2).hit_rate >= 0.95 * balanced().hit_rate


def test_numbers_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_front_ends is 0, must be at least 1"):
        run_balanced(InTurn, TALKS, ENGINE, num_cores=4, num_front_ends=0)

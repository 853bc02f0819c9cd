"""Limits: of the configuration, of the pool, of seats."""

from __future__ import annotations

import pytest
from support.simulate import expected, make_request, make_run

from engine.config.decide import cap_to_pool
from engine.config.kv_groups import Group
from engine.config.sched import SchedulerConfig
from engine.errors import ConfigError, RequestError
from engine.sched.policies.priority import Priority


@pytest.mark.behaviour(11)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_num_batched_tokens": 8, "max_num_seqs": 16}, ("8", "16", "raise the first")),
        (
            {"max_num_batched_tokens": 512, "enable_chunked_prefill": False, "max_model_len": 1000},
            ("512", "1000", "enable_chunked_prefill is False"),
        ),
        (
            {"long_prefill_token_threshold": 3000, "max_model_len": 1000},
            ("3000", "1000", "long_prefill_token_threshold"),
        ),
        (
            {"long_prefill_token_threshold_adaptive": True},
            ("long_prefill_token_threshold", "0 (no cap)", "set that too"),
        ),
    ],
)
def test_limits_that_contradict_each_other_are_named(
    options: dict[str, object], said: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as refused:
        SchedulerConfig(**options)
    assert all(part in str(refused.value) for part in said)


@pytest.mark.behaviour(11)
def test_a_small_budget_is_enough_with_chunks() -> None:
    run = make_run(max_num_batched_tokens=512, max_model_len=1000)
    run.add(make_request("long", [1] * 900, 3))
    run.drain()
    assert run.plans[:3] == [{"long": 512}, {"long": 388}, {"long": 1}]
    assert run.outputs["long"] == expected([1] * 900, 3)


@pytest.mark.behaviour(30)
def test_a_request_that_never_fits_is_refused_as_it_comes() -> None:
    """Alone it must fit with min(prompt + max_tokens, max_model_len), less the last token's KV."""
    run = make_run(num_blocks=5, max_model_len=100)  # 4 usable blocks of 16
    with pytest.raises(RequestError, match=r"grow to 65 tokens and need 5 KV .* only 4; lower"):
        run.scheduler.add_request(make_request("large", [1] * 50, 16))
    assert not run.scheduler.has_unfinished_requests()
    run.add(make_request("fits", [1] * 50, 15))
    run.drain()
    assert run.outputs["fits"] == expected([1] * 50, 15)


@pytest.mark.behaviour(30)
def test_the_length_is_capped_to_a_pool_given_by_number() -> None:
    asked = SchedulerConfig(max_model_len=2048)
    capped = cap_to_pool(asked, 16, 5)
    assert capped.max_model_len == 4 * 16 + 1


def test_a_pool_without_a_block_for_each_group_is_refused() -> None:
    asked, groups = SchedulerConfig(max_model_len=2048), (Group(), Group(window=8, max_blocks=4))
    assert cap_to_pool(asked, 16, 3, groups).max_model_len == 17
    with pytest.raises(ConfigError, match=r"num_kv_blocks is 2, .* 2 groups .* at least 3"):
        cap_to_pool(asked, 16, 2, groups)


@pytest.mark.behaviour(46)
@pytest.mark.parametrize("preempts", [False, True])
def test_an_urgent_request_takes_the_seat_of_the_least_urgent(preempts: bool) -> None:
    run = make_run(policy=Priority(preempt_for_waiting=preempts), max_num_seqs=2)
    for name, priority in (("good", 1), ("bad", 2)):
        run.add(make_request(name, [ord(name[0])] * 8, 12, priority=priority))
    run.step()
    run.add(make_request("urgent", [7] * 8, 2, priority=0))
    run.step()
    assert set(run.plans[-1]) == ({"good", "urgent"} if preempts else {"good", "bad"})
    run.drain()
    assert run.outputs["bad"] == expected([ord("b")] * 8, 12)
    assert (run.scheduler.make_stats().num_preemptions == 1) is preempts

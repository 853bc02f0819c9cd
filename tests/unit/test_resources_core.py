"""Pipeline cadence, prefill gate and block alignment."""

from __future__ import annotations

import pytest
from support.data_plane import Compiler, Compiling, OneAnswer, make_feature_run
from support.simulate import VOCAB_SIZE, expected, make_request

from engine.errors import ConfigError
from engine.lora.decide import AdapterSlots
from engine.sched import Fit, Resource
from engine.structured.decide import GrammarReadiness
from examples.resources.ready import BlockAlignment, PipelineCadence, PrefillGate


def add_all(run, lengths, num_output=16):
    for index, length in enumerate(lengths, len(run.outputs)):
        run.add(make_request(str(index), [index + 1] * length, num_output))


# -- 15, 105: with and without the tokens of the step before


@pytest.mark.behaviour(15)
@pytest.mark.parametrize(
    ("resources", "second"), [([PipelineCadence()], {"1": 512}), ([], {"0": 1, "1": 511})]
)
def test_a_second_step_is_planned_before_the_first_is_settled(resources, second):
    run = make_feature_run(resources=resources, max_num_batched_tokens=512)
    add_all(run, [512, 512])
    run.launch()
    run.launch()
    assert run.plans == [{"0": 512}, second]
    run.settle()
    run.launch()
    assert run.plans[2]["0"] == 1


@pytest.mark.behaviour(105)
@pytest.mark.parametrize(
    ("resources", "third"),
    [([PipelineCadence()], [{"1": 4}, {"0": 1}, {"1": 1}]), ([], [{"0": 1, "1": 4}])],
)
def test_two_batches_in_flight(resources, third):
    """Pieces of a prompt follow each other; only what a step samples must be waited for."""
    run = make_feature_run(resources=resources, depth=2, max_num_batched_tokens=10, max_num_seqs=2)
    add_all(run, [12, 12])
    for _ in range(4):
        run.step()
    assert run.plans[:2] == [{"0": 10}, {"0": 2, "1": 8}]
    assert run.plans[2:5][: len(third)] == third


@pytest.mark.behaviour(105)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_everybody_gets_the_right_tokens_at_a_cadence(depth):
    run = make_feature_run(
        resources=[PipelineCadence()], depth=depth, num_blocks=12, block_size=4, caching=False
    )
    add_all(run, [5, 9, 3, 14], num_output=12)
    run.drain()
    assert run.scheduler.settler.counters.num_preemptions > 0
    for index, length in enumerate([5, 9, 3, 14]):
        assert run.outputs[str(index)] == expected([index + 1] * length, 12)


# -- 12: steps without prompts


def gated(**options):
    gate = PrefillGate()
    return gate, make_feature_run(resources=[gate], max_num_batched_tokens=100, **options)


@pytest.mark.behaviour(12)
def test_new_prompts_wait_while_throttled_and_somebody_decodes():
    gate, run = gated()
    add_all(run, [20])
    run.step()
    gate.throttled = True
    add_all(run, [20, 20])
    run.step()
    gate.throttled = False
    run.step()
    assert run.plans == [{"0": 20}, {"0": 1}, {"0": 1, "1": 20, "2": 20}]


@pytest.mark.behaviour(12)
def test_a_prompt_half_computed_waits_likewise():
    gate, run = gated()
    add_all(run, [20])
    run.step()
    add_all(run, [150])
    run.step()
    gate.throttled = True
    run.step()
    gate.throttled = False
    run.step()
    assert run.plans[1:] == [{"0": 1, "1": 99}, {"0": 1}, {"0": 1, "1": 51}]


@pytest.mark.behaviour(12)
def test_without_decodes_everything_is_admitted():
    gate, run = gated()
    gate.throttled = True
    add_all(run, [20, 20])
    run.step()
    assert run.plans == [{"0": 20, "1": 20}]


@pytest.mark.behaviour(12)
def test_a_throttle_is_ignored_while_open_steps_leave_requests_waiting():
    gate, run = gated(max_num_seqs=3)
    add_all(run, [60, 60, 60], num_output=4)
    run.step()
    gate.throttled = True
    run.step()
    assert run.plans == [{"0": 60, "1": 40}, {"0": 1, "1": 20, "2": 60}]
    add_all(run, [60], num_output=4)
    run.step()
    assert run.plans[2] == {"0": 1, "1": 1, "2": 1}, "the step before left nobody waiting"


@pytest.mark.behaviour(12)
def test_one_token_after_a_cached_prompt_passes_the_gate():
    gate, run = gated()
    run.add(make_request("0", [1] * 33, 2))
    run.drain()
    run.add(make_request("1", [2] * 20, 9))
    run.step()
    gate.throttled = True
    run.add(make_request("2", [1] * 33, 2))
    run.step()
    assert run.plans[-1] == {"1": 1, "2": 1}


# -- alignment


def test_pieces_of_a_prompt_end_at_multiples_but_for_the_last():
    run = make_feature_run(resources=[BlockAlignment(16)], max_num_batched_tokens=40)
    add_all(run, [70, 50], num_output=3)
    run.drain()
    assert run.plans[:4] == [{"0": 32}, {"0": 38}, {"0": 1, "1": 32}, {"0": 1, "1": 18}]
    assert run.outputs["0"] == expected([1] * 70, 3)


def test_alignment_needs_a_budget_that_reaches_a_multiple():
    for option in ("max_num_batched_tokens", "long_prefill_token_threshold"):
        options = {"max_num_batched_tokens": 100, "long_prefill_token_threshold": 0, option: 31}
        with pytest.raises(ConfigError, match=f"{option} is 31, .* multiples of 32"):
            make_feature_run(resources=[BlockAlignment(32)], **options)
    with pytest.raises(ConfigError, match="aligned to 0 tokens"):
        BlockAlignment(0)


# -- whom a resource is asked about


class CountsFits(Resource):
    """Watches the requests in ``watched``, and counts the calls of ``fit`` for each request."""

    name = "counts fits"

    def __init__(self):
        self.watched = set()
        self.num_calls = {}

    def attach(self, scheduler):
        self.scheduler = scheduler

    def watches(self, req):
        return req.request_id in self.watched

    def fit(self, req, num_tokens, step):
        self.num_calls[req.request_id] = self.num_calls.get(req.request_id, 0) + 1
        return Fit(num_tokens)


def test_a_resource_fits_the_requests_that_it_watches_and_may_watch_others_later():
    counting = CountsFits()
    run = make_feature_run(resources=[counting])
    add_all(run, [3, 3])
    for _ in range(5):
        run.step()
    assert counting.num_calls == {"0": 1, "1": 1}, "decodes of requests that are not watched"
    counting.watched.add("1")
    counting.scheduler.watch_again(counting.scheduler.roster.by_id["1"])
    for _ in range(5):
        run.step()
    assert counting.num_calls == {"0": 1, "1": 6}
    run.drain()
    assert run.outputs == {str(index): expected([index + 1] * 3, 16) for index in range(2)}


@pytest.mark.parametrize("num_requests", [3, 40])
def test_who_is_in_one_step_at_a_time_is_passed_over_without_asking(num_requests):
    run = make_feature_run(
        resources=[PipelineCadence()], depth=2, num_blocks=400, max_num_seqs=num_requests
    )
    add_all(run, [4] * num_requests)
    for _ in range(4):
        run.step()
    run.launch()
    assert run.plans[-1] == dict.fromkeys(run.outputs, 1), "all of them decode"
    assert not run.scheduler.schedule().num_tokens
    run.drain()
    assert all(run.outputs[str(index)] == expected([index + 1] * 4, 16) for index in range(3))


def slow_grammar():
    return GrammarReadiness(Compiler({"slow": lambda: Compiling(OneAnswer([]), 4)}), VOCAB_SIZE)


@pytest.mark.behaviour(88, 91)
@pytest.mark.parametrize(
    ("make_resource", "asks", "waits"),
    [
        (lambda: AdapterSlots(1), {"adapter": "B"}, {"adapter": 5.0}),
        (slow_grammar, {"grammar": "slow"}, {"grammar": 3.0}),
    ],
    ids=["adapters", "grammars"],
)
def test_the_wait_is_charged_to_the_resource_that_caused_it(make_resource, asks, waits):
    """A step takes a second. The first adapter is in use for five of them."""
    clock, resource = [0.0], make_resource()
    run = make_feature_run(resources=[resource], clock=lambda: clock[0])
    if "adapter" in asks:
        run.add(make_request("first", [7] * 10, 5, adapter="A"))
    run.add(make_request("waits", [8] * 60, 4, **asks))
    while "waits" not in run.finished:
        run.step()
        clock[0] += 1.0
    assert {
        cause: seconds for cause, seconds in run.ends["waits"].waits.items() if seconds
    } == waits

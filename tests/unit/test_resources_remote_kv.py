"""KV from elsewhere: loads with and without waiting, failures, and blocks that outlive requests."""

from __future__ import annotations

import pytest
from support.data_plane import Source, answer, make_feature_run
from support.simulate import make_request

from engine.errors import ConfigError
from engine.kv_transfer.decide import RemoteKV
from engine.messages.step import Received
from engine.sched.policies import Priority


def remote(request_id, length=60, num_output=4, first=None, **params):
    prompt = [ord(request_id) if first is None else first] * length
    return make_request(request_id, prompt, num_output, kv_transfer_params=params or None)


def loading(request_id, num_tokens, *, ticks=3, **fields):
    return remote(request_id, num_tokens=num_tokens, asynchronous=True, ticks=ticks, **fields)


def make(failure_policy="recompute", **options):
    source = Source(options.get("block_size", 16))
    return source, make_feature_run(resources=[RemoteKV(failure_policy)], source=source, **options)


def held(run, request_id):
    return len(run.scheduler.kv.held(run.scheduler.roster.by_id[request_id]))


# -- 97: loads


@pytest.mark.behaviour(97)
def test_tokens_that_are_loaded_within_the_step_count_as_computed():
    source, run = make()
    run.add(request := remote("0", num_tokens=48))
    run.step()
    assert run.plans == [{"0": 12}] and source.num_loads == 1
    run.drain()
    assert run.outputs["0"] == answer(request)
    run.add(again := remote("1", first=ord("0"), num_tokens=48))
    run.drain()
    assert source.num_loads == 1 and run.outputs["1"] == answer(again), "it was cached here"


@pytest.mark.behaviour(97)
@pytest.mark.parametrize("depth", [1, 2])
def test_who_waits_for_a_load_holds_blocks_and_computes_nothing(depth):
    source, run = make(depth=depth)
    run.add(request := loading("0", 48))
    run.add(other := remote("1", length=20))
    run.step()
    assert run.scheduler.get_request_counts() == (1, 0, 1)
    assert run.plans[0] == {"1": 20} and held(run, "0") == 4
    run.wait()
    assert source.num_loads == 1
    assert [plan["0"] for plan in run.plans if "0" in plan] == [12, 1, 1, 1]
    assert run.outputs["0"] == answer(request) and run.outputs["1"] == answer(other)
    assert run.scheduler.kv.num_free == run.scheduler.kv.num_usable


@pytest.mark.behaviour(97)
def test_a_load_goes_on_while_nobody_runs():
    _, run = make()
    run.add(request := loading("0", 48, ticks=2))
    assert run.step(), "the worker is told, though it computes nothing"
    assert run.plans == [{}] and run.scheduler.get_request_counts().parked == 1
    run.wait()
    assert run.outputs["0"] == answer(request)


@pytest.mark.behaviour(97)
def test_the_last_token_is_computed_even_if_all_could_be_loaded():
    _, run = make()
    run.add(request := loading("0", 60))
    run.wait()
    assert next(plan["0"] for plan in run.plans if "0" in plan) == 1
    assert run.outputs["0"] == answer(request)


@pytest.mark.behaviour(97)
def test_others_may_share_what_was_loaded():
    source, run = make()
    run.add(loading("0", 48))
    run.wait()
    run.add(request := remote("1", first=ord("0")))
    run.wait()
    assert source.num_loads == 1 and run.plans[-5]["1"] == 12
    assert run.outputs["1"] == answer(request)


@pytest.mark.behaviour(97)
@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_failed_load_did_not_bring_is_computed(depth):
    source, run = make(depth=depth)
    run.add(request := loading("0", 48, error="connection lost"))
    run.wait()
    assert next(plan["0"] for plan in run.plans if "0" in plan) == 36, "half of it was good"
    assert run.outputs["0"] == answer(request) and source.num_loads == 1


@pytest.mark.behaviour(97)
def test_a_failed_load_ends_its_request_if_that_is_wanted():
    _, run = make("fail")
    run.add(loading("0", 48, error="connection lost"))
    run.add(other := remote("1", length=20))
    run.wait()
    assert run.finished["0"] == ("error", None) and run.outputs["1"] == answer(other)
    assert run.ends["0"].message == "its KV could not be loaded: connection lost"
    assert run.ends["0"].code == "kv_transfer_failed"


def refuse(*_):
    raise OSError("connection lost")


@pytest.mark.behaviour(97)
@pytest.mark.parametrize("ticks", [0, 1], ids=["within the step", "by waiting"])
@pytest.mark.parametrize("failure_policy", ["recompute", "fail"])
def test_a_load_that_cannot_start_is_a_failed_load_of_its_request_alone(failure_policy, ticks):
    """Its blocks were lent for ever to a transfer that never began, or it ended the engine."""
    source, run = make(failure_policy, num_blocks=9)
    source.start_load = refuse
    run.add(request := remote("0", num_tokens=48, asynchronous=ticks > 0, ticks=ticks))
    run.add(other := remote("1", length=20))
    run.wait()
    if failure_policy == "recompute":
        assert run.outputs == {"0": answer(request), "1": answer(other)}
    else:
        assert run.finished["0"] == ("error", None) and run.outputs["1"] == answer(other)
        assert run.ends["0"].message == "its KV could not be loaded: OSError: connection lost"
    assert not run.scheduler.kv.lent and run.scheduler.reset_prefix_cache()


@pytest.mark.behaviour(97)
@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_load_that_cannot_start_after_a_step_in_flight_loses_nothing_of_that_step(is_aborted):
    """What its source raised left ``update_from_output``, and the engine was dead."""
    source, run = make("fail", num_blocks=9, depth=2, late=True, caching=False)
    source.start_load = refuse
    run.add(remote("0", length=60, num_output=20))
    run.add(other := remote("2", length=20, num_output=8))
    run.step()
    run.launch()
    run.scheduler.finish_requests("0")
    run.finished["0"] = ("abort", None)
    run.add(loading("1", 48, ticks=1))
    run.launch()
    assert "1" in run.scheduler.roster.parked and "1" not in run.finished
    run.settle()
    run.settle()
    if is_aborted:
        run.scheduler.finish_requests("1")
        run.finished["1"] = ("abort", None)
    run.wait()
    assert run.finished["1"] == ("abort" if is_aborted else "error", None)
    assert run.outputs["2"] == answer(other)
    assert run.scheduler.kv.num_free == run.scheduler.kv.num_usable


@pytest.mark.behaviour(97)
def test_a_load_that_cannot_start_within_the_step_is_charged_to_its_request():
    """It waits for the next step because of its load, and no other waits with it."""
    clock = [0.0]
    source, run = make(clock=lambda: clock[0])
    source.start_load = refuse
    run.add(remote("0", num_tokens=48))
    run.add(remote("1", length=20))
    while "0" not in run.finished:
        run.step()
        clock[0] += 1.0
    assert run.plans[0] == {"1": 20} and run.plans[1]["0"] == 60
    assert run.ends["0"].waits["failed load"] == 1.0


@pytest.mark.behaviour(97)
def test_a_preempted_request_whose_load_could_not_start_computes():
    source, run = make(num_blocks=9, caching=False)
    source.start_load = refuse
    run.add(first := remote("0", length=30, num_output=50))
    run.add(request := loading("1", 48, num_output=50))
    run.wait()
    assert run.scheduler.settler.counters.num_preemptions > 0
    assert run.outputs == {"0": answer(first), "1": answer(request)}


@pytest.mark.behaviour(97)
def test_an_unknown_way_to_take_failures_is_refused():
    with pytest.raises(ConfigError, match="'retry', must be 'recompute' or 'fail'"):
        RemoteKV("retry")


@pytest.mark.behaviour(97)
def test_a_preempted_request_loads_again():
    source, run = make(num_blocks=9, caching=False)
    run.add(first := remote("0", length=30, num_output=50))
    run.add(request := loading("1", 48, num_output=50))
    run.wait()
    assert run.scheduler.settler.counters.num_preemptions > 0
    assert source.num_loads == 2
    assert run.outputs == {"0": answer(first), "1": answer(request)}


# -- 98: blocks that are still being sent


@pytest.mark.behaviour(98)
def test_blocks_are_free_once_they_are_sent():
    _, run = make()
    kv = run.scheduler.kv
    run.add(request := remote("0", keep=True, ticks=4))
    while "0" not in run.finished:
        run.step()
    assert run.ends["0"].kv_transfer_params == {"blocks": 4}
    assert kv.num_free == kv.num_usable - 4 and not kv.reset_prefix_cache()
    run.wait()
    assert kv.num_free == kv.num_usable and run.outputs["0"] == answer(request)
    assert not kv.sent("0"), "told twice"


@pytest.mark.behaviour(98)
def test_params_reach_the_output_of_a_request_that_keeps_nothing():
    _, run = make()
    run.add(remote("0", farewell={"port": 5}))
    run.wait()
    assert run.ends["0"].kv_transfer_params == {"port": 5}


# -- 99: memory


@pytest.mark.behaviour(99)
def test_a_second_load_that_does_not_fit_is_held_back():
    source, run = make(num_blocks=10)
    requests = [
        loading("0", 112, length=120, num_output=8),
        loading("1", 64, length=70, num_output=8),
    ]
    for request in requests:
        run.add(request)
    run.step()
    assert run.scheduler.get_request_counts() == (0, 1, 1)
    assert held(run, "0") == 8 and held(run, "1") == 0 and source.num_loads == 1
    run.wait()
    assert source.num_loads == 2
    for request in requests:
        assert run.outputs[request.request_id] == answer(request)


@pytest.mark.behaviour(99)
def test_a_load_waits_for_those_who_run():
    _, run = make(num_blocks=10)
    run.add(first := remote("0", length=70, num_output=8))
    run.step()
    run.add(second := loading("1", 112, length=120, num_output=8))
    run.step()
    assert run.scheduler.get_request_counts() == (1, 1, 0)
    run.wait()
    assert run.outputs == {"0": answer(first), "1": answer(second)}


# -- 100: aborts


@pytest.mark.behaviour(100)
def test_blocks_of_an_aborted_load_come_back_once_and_when_it_is_over():
    _, run = make()
    kv = run.scheduler.kv
    run.add(loading("0", 48, ticks=5))
    run.step()
    run.scheduler.finish_requests("0")
    assert kv.num_free == kv.num_usable - 4
    for _ in range(3):
        run.step()
    assert kv.num_free == kv.num_usable - 4, "the load still writes into them"
    run.wait()
    assert kv.num_free == kv.num_usable
    run.remote.received(Received("0", 48))
    assert kv.num_free == kv.num_usable


@pytest.mark.behaviour(100)
def test_an_id_used_again_waits_until_the_load_of_its_predecessor_is_over():
    """Or the end of the one would be taken for the end of the other."""
    source, run = make()
    run.add(loading("0", 48, ticks=4))
    run.step()
    run.scheduler.finish_requests("0")
    run.add(again := loading("0", 48, ticks=2))
    run.step()
    assert run.scheduler.get_request_counts().waiting == 1 and source.num_loads == 1
    run.wait()
    assert source.num_loads == 2 and run.outputs["0"] == answer(again)


@pytest.mark.behaviour(100)
def test_a_load_into_blocks_that_are_not_trusted_any_more_ends_first():
    """The request adopted what another one wrote wrongly; it starts again when its load is over."""

    def fail(seq, upto):
        return "broken" if seq.request_id == "0" and upto > 40 else None

    source, run = make(fail=fail, max_num_batched_tokens=40)
    run.add(remote("0", length=60, first=5))
    run.step()
    run.add(request := loading("1", 56, ticks=6, first=5))
    run.launch()
    assert run.scheduler.get_request_counts().parked == 1
    assert run.scheduler.kv.num_adopted(run.scheduler.roster.by_id["1"]) == 3
    run.settle()
    assert run.finished["0"] == ("error", None) and held(run, "1") == 4
    run.wait()
    assert source.num_loads == 2
    assert run.outputs["1"] == answer(request)


def test_a_reset_with_a_load_under_way_changes_nothing_of_it():
    _, run = make()
    run.add(request := loading("0", 48, ticks=4))
    run.step()
    assert not run.scheduler.reset_prefix_cache(reset_running=True)
    run.wait()
    assert run.outputs["0"] == answer(request)
    assert run.scheduler.reset_prefix_cache()


@pytest.mark.behaviour(65)
def test_a_forced_reset_that_fails_has_sent_the_running_back_all_the_same():
    _, run = make()
    run.add(loading("0", 48, ticks=4))
    run.add(request := remote("1", length=20))
    run.step()
    run.step()
    assert not run.scheduler.reset_prefix_cache(reset_running=True)
    assert run.scheduler.roster.by_id["1"].is_waiting
    run.wait()
    assert run.outputs["1"] == answer(request)


# -- blocks that steps in flight still write


class Evicts(Priority):
    """Evicts whom it is told to, once."""

    def __init__(self):
        super().__init__()
        self.victims = []

    def evict(self, view):
        victims, self.victims = self.victims, []
        return [req for req in view.running if req.request_id in victims]


@pytest.mark.behaviour(97)
@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("how", ["finish", "abort", "preemption"])
def test_a_load_waits_for_the_steps_that_still_write_its_blocks(how, depth):
    """They were given to the load at once, and a step that was computed behind it wrote on it."""
    policy = Evicts()
    source, run = make(
        num_blocks=6, depth=depth, late=True, policy=policy, caching=False, max_num_seqs=2
    )
    stops = [answer(remote("0", length=40, num_output=20))[6]] if how == "finish" else []
    run.add(make_request("0", [ord("0")] * 40, 15, eos_token_ids=stops, priority=1))
    while len(run.outputs["0"]) < 5:
        run.step()
    run.add(request := loading("1", 64, length=66, ticks=1))
    policy.victims = ["0"] * (how == "preemption")
    if how == "abort":
        run.scheduler.finish_requests("0")
        run.finished["0"] = ("abort", None)
    while len(run.outputs["1"]) < 2:
        run.step()
    (seq,) = (seq for seq in run.worker.seqs.values() if seq.tokens[0] == ord("1"))
    for position in range(66):  # all that was loaded, and what was computed behind it
        block, place = divmod(position, 16)
        held = run.worker.kv[seq.tables[0][block]][place]
        assert held == seq.digest_at(position), f"position {position} was overwritten"
    run.wait()
    assert source.num_loads == 1 and run.outputs["1"] == answer(request)


@pytest.mark.behaviour(100)
def test_an_abort_before_its_load_has_begun_gives_the_blocks_back_at_once():
    """Nobody will say that such a load is over."""
    source, run = make(num_blocks=6, depth=2, late=True, caching=False)
    run.add(remote("0", length=60, num_output=20))
    run.step()
    run.launch()
    run.scheduler.finish_requests("0")
    run.finished["0"] = ("abort", None)
    run.add(loading("1", 48, ticks=1))
    run.launch()
    assert "1" in run.scheduler.roster.parked and not source.num_loads
    run.scheduler.finish_requests("1")
    run.finished["1"] = ("abort", None)
    assert run.scheduler.kv.num_free == run.scheduler.kv.num_usable
    run.wait()
    assert not source.num_loads


@pytest.mark.parametrize("depth", [1, 2])
def test_who_lacks_a_block_while_another_loads_waits_for_the_end_of_the_load(depth):
    """It lost its own, the loading one lost its load for it, and so on for ever."""
    options = {"max_num_batched_tokens": 4, "max_num_seqs": 2, "caching": False, "depth": depth}
    _, run = make(num_blocks=7, block_size=2, **options)
    run.add(request := remote("0", length=1, num_output=7))
    run.step()
    run.add(other := loading("1", 4, length=5, num_output=1, ticks=12))
    for _ in range(80):
        run.step()
    assert run.outputs == {"0": answer(request), "1": answer(other)}
    assert run.ends["0"].num_preemptions == 0

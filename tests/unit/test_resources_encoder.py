"""Media in prompts: what may be encoded in a step, and how long its output is kept."""

from __future__ import annotations

import pytest
from support.data_plane import answer, make_feature_run
from support.simulate import make_request

from engine.errors import ConfigError, RequestError
from engine.messages.media import MediaContent, PixelArray
from engine.messages.requests import MediaItem
from engine.mm.arrivals import Arrivals
from engine.mm.decide import EncoderBudget, EncoderCache
from engine.mm.store import PixelStore


def with_media(request_id, length, *items, num_output=4, first=7, priority=0):
    """A prompt of placeholders; items are (offset, length, hash)."""
    media = [MediaItem(*item) for item in items]
    prompt = [first] * length
    return make_request(request_id, prompt, num_output, media=media, priority=priority)


def make(budget, **options):
    return make_feature_run(resources=[budget], cache_size=budget.cache.num_tokens, **options)


def plans_of(run, count):
    start = len(run.plans)
    for _ in range(count):
        run.step()
    return run.plans[start:]


# -- the budget of a step


@pytest.mark.behaviour(92)
@pytest.mark.parametrize("cache_size", [1024, 4096])
def test_chunks_end_before_media_that_cannot_be_encoded_in_the_step(cache_size):
    run = make(EncoderBudget(1024, cache_size), max_num_batched_tokens=1024)
    requests = [with_media(str(i), 800, (100, 600, f"image {i}"), first=i) for i in range(3)]
    for request in requests:
        run.add(request)
    assert plans_of(run, 2) == [{"0": 800, "1": 100, "2": 100}, {"0": 1, "1": 700}]
    assert plans_of(run, 1) == [{"0": 1, "1": 1, "2": 700}]
    run.drain()
    assert [run.outputs[request.request_id] for request in requests] == list(map(answer, requests))


@pytest.mark.behaviour(92)
def test_one_image_in_two_prompts_is_encoded_once():
    run = make(EncoderBudget(100, 100))
    for i in range(2):
        run.add(with_media(str(i), 200, (50 + i, 100, "same"), first=i))
    assert plans_of(run, 1) == [{"0": 200, "1": 200}]
    assert run.worker.num_encoded == 100


@pytest.mark.behaviour(92)
def test_one_image_twice_in_a_prompt_is_encoded_once():
    run = make(EncoderBudget(100, 100))
    run.add(request := with_media("0", 300, (0, 100, "same"), (150, 100, "same")))
    assert plans_of(run, 1) == [{"0": 300}]
    run.drain()
    assert run.worker.num_encoded == 100 and run.outputs["0"] == answer(request)


@pytest.mark.behaviour(92)
def test_a_media_item_that_could_never_be_encoded_is_refused_as_it_comes():
    for budget in (EncoderBudget(100, 1000), EncoderBudget(1000, 100)):
        run = make(budget)
        with pytest.raises(RequestError, match=r"token 5 has 101 tokens, but .* 100"):
            run.add(with_media("0", 200, (5, 101, "large")))
        assert not run.scheduler.has_requests()


@pytest.mark.behaviour(92)
def test_text_goes_past_a_prompt_that_waits_for_the_encoder():
    run = make(EncoderBudget(50, 1000))
    run.add(with_media("0", 60, (0, 50, "a")))
    run.add(with_media("1", 60, (0, 50, "b"), first=8))
    run.add(make_request("2", [9] * 60))
    assert plans_of(run, 2) == [{"0": 60, "2": 60}, {"0": 1, "2": 1, "1": 60}]


# -- items that must not be cut


@pytest.mark.behaviour(93)
def test_an_item_is_computed_in_one_step_if_it_must_not_be_cut():
    budget = EncoderBudget(1024, 2048, whole_media=True, longest_item=800)
    run = make(budget, max_num_batched_tokens=1024)
    run.add(request := with_media("0", 1200, (400, 800, "image")))
    assert plans_of(run, 2) == [{"0": 400}, {"0": 800}]
    run.drain()
    assert run.outputs["0"] == answer(request)


@pytest.mark.behaviour(93)
def test_items_may_be_cut_otherwise():
    run = make(EncoderBudget(1024, 2048), max_num_batched_tokens=1024)
    run.add(with_media("0", 1200, (400, 800, "image")))
    assert plans_of(run, 2) == [{"0": 1024}, {"0": 176}]
    assert run.worker.num_encoded == 800


@pytest.mark.behaviour(93)
def test_a_step_too_small_for_an_item_is_a_configuration_error():
    budget = EncoderBudget(1024, 2048, whole_media=True, longest_item=800)
    with pytest.raises(ConfigError, match=r"800 tokens .* max_num_batched_tokens is 100"):
        make(budget, max_num_batched_tokens=100)


@pytest.mark.behaviour(93)
def test_an_item_longer_than_the_model_promised_is_refused():
    run = make(EncoderBudget(1024, 2048, whole_media=True), max_num_batched_tokens=100)
    with pytest.raises(RequestError, match="800 tokens that must be computed in one step"):
        run.add(with_media("0", 1200, (400, 800, "image")))


# -- how long outputs are kept


def item(key, length=10):
    return MediaItem(0, length, key)


@pytest.mark.behaviour(94)
def test_what_nobody_uses_is_evicted_only_for_room_and_reported_once():
    cache = EncoderCache(30)
    uses = {key: cache.use(item(key)) for key in "abc"}
    assert cache.num_available == 0
    for key in "ba":
        cache.end(uses[key])
        cache.end(uses[key])
    assert cache.num_available == 20 and cache.take_evicted() == []
    again = cache.use(item("b"))
    assert cache.num_available == 10 and "a" in cache
    cache.use(item("d"))
    assert list(cache.entries) == ["b", "c", "d"]
    assert (cache.take_evicted(), cache.take_evicted()) == (["a"], [])
    cache.end(again)
    assert list(cache.idle) == ["b"]


@pytest.mark.behaviour(94)
def test_an_entry_of_two_users_stays_until_both_are_gone():
    cache = EncoderCache(30)
    first, second = cache.use(item("a")), cache.use(item("a"))
    cache.end(first)
    assert not cache.idle and cache.num_used == 10
    cache.end(second)
    assert list(cache.idle) == ["a"] and cache.num_used == 0


@pytest.mark.behaviour(94)
def test_a_later_prompt_finds_what_was_encoded_before():
    run = make(EncoderBudget(100, 250), caching=False)
    for index, key in enumerate("abac"):
        run.add(with_media(str(index), 120, (0, 100, key), num_output=1))
        run.drain()
    assert run.worker.num_encoded == 300, "the second a was still there"
    assert run.worker.freed == ["b"], "longest unused of the three"


@pytest.mark.behaviour(95)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_media_are_kept_until_their_tokens_are_known_to_be_computed(depth):
    budget = EncoderBudget(100, 100)
    run = make(budget, depth=depth, max_num_batched_tokens=150)
    run.add(with_media("0", 120, (0, 100, "a"), first=1))
    run.add(with_media("1", 120, (0, 100, "b"), first=2))
    run.launch()
    assert budget.cache.num_used == 100 and run.plans[0] == {"0": 120}
    if depth > 1:
        run.launch()
        assert run.plans[1] == {"0": 1}, "no room for b while the step that reads a is in flight"
    run.settle()
    assert budget.cache.num_used == 0 and list(budget.cache.idle) == ["a"]
    run.launch()
    assert run.plans[-1] == {"0": 1, "1": 120}
    run.drain()
    assert run.worker.freed == ["a"]


@pytest.mark.behaviour(34)
def test_what_a_failed_row_encoded_is_not_used_by_others():
    def fail(seq, upto):
        return "no memory" if seq.request_id == "0" else None

    run = make(EncoderBudget(100, 100), fail=fail)
    run.add(with_media("0", 120, (0, 100, "a"), first=1))
    run.step()
    assert run.finished["0"] == ("error", None)
    run.add(request := with_media("1", 120, (0, 100, "a"), first=2))
    run.drain()
    assert run.worker.freed == ["a"] and run.worker.num_encoded == 200
    assert run.outputs["1"] == answer(request)


def test_cached_media_need_no_encoder():
    run = make(EncoderBudget(100, 100))
    run.add(with_media("0", 200, (10, 96, "a")))
    run.drain()
    run.worker.encoded.clear()
    run.add(request := with_media("1", 200, (10, 96, "a")))
    run.drain()
    assert run.worker.num_encoded == 96 and run.outputs["1"] == answer(request)


def test_after_a_reset_no_output_of_before_is_used_by_later_requests():
    budget = EncoderBudget(100, 100)
    run = make(budget, max_num_batched_tokens=60)
    run.add(with_media("0", 40, (0, 30, "idle"), num_output=1))
    run.drain()
    run.add(first := with_media("1", 120, (0, 70, "used"), first=8))
    run.step()
    run.scheduler.reset_encoder_cache()
    assert list(budget.cache.entries) == ["used"], "the request that has begun to read it"
    run.add(second := with_media("2", 120, (0, 70, "used"), first=9))
    run.add(third := with_media("3", 40, (0, 30, "idle"), first=10))
    run.drain()
    assert run.worker.num_encoded == 30 + 70 + 70 + 30
    assert run.worker.freed == ["idle", "used"]
    for request in (first, second, third):
        assert run.outputs[request.request_id] == answer(request)


def test_an_output_that_is_stale_goes_with_its_last_user():
    budget = EncoderBudget(100, 100)
    run = make(budget, max_num_batched_tokens=60)
    run.add(with_media("0", 120, (0, 70, "used")))
    run.step()
    run.scheduler.reset_encoder_cache()
    run.drain()
    assert not budget.cache.entries and run.worker.freed == ["used"]


def test_stale_outputs_of_two_requests_need_no_further_room():
    """Each request has begun to read what the other needs next."""
    run = make(EncoderBudget(100, 100), max_num_batched_tokens=40, long_prefill_token_threshold=20)
    run.add(one := with_media("0", 110, (0, 50, "a"), (50, 50, "b"), first=8))
    run.add(other := with_media("1", 110, (0, 50, "b"), (50, 50, "a"), first=9))
    run.step()
    run.scheduler.reset_encoder_cache()
    run.drain()
    assert [run.outputs[name] for name in "01"] == [answer(one), answer(other)]


# -- content that comes later


def make_late(*, store=None, **options):
    """A run whose media have late content."""
    store = PixelStore() if store is None else store
    arrivals = Arrivals(store.drop)
    run = make(EncoderBudget(100, 200, arrivals=arrivals), **options)
    return run, arrivals, store


def bring(run, store, key, *request_ids, error=""):
    pixels = {} if error else {"pixel_values": PixelArray("<f4", [1], b"1234")}
    content = MediaContent(key, pixels, error=error)
    run.scheduler.arrived(store.take(request_ids, content))


def test_a_prompt_is_computed_up_to_the_first_picture_that_has_not_come():
    run, arrivals, store = make_late()
    run.add(request := with_media("0", 100, (20, 30, "a"), (60, 30, "b")))
    run.add(text := make_request("1", [9] * 10, 3))
    assert plans_of(run, 3) == [{"0": 20, "1": 10}, {"1": 1}, {"1": 1}]
    run.step()
    assert not run.launch(), "nothing can be computed"
    bring(run, store, "b", "0")
    assert not run.launch(), "a is needed first"
    bring(run, store, "a", "0")
    assert plans_of(run, 1) == [{"0": 80}]
    run.drain()
    assert run.outputs["0"] == answer(request) and run.outputs["1"] == answer(text)
    assert not len(arrivals) and not len(store)


def test_a_prompt_that_begins_with_a_picture_waits_outside_the_queue():
    run, _, store = make_late(max_num_seqs=1)
    run.add(request := with_media("0", 50, (0, 30, "a")))
    run.add(text := make_request("1", [9] * 10, 3))
    run.step()
    assert run.plans == [{"1": 10}], "the only seat is free for others"
    assert run.scheduler.make_stats().waiting_by_cause == {"encoder": 1}
    bring(run, store, "a", "0")
    run.drain()
    assert run.outputs["0"] == answer(request) and run.outputs["1"] == answer(text)


def test_no_seat_is_kept_for_a_picture_while_others_can_run():
    run, _, store = make_late(max_num_seqs=1)
    run.add(request := with_media("0", 50, (20, 30, "a")))
    assert plans_of(run, 1) == [{"0": 20}]
    assert not run.launch() and run.scheduler.get_request_counts().running == 1
    run.add(text := make_request("1", [9] * 10, 3))
    assert plans_of(run, 5)[1:4] == [{"1": 10}, {"1": 1}, {"1": 1}]
    assert run.outputs["1"] == answer(text)
    assert run.scheduler.get_request_counts().parked == 1
    bring(run, store, "a", "0")
    run.drain()
    assert run.outputs["0"] == answer(request)


def test_waiting_for_a_picture_is_no_stall():
    run, _, store = make_late(stalled_steps=3)
    run.add(request := with_media("0", 50, (20, 30, "a")))
    run.step()
    assert not any(run.launch() for _ in range(20))
    assert run.scheduler.make_stats().num_preemptions == 0
    bring(run, store, "a", "0")
    run.drain()
    assert run.outputs["0"] == answer(request)


def test_what_cannot_come_ends_only_the_requests_that_it_concerns():
    run, arrivals, store = make_late()
    for name in "0123":
        run.add(with_media(name, 60, (20, 30, "a"), first=int(name)))
    run.step()
    bring(run, store, "a", "0", "unknown", error="a picture is damaged: no data")
    run.step()
    bring(run, store, "a", "1")
    bring(run, store, "a", "2", error="too late")
    run.drain()
    assert run.finished["0"] == ("error", None) and run.ends["0"].code == "invalid_media"
    assert run.ends["0"].message == "a picture is damaged: no data"
    assert [run.finished[name][0] for name in "123"] == ["length"] * 3
    assert not len(arrivals) and not len(store)


def test_cached_content_need_not_come_again():
    run, arrivals, store = make_late()
    for name in "01":
        run.add(request := with_media(name, 60, (20, 30, "a"), first=int(name)))
        if name == "0":
            bring(run, store, "a", name)
        run.drain()
    assert run.outputs["1"] == answer(request) and run.worker.num_encoded == 30
    run.add(with_media("2", 60, (20, 30, "a"), first=1))
    bring(run, store, "a", "2", error="not needed")
    run.drain()
    assert run.finished["2"][0] == "length" and not len(arrivals)


def test_a_cached_picture_is_not_evicted_for_another_of_the_same_chunk():
    run, _, store = make_late(max_num_batched_tokens=200)
    run.add(with_media("0", 100, (0, 60, "b"), num_output=1))
    bring(run, store, "b", "0")
    run.drain()
    run.add(with_media("1", 190, (0, 90, "a"), (100, 60, "b"), num_output=1, first=8))
    run.add(with_media("2", 90, (0, 60, "c"), num_output=1, first=9))
    bring(run, store, "a", "1")
    bring(run, store, "c", "2")
    run.drain()
    assert {end[0] for end in run.finished.values()} == {"length"}
    assert run.worker.num_encoded == 60 + 90 + 60


def test_the_content_of_media_is_kept_until_the_last_of_its_requests_ends():
    run, arrivals, store = make_late()
    requests = [with_media(str(i), 50, (5, 10, "same"), num_output=3 + 3 * i) for i in range(2)]
    requests.append(with_media("2", 50, (5, 10, "other"), num_output=30))
    for request in requests:
        run.add(request)
        bring(run, store, request.media[0].hash, request.request_id)
    assert len(store) == 2
    plans_of(run, 4)  # the first request ends
    assert len(store) == 2 and store.get("same") is not None
    run.scheduler.finish_requests(["2"])
    assert len(store) == 1 and store.get("other") is None
    bring(run, store, "other", "2")
    assert len(store) == 1, "no unfinished request has it"
    run.drain()
    assert len(store) == 0 and len(arrivals) == 0

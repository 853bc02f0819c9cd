"""Pictures at random: late, twice, never, wrong, out of order, with aborts and preemptions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from support.data_plane import FeatureWorker, answer, make_feature_run
from support.late_pictures import Hands, submission
from support.simulate import make_request

from engine.errors import RequestError
from engine.frontend.contents import Contents
from engine.messages.media import MediaContent, PixelArray
from engine.messages.requests import AddRequest, MediaItem
from engine.messages.step import StepPlan
from engine.mm.arrivals import Arrivals
from engine.mm.decide import EncoderBudget
from engine.mm.store import PixelStore

NUM_REQUESTS = 25
LONGEST = 40
KEYS = "abcdef"


class SeeingWorker(FeatureWorker):
    """Encodes only what has come."""

    store: PixelStore

    def apply(self, plan: StepPlan) -> None:
        if plan.media is not None:
            media = self.media | plan.media.media
            for slot, index in plan.media.encode:
                assert self.store.get(media[slot][index].hash) is not None, "it has not come"
        super().apply(plan)


class Company:
    """A core, a front end, and a user with many pictures."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.store = PixelStore()
        self.arrivals = Arrivals(self.store.drop)
        cache = rng.choice([12, 30])
        budget = EncoderBudget(
            rng.choice([12, 100]), cache, whole_media=rng.random() < 0.3, arrivals=self.arrivals
        )
        worker = SeeingWorker(num_blocks := rng.choice([24, 60]), 4, cache_size=cache)
        worker.store = self.store
        self.run = make_feature_run(
            resources=[budget],
            worker=worker,
            depth=rng.choice([1, 2]),
            num_blocks=num_blocks,
            block_size=4,
            caching=rng.random() < 0.7,
            max_num_seqs=rng.choice([1, 3, 8]),
            max_num_batched_tokens=rng.choice([16, 64]),
            max_model_len=64,
            policy=rng.choice(["fcfs", "lpm", "priority"]),
            stalled_steps=5,
        )
        self.hands = Hands(rng.choice([1, 3]))
        self.late: list[tuple[Sequence[str], MediaContent]] = []  # messages under way
        client: Any = self
        self.contents = Contents(
            client,
            self.hands,
            lambda: None,
            cache_bytes=rng.choice([0, 8]),
            most_bytes=rng.choice([4, 1000]),
        )
        self.unfinished: dict[str, AddRequest] = {}
        self.may_fail: set[str] = set()  # a picture came with an error for them
        self.num_answered = self.num_failed = 0

    def bring(self, request_ids: Sequence[str], content: MediaContent) -> None:
        """Some messages come twice, or overtake others."""
        for _ in range(self.rng.choice([1, 1, 1, 2])):
            self.late.insert(self.rng.randint(0, len(self.late)), (list(request_ids), content))

    def add(self, name: str) -> None:
        length = self.rng.randint(1, LONGEST)
        media, place = [], 0
        while self.rng.random() < 0.6:
            offset = place + self.rng.randint(0, 6)
            key = self.rng.choice(KEYS)
            size = 3 + KEYS.index(key)
            if offset + size > length:
                break
            media.append(MediaItem(offset, size, key))
            place = offset + size
        prompt = [self.rng.choice([7, 8])] * length
        request = make_request(name, prompt, self.rng.randint(1, 12), media=media)
        try:
            self.run.add(request)
        except RequestError:  # e.g. an item that is too long for a step
            return
        self.unfinished[name] = request
        self.contents.start(submission([name], {item.hash: None for item in media}))

    def act(self) -> None:
        rng = self.rng
        kind = rng.random()
        begun = list(self.hands.begun)
        if begun and kind < 0.3:
            self.hands.finish(rng.choice(begun))
        elif begun and kind < 0.36:
            self.hands.fail(rng.choice(begun), RequestError("damaged"))
        elif self.late and kind < 0.7:
            self.arrive()
        elif self.unfinished and kind < 0.75:
            name = rng.choice(list(self.unfinished))
            self.run.scheduler.finish_requests(name)
            self.end(name)
        elif kind < 0.78:  # nonsense of a client
            name = rng.choice([*self.unfinished, "unknown"])
            data = PixelArray("<f4", [3, 5], b"1234")
            nonsense = MediaContent(rng.choice(KEYS), {"pixel_values": data})
            self.take([name], nonsense)
        self.contents.deliver()
        for _ in range(rng.choice([0, 1, 3])):
            self.step()

    def arrive(self) -> None:
        self.take(*self.late.pop(0))

    def take(self, request_ids: Sequence[str], content: MediaContent) -> None:
        arrival = self.store.take(request_ids, content)
        if arrival.fault:
            self.may_fail.update(request_ids)
        self.run.scheduler.arrived(arrival)

    def step(self) -> None:
        if not self.run.step():
            self.run.read(self.run.scheduler.take_outputs())
        for name in self.unfinished.keys() & self.run.finished.keys():
            reason, _ = self.run.finished[name]
            if reason == "length":
                assert self.run.outputs[name] == answer(self.unfinished[name])
                self.num_answered += 1
            else:
                assert self.run.ends[name].code == "invalid_media"
                assert self.unfinished[name].media and name in self.may_fail
                self.num_failed += 1
            self.end(name)

    def end(self, name: str) -> None:
        del self.unfinished[name]
        self.contents.end(name)

    def finish(self) -> None:
        """What is missing comes now, unless it never does: those requests are aborted."""
        for _ in range(4000):
            if not self.unfinished:
                break
            self.step()
            for key in list(self.hands.begun):
                self.hands.finish(key)
            self.contents.deliver()
            while self.late:
                self.arrive()
        assert not self.unfinished, f"no end: {list(self.unfinished)}"
        self.run.drain()


@pytest.mark.parametrize("case", range(12))
def test_every_request_ends_and_nothing_is_left(seed: int, case: int) -> None:
    rng = random.Random(seed)
    num_answered = num_failed = 0
    for _ in range(6):
        company = Company(rng)
        for index in range(NUM_REQUESTS):
            company.add(str(index))
            while rng.random() < 0.7:
                company.act()
        company.finish()
        company.contents.reset()
        assert not len(company.contents) and not len(company.store) and not len(company.arrivals)
        stats = company.run.scheduler.make_stats()
        assert not stats.num_policy_faults and not stats.num_running
        num_answered += company.num_answered
        num_failed += company.num_failed
    assert num_answered > num_failed > 0

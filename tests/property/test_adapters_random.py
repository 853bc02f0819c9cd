"""Adapters that fail, are slow, change on disk, are replaced, unloaded and pinned while requests
use them: each request gets the tokens of one content, and nothing is lost or left over."""

from __future__ import annotations

import random

import pytest
from support.adapters import FakeReader, digest_of, slots_of
from support.data_plane import answer, make_feature_run
from support.simulate import make_request

from engine.errors import ConfigError, RequestError
from engine.lora.library import MAX_TICKETS
from engine.messages.adapters import AdapterSource
from engine.messages.requests import AddRequest

NAMES, PATHS = ("x", "y", "z", "w"), ("a", "b", "c", "d")
NUM_REQUESTS = 40


class Play:
    """A run with random loads, and what must come of it."""

    def __init__(self, rng: random.Random, depth: int) -> None:
        self.rng = rng
        self.reader = FakeReader(is_slow=True, **{path: path for path in PATHS})
        self.max_loras = rng.randint(1, 3)
        self.most_copies = self.max_loras + rng.randint(0, 2)
        self.slots = slots_of(self.reader, self.max_loras, most_copies=self.most_copies)
        assert self.slots.library is not None
        self.library = self.slots.library
        self.run = make_feature_run(
            depth=depth,
            late=rng.random() < 0.5,
            resources=[self.slots],
            num_blocks=rng.randint(14, 20),
            block_size=4,
            policy=rng.choice(["fcfs", "lpm", "adapter-clustering"]),
            max_num_seqs=rng.randint(2, 6),
            max_num_batched_tokens=rng.randint(8, 40),
            max_model_len=48,
        )
        self.added: dict[str, AddRequest] = {}
        self.reqs: dict[str, object] = {}
        self.wanted: dict[str, str] = {}  # digest that was known when the request came
        self.aborted: set[str] = set()
        self.tickets: dict[str, tuple[str, str]] = {}
        self.contents = set(PATHS)

    def drive(self) -> None:
        actions = (self.add, self.add, self.add, self.read, self.read, self.change, self.load)
        rare = (self.remove, self.pin, self.abort)
        for tick in range(5000):
            if self.rng.random() < 0.6:
                self.rng.choice(actions if self.rng.random() < 0.8 else rare)()
            self.publish()
            self.run.step()
            use = self.slots.use()
            assert use.num_host_copies <= self.most_copies
            assert use.num_slots_used <= self.max_loras
            running = {req.adapter for req in self.run.scheduler.roster.running} - {None}
            assert len(running) <= self.max_loras
            if tick > 200 and len(self.added) == NUM_REQUESTS:
                self.reader.is_slow = False
                if not (self.run.flight or self.run.scheduler.has_requests()):
                    break
        else:
            stuck = [repr(req) for req in self.run.scheduler.roster.by_id.values()]
            raise AssertionError(f"no end: {stuck}")
        self.run.drain()

    def add(self) -> None:
        rng, name = self.rng, self.rng.choice((None, *NAMES))
        if len(self.added) == NUM_REQUESTS:
            return
        source = None
        if rng.random() < 0.7:
            path = PATHS[NAMES.index(name)] if name is not None and rng.random() < 0.9 else "a"
            source = AdapterSource(path, rng.choice((0, 0, 1)), rng.random() < 0.1)
        known = None if name is None else self.library.find(name)
        request_id = str(len(self.added))
        prompt = [7] * rng.randint(1, 20) + [rng.randrange(3)]
        request = make_request(
            request_id, prompt, rng.randint(1, 26), adapter=name, adapter_source=source
        )
        try:
            self.run.add(self.slots.resolved(request))
        except RequestError as error:
            assert error.code in ("model_not_found", "adapter_exists", None), error
            assert known is None or source is not None, "an adapter that is loaded is refused"
            return
        assert name is None or known is not None or source is not None
        self.added[request_id] = request
        self.reqs[request_id] = self.run.scheduler.roster.by_id[request_id]
        if known is not None and known["digest"] and not (source and source.replaces):
            self.wanted[request_id] = known["digest"]

    def read(self) -> None:
        """Let one reading end."""
        if self.reader.readings:
            self.reader.finish(self.rng.choice(self.reader.readings[-4:]).order.path)

    def change(self) -> None:
        path = self.rng.choice(PATHS)
        content = f"{path}{self.rng.randrange(3)}"
        self.contents.add(content)
        is_bad = self.rng.random() < 0.2
        self.reader.disk[path] = ConfigError("the files are damaged") if is_bad else content

    def load(self) -> None:
        name, ticket = self.rng.choice(NAMES), str(self.rng.random())
        path = PATHS[NAMES.index(name)]
        if len(self.tickets) == MAX_TICKETS:
            return
        try:
            self.library.read(ticket, name, 0, path, self.rng.random() < 0.5)
        except RequestError as error:
            assert error.code == "adapter_exists"
            return
        self.tickets[ticket] = name, path

    def publish(self) -> None:
        for ticket, (name, path) in list(self.tickets.items()):
            try:
                digest = self.library.state(ticket)
                if digest is None:
                    continue
                self.library.put(ticket, name, 0, path, digest)
            except (ConfigError, RequestError) as error:
                assert "damaged" in str(error) or "loaded already" in str(error)
            del self.tickets[ticket]

    def remove(self) -> None:
        name = self.rng.choice(NAMES)
        self.library.remove(name)
        assert self.library.find(name) is None

    def pin(self) -> None:
        try:
            self.library.pin(self.rng.choice(NAMES))
        except ConfigError as error:
            assert "adapters are pinned" in str(error)

    def abort(self) -> None:
        if self.added:
            for end in self.run.scheduler.finish_requests(self.rng.choice(sorted(self.added))):
                self.aborted.add(end.request_id)
                self.run.finished[end.request_id] = ("abort", None)

    def check(self) -> tuple[int, int]:
        """Numbers of requests that ended well with an adapter, and with an error."""
        num_good = num_failed = 0
        for name, request in self.added.items():
            if name in self.aborted:
                continue
            digest, (reason, _) = self.reqs[name].adapter, self.run.finished[name]
            if reason == "error":
                end = self.run.ends[name]
                assert end.code == "adapter_failed", end
                assert "damaged" in end.message or "have changed" in end.message
                num_failed += 1
                continue
            known = {digest_of(content) for content in self.contents}
            assert (digest in known) == (request.adapter is not None)
            assert self.wanted.get(name, digest) == digest, "another version than that of its name"
            right = make_request("?", request.prompt_token_ids, request.max_tokens, adapter=digest)
            assert self.run.outputs[name] == answer(right)
            num_good += digest is not None
        use = self.slots.use()
        assert use.running == use.waiting == {}
        assert not self.run.scheduler.guard.faults.messages
        return num_good, num_failed


@pytest.mark.parametrize(
    ("depth", "num_runs"), [(1, 8), (2, 8), pytest.param(2, 400, marks=pytest.mark.slow)]
)
def test_requests_get_one_content_and_nothing_is_lost(depth: int, num_runs: int) -> None:
    num_good = num_failed = num_preempted = num_dropped = 0
    for seed in range(1000 * depth, 1000 * depth + num_runs):
        print(f"seed {seed}")
        play = Play(random.Random(seed), depth)
        play.drive()
        good, failed = play.check()
        num_good, num_failed = num_good + good, num_failed + failed
        num_preempted += play.run.scheduler.settler.counters.num_preemptions
        num_dropped += play.library.num_dropped
    assert num_good > 10 * num_runs and num_failed > 2 * num_runs
    assert num_preempted > num_runs / 4 and num_dropped > num_runs

"""Crowds: overload tests with a queue that is refilled as requests end.

A crowd reveals what small cases do not: a request that waits forever while others run, few tokens
per step, or a user who is served worse than others with the same requests."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import count
from math import exp, log
from random import Random
from typing import Any, NamedTuple

from engine.config.sched import SchedulerConfig
from engine.messages.requests import AddRequest
from policylab.verify.case import VOCAB_SIZE, Case, Event, Setup, plain_request
from policylab.verify.case import Add as Comes
from policylab.verify.clients import LiveRequest
from policylab.verify.simulation import Simulation

USERS = ("u0", "u1", "u2", "u3", "u4")
SYSTEM_TOKENS = 8  # prefix of each third prompt, so that the cache matters


class CrowdKind(NamedTuple):
    """A kind of requests, and an engine that is too small for them.

    ``prompt``, ``output``: smallest and largest number of tokens. ``backlog``: the number of
    requests that always wait. ``num_steps``: steps during which requests arrive."""

    name: str
    prompt: tuple[int, int]
    output: tuple[int, int]
    num_blocks: int
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    backlog: int = 8
    num_steps: int = 1500
    tick: float = 2.0**-6


ALIKE = CrowdKind("requests that are alike", (12, 12), (10, 10), num_blocks=32, num_steps=1100)
MIXED = CrowdKind(
    "requests of all sizes", (1, 160), (1, 80), num_blocks=200, num_steps=1700, tick=2.0**-3
)
PROMPTS = CrowdKind("long prompts", (60, 120), (1, 3), num_blocks=400, num_steps=300)
KINDS = (ALIKE, MIXED, PROMPTS)
OVERTAKEN = (
    4  # later requests that started, after which a waiting one does not count for the backlog
)
MOST_LEFT = 24  # at most this many do not count
STILL = 200  # steps without progress of a request with a seat, after which it counts as starved
PATIENCE = 800  # likewise for any request


class Starved(NamedTuple):
    """A request that made no progress for too long while others did."""

    request_id: str
    user: str
    num_prompt: int
    num_output: int
    has_run: bool
    num_steps: int
    since: int
    """The last step in which it made progress."""


class SeenState(NamedTuple):
    """What was measured while a policy served a crowd."""

    digest: str
    """The digest of all plans."""
    num_steps: int
    num_output: int
    """Output tokens."""
    num_tokens: int
    """Computed tokens, including recomputed ones."""
    seconds: float
    """Duration of all steps."""
    num_idle: int
    """Steps that computed nothing although requests wanted to run."""
    num_rescued: int
    """Steps that were planned in the default order, because the policy had run no request for too
    long."""
    num_taken: int
    num_refused: int
    starved: Starved | None
    steps_by_user: dict[str, float]
    """For each user, the mean number of steps from arrival to end of a request."""

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.num_output / self.seconds if self.seconds else 0.0

    @property
    def step_tokens(self) -> float:
        """The mean number of computed tokens per step."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0


class Crowd:
    """Serves one kind of crowd under one policy, with the checks of ``Simulation``.

    ``is_patient``: do not check for starved requests. ``users``: user names, assigned to requests
    in turn. Raises ``AssertionError`` for a broken rule."""

    def __init__(
        self,
        policy: Any,
        options: dict[str, Any],
        kind: CrowdKind,
        *,
        is_patient: bool = False,
        users: tuple[str, ...] = USERS,
        predictor: Any = "history",
    ) -> None:
        self.kind = kind
        self.starved: Starved | None = None
        self._is_patient = is_patient
        self._num_ticks = self._num_left = 0
        self._latest_begun = 0
        self._users = users
        self._rng = Random(kind.num_blocks)
        self._system = [self._rng.randrange(VOCAB_SIZE) for _ in range(SYSTEM_TOKENS)]
        self._names = map(str, count())
        self._num_refused = self._num_idle = self._num_output = 0
        self._progress: dict[
            str, tuple[tuple[int, int], int]
        ] = {}  # largest progress, and its step
        self._still: dict[
            str, tuple[tuple[int, int], int]
        ] = {}  # current progress in the seat, and since which step
        self._came: dict[str, int] = {}
        self._stays: defaultdict[str, list[int]] = defaultdict(list)
        config = SchedulerConfig(
            max_num_batched_tokens=kind.max_num_batched_tokens,
            max_num_seqs=kind.max_num_seqs,
            max_model_len=kind.prompt[1] + kind.output[1] + 1,
            scheduling_policy=policy,
            policy_options=options,
            length_predictor=predictor,
        )
        setup = Setup(config=config, num_blocks=kind.num_blocks, block_size=4, tick=kind.tick)
        self._events: list[Event] = []
        self.simulation = Simulation(Case(setup=setup), every=64, leaks=False)

    @property
    def case(self) -> Case:
        """All requests so far as a case that can be run again."""
        return Case(setup=self.simulation.case.setup, events=list(self._events))

    @property
    def goes_on(self) -> bool:
        """True as long as new requests arrive."""
        return self.simulation.num_steps < self.kind.num_steps and self.starved is None

    def run(self) -> SeenState:
        """Run the crowd to its end."""
        while self.goes_on:
            self.step()
        return self.finish()

    def step(self) -> None:
        """Refill the queue, then run a step."""
        simulation = self.simulation
        counts = simulation.scheduler.get_request_counts()
        left = min(MOST_LEFT, self._num_left)
        for _ in range(self.kind.backlog + left - counts.waiting - counts.parked):
            self._add(next(self._names))
        before = simulation.planned.num_tokens
        self._num_ticks += 1
        simulation.step()
        num_tokens = simulation.planned.num_tokens - before
        self._num_idle += not num_tokens and bool(simulation.clients.live)
        self._watch(is_idle=not num_tokens)

    def finish(self) -> SeenState:
        """Serve the remaining requests; returns what was measured while requests arrived."""
        simulation, planned = self.simulation, replace(self.simulation.planned)
        num_steps = simulation.num_steps
        stats = simulation.scheduler.make_stats()
        if self.starved is None:
            simulation.drain()
        return SeenState(
            digest=simulation.digest,
            num_steps=num_steps,
            num_output=self._num_output,
            num_tokens=planned.num_tokens,
            seconds=planned.seconds + self.kind.tick * (num_steps - planned.num_full),
            num_idle=self._num_idle,
            num_rescued=stats.num_rescued_steps,
            num_taken=simulation.clients.num_accepted,
            num_refused=self._num_refused,
            starved=self.starved,
            steps_by_user={user: sum(n) / len(n) for user, n in self._stays.items()},
        )

    # -- helpers

    def _add(self, name: str) -> None:
        simulation, clients = self.simulation, self.simulation.clients
        before = clients.num_accepted
        request = self._request(name, simulation.now)
        event = Comes(at=self._num_ticks, request=request)
        self._events.append(event)
        simulation.happen(event)
        if clients.num_accepted == before:
            self._num_refused += 1
            return
        self._came[name] = simulation.num_steps
        self._progress[name] = ((0, 0), simulation.num_steps)

    def _watch(self, *, is_idle: bool) -> None:
        """Record which requests made progress, which ended, and the first that has starved.
        ``is_idle``: the step computed nothing, so no request counts as starved."""
        step, all_live = self.simulation.num_steps, self.simulation.clients.live
        for name in [name for name in self._progress if name not in all_live]:
            del self._progress[name]
            self._still.pop(name, None)
            came, user = self._came.pop(name), self._users[int(name) % len(self._users)]
            self._stays[user].append(step - came)
        self._num_left = 0
        begun = self._latest_begun
        for name, live in all_live.items():
            most, since = self._progress[name]
            now = (live.num_heard, max(live.req.num_computed, most[1]))
            if now > most:
                self._num_output += now[0] - most[0]
                self._latest_begun = max(self._latest_begun, int(name))
                self._progress[name] = (now, step)
                continue
            self._num_left += live.req.is_waiting and int(name) < begun - OVERTAKEN
            still = self._stands_still(name, live)
            is_starved = step - since > PATIENCE or still > STILL
            if is_starved and not is_idle and not self._is_patient:
                self.starved = self.starved or _starved(live, step - since, since)

    def _stands_still(self, name: str, live: LiveRequest) -> int:
        """The number of steps that the request has been running without progress; 0 if it waits."""
        req, step = live.req, self.simulation.num_steps
        now = (live.num_heard, -1 if req.is_waiting else req.num_computed)
        before, since = self._still.get(name, (now, step))
        if now != before or req.is_waiting:
            since = step
        self._still[name] = (now, since)
        return step - since

    def _request(self, name: str, now: float) -> AddRequest:
        rng, kind = self._rng, self.kind
        num_prompt, num_output = _between(rng, *kind.prompt), _between(rng, *kind.output)
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(num_prompt)]
        if int(name) % 3 == 0:
            prompt[: len(self._system)] = self._system[:num_prompt]
        user = self._users[int(name) % len(self._users)]
        return plain_request(name, prompt, num_output, now, user, deadline=now + 60.0)


def _starved(live: LiveRequest, num_steps: int, since: int) -> Starved:
    req = live.req
    return Starved(
        request_id=req.request_id,
        user=req.user,
        num_prompt=req.num_prompt,
        num_output=req.num_output,
        has_run=req.history.scheduled_time is not None,
        num_steps=num_steps,
        since=since,
    )


def _between(rng: Random, least: int, most: int) -> int:
    """A log-uniform random number from ``least`` to ``most``."""
    return round(exp(rng.uniform(log(least), log(most))))

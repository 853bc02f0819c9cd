"""Sessions, in which each prompt begins with all earlier prompts and answers of the session."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from math import ceil, exp, inf, log, log1p
from statistics import NormalDist
from typing import Any, ClassVar, NamedTuple

from policylab.sim.job import ANSWER, Job, Span
from policylab.sim.workloads.arrivals import Arrivals, find_arrivals
from policylab.sim.workloads.draws import RandomDraws
from policylab.sim.workloads.lengths import Lengths, find_lengths
from policylab.sim.workloads.open_loop import pairs, uniform
from policylab.sim.workloads.source import JobSource, Workload

NUM_SAMPLED = 4000  # sampled sessions for the mean number of turns
SAMPLE_SEED = 20261125
MAX_TURNS = 10_000
NORMAL = NormalDist()


class Turn(NamedTuple):
    """One request of a session, with the length of its answer."""

    pause: float
    """Seconds between the previous answer and this request."""
    num_new: int
    """Tokens that the prompt adds to the session so far."""
    num_output: int


@dataclass(frozen=True, kw_only=True)
class Sessions(Workload):
    """Base class of workloads with sessions. Sessions start by the arrival process ``arrivals``;
    within a session, each request arrives after the answer to the previous request."""

    name: ClassVar[str]
    """Prefix of the sessions' names, to which a number is added."""

    arrivals: str = "poisson"
    """Arrivals of sessions: ``poisson``, ``gamma(cv=2)``, ``onoff(on=10,off=30)``, ``ramp(...)`` or
    ``burst(...)``."""
    turns: float = 4.0
    """Mean number of requests in a session (geometric)."""
    think: float = 10.0
    """Mean seconds from an answer to the next request."""
    think_sigma: float = 0.0
    """0: these seconds are exponential; else log-normal, with this standard deviation of the
    logarithm (some 2 for calls of tools by coding agents, see docs/internals/workloads.md)."""
    lengths: str = "log-uniform(prompt=(16, 256), output=(8, 256))"
    """Lengths of new prompt text and of answers: ``log-uniform(...)``, ``fixed(...)`` or the name
    of a trace."""
    max_context: int = 4096
    """The most tokens of a prompt with its answer: a session ends before it would exceed them."""
    num_systems: int = 0
    """Number of shared system prompts; each session has one of them. 0: none."""
    system_tokens: int = 0
    """Tokens of a system prompt."""

    def __post_init__(self) -> None:
        Workload.__post_init__(self)
        self.check("turns", self.turns, 1.0, MAX_TURNS)
        self.check("think", self.think, 0.0, 1e6)
        self.check("think_sigma", self.think_sigma, 0.0, 4.0)
        self.check("num_systems", self.num_systems, 0, 1_000_000)
        self.check("system_tokens", self.system_tokens, 0)
        self.process  # noqa: B018 - it checks the option
        longest = self._lengths.prompt.longest + self._lengths.output.longest
        self.check("max_context", self.max_context, self._num_shared + longest)

    @property
    def natural_rate(self) -> float:
        return 1.0

    @property
    def max_prompt(self) -> int:
        return self.max_context - self.max_output

    @property
    def max_output(self) -> int:
        return self._lengths.output.longest

    @cached_property
    def _lengths(self) -> Lengths:
        return find_lengths(self.lengths)

    @cached_property
    def process(self) -> Arrivals:
        """The arrival process of session starts."""
        return find_arrivals(self.arrivals)

    @property
    def _num_shared(self) -> int:
        return self.system_tokens if self.num_systems else 0

    @cached_property
    def mean_turns(self) -> float:
        """Mean number of requests per session after the cut at ``max_context``, from samples."""
        sampled = islice(self.sessions(RandomDraws(SAMPLE_SEED)), NUM_SAMPLED)
        return sum(map(len, sampled)) / NUM_SAMPLED

    def source(self, seed: int, rate: float | None = None) -> JobSource:
        """The jobs for this seed and mean number of requests per second. At an infinite rate all
        sessions start at once, without pauses."""
        return _LiveSessions(self, RandomDraws(seed), rate or self.natural_rate).source()

    def _factor(self, uniform: float) -> float:
        """A pause as a multiple of the mean one. ``uniform``: a random number from 0 to below 1."""
        if not self.think_sigma:
            return -log(1.0 - uniform)
        deviation = NORMAL.inv_cdf(min(max(uniform, 1e-12), 1.0 - 1e-12))
        return exp(self.think_sigma * (deviation - self.think_sigma / 2))

    def sessions(self, dice: RandomDraws) -> Iterator[list[Turn]]:
        """An endless iterator of sessions, each a list of its turns."""
        lengths, ends = pairs(self._lengths, dice), uniform(dice.stream("turns"))
        pauses = uniform(dice.stream("think"))
        per_turn = log1p(-1.0 / self.turns) if self.turns > 1.0 else -inf
        while True:
            number = max(1, ceil(log(1.0 - next(ends)) / per_turn)) if per_turn > -inf else 1
            turns: list[Turn] = []
            used = self._num_shared
            for num_new, num_output in islice(lengths, number):
                if used + num_new > self.max_prompt:
                    break
                pause = self.think * self._factor(next(pauses))
                turns.append(Turn(pause, num_new, num_output))
                used += num_new + num_output - 1
            yield turns


@dataclass(frozen=True, kw_only=True)
class Conversations(Sessions):
    """Chats: each prompt consists of all earlier prompts and answers, and new text."""

    kind: ClassVar[str] = "conversations"
    name: ClassVar[str] = "conversation"


@dataclass(frozen=True, kw_only=True)
class Agents(Sessions):
    """Agents that call tools: a session starts with one of a few shared system prompts, and each
    request adds the output of a tool."""

    kind: ClassVar[str] = "agents"
    name: ClassVar[str] = "agent"

    turns: float = 6.0
    think: float = 1.0
    """Mean seconds that a tool takes."""
    lengths: str = "log-uniform(prompt=(16, 512), output=(16, 128))"
    num_systems: int = 4
    system_tokens: int = 1024


@dataclass(slots=True)
class _LiveSession:
    """An unfinished session: its prompt so far, and its turns."""

    name: str
    prompt: tuple[Span, ...]
    turns: list[Turn]
    fields: dict[str, Any] = field(default_factory=dict)
    num_taken: int = 0

    def next(self, time: float) -> Job:
        """Take the session's next request, which arrives at ``time`` (seconds)."""
        turn = self.turns[self.num_taken]
        self.num_taken += 1
        request_id = f"{self.name}.{self.num_taken}"
        prompt = (*self.prompt, Span(f"said {request_id}", turn.num_new))
        # The token that ends an answer is not part of the next prompt.
        answer = Span(ANSWER + request_id, turn.num_output - 1)
        self.prompt = (*prompt, answer) if answer.length else prompt
        return Job(
            request_id=request_id,
            arrival=time,
            prompt=prompt,
            program=self.name,
            **{"num_output": turn.num_output, **self.fields},
        )


class _LiveSessions:
    """The unfinished sessions of a run, as a source of jobs."""

    def __init__(self, workload: Sessions, dice: RandomDraws, rate: float) -> None:
        self._workload = workload
        self._dice = dice
        self._rate = rate
        self._by_name: dict[str, _LiveSession] = {}

    def source(self) -> JobSource:
        return JobSource(self._first(), self._follow)

    def _first(self) -> Iterator[Job]:
        """Yield the first request of each session, in order of arrival."""
        workload, dice = self._workload, self._dice
        mean = workload.mean_turns
        number = ceil(workload.num_requests / mean)
        times = workload.process.times(dice, self._rate / mean, number)
        systems, tags = uniform(dice.stream("systems")), workload.tags.draw(dice)
        left = workload.num_requests
        for place, (turns, time) in enumerate(zip(workload.sessions(dice), times, strict=False)):
            name = f"{workload.name}{place}"
            session = _LiveSession(name, (), turns[:left], next(tags))
            if workload.num_systems:
                system = int(next(systems) * workload.num_systems)
                session.prompt = (Span(f"system {system}", workload.system_tokens),)
            left -= len(session.turns)
            self._by_name[name] = session
            yield session.next(time)
            if not left:
                return

    def _follow(self, job: Job, time: float) -> Iterable[Job]:
        session = self._by_name[job.program]
        if session.num_taken == len(session.turns):
            del self._by_name[job.program]
            return
        pause = session.turns[session.num_taken].pause if self._rate < inf else 0.0
        yield session.next(time + pause)

"""Stand-ins that do exactly what a test says: a core without a model, a clock without time."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.config.engine import EngineConfig
from engine.config.model import ModelConfig
from engine.config.pooling import PoolingSpec
from engine.config.sched import SchedulerConfig
from engine.core.engine_core import EngineCore
from engine.core.inproc_client import InprocClient
from engine.core.watching import CoreWatch
from engine.errors import EngineDeadError, RequestError
from engine.frontend.session import Session
from engine.kv.manager import KVManager
from engine.messages.requests import (
    AddRequest,
    CoreOutputs,
    Finished,
    FinishReason,
    Started,
    TokenLogprobs,
)
from engine.messages.stats import RankUse, SchedulerStats
from engine.sched.plugins.find import make_scheduler
from engine.text.tokenizer import Tokenizer
from policylab.verify.fake import DigestWorker


class FakeClock:
    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeDecided:
    max_model_len: int = 256
    vocab_size: int = 1 << 20
    eos_token_ids: tuple[int, ...] = ()
    capabilities: tuple[str, ...] = ()


@dataclass
class Live:
    request: AddRequest
    num_output: int = 0


class FakeClient:
    """A core whose requests each get one scripted token a step; ``script`` says which."""

    id_prefix = ""

    def __init__(
        self,
        script: Callable[[AddRequest, int], int],
        decided: FakeDecided | None = None,
        clock: Callable[[], float] | None = None,
        pace: Callable[[], object] = lambda: None,
    ) -> None:
        self.decided = decided or FakeDecided()
        self.clock = clock or FakeClock()
        self.live: dict[str, Live] = {}
        self.aborted: list[str] = []  # by the ids of users
        self.num_steps = 0
        self.fails_on: dict[str, Exception] = {}  # id of the user -> what add raises
        self.refuse: Callable[[AddRequest], bool] = lambda request: False
        self.dies_at: int | None = None  # step
        self.is_shut_down = False
        self.script = script
        self.pace = pace  # called in every step: to wait for the test

    def add(self, request: AddRequest) -> None:
        if asked_id(request.request_id) in self.fails_on:
            raise self.fails_on[asked_id(request.request_id)]
        if self.refuse(request):
            raise RequestError("the fake core refuses")
        if request.request_id in self.live:
            raise RequestError(f"duplicate id {request.request_id}")
        self.live[request.request_id] = Live(request)

    def add_all(self, requests: Sequence[AddRequest]) -> dict[int, Exception]:
        errors: dict[int, Exception] = {}
        for index, request in enumerate(requests):
            try:
                self.add(request)
            except EngineDeadError:
                raise
            except Exception as error:
                errors[index] = error
        return errors

    def wake(self) -> None: ...

    def check_alive(self) -> None: ...

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.aborted.append(asked_id(request_id))
            self.live.pop(request_id, None)

    def step(self) -> list[CoreOutputs]:
        self.pace()
        self.num_steps += 1
        is_dead = self.dies_at is not None and self.num_steps >= self.dies_at
        if is_dead or self.is_shut_down:
            raise EngineDeadError("the fake core died")
        if isinstance(self.clock, FakeClock):
            self.clock.now += 0.25
        now, rows = self.clock(), list(self.live.values())
        batch = CoreOutputs([r.request.request_id for r in rows], [], None, now)
        batch.started = [
            Started(index, 0, now - 0.125) for index, row in enumerate(rows) if not row.num_output
        ]
        for index, row in enumerate(rows):
            self.advance(index, row, batch)
        return [batch] if rows else []

    def advance(self, index: int, row: Live, batch: CoreOutputs) -> None:
        request = row.request
        token = self.script(request, row.num_output)
        row.num_output += 1
        batch.token_ids.append(token)
        if request.params.logprobs is not None:
            batch.logprobs[index] = [TokenLogprobs([token, 1], [-0.5, -0.25], 3)]
        reason = end_of(request, token, row.num_output)
        if reason is not None:
            is_user_stop = token in request.params.stop_token_ids
            batch.finished.append(Finished(index, reason, token if is_user_stop else None))
            del self.live[request.request_id]

    def has_unfinished(self) -> bool:
        return bool(self.live)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(len(self.live), 0, 0, 0.0, 0, 0, 0, 0, self.num_steps, 0)

    def latest_stats(self) -> SchedulerStats:
        return self.stats()

    def call(self, name: str, *args: Any) -> Any:
        if self.is_shut_down:
            raise EngineDeadError("the fake core was shut down")
        return name == "reset_prefix_cache"

    def shutdown(self) -> None:
        self.is_shut_down = True


def asked_id(core_id: str) -> str:
    """What the user called the request of which this is a sequence."""
    return core_id.partition("/")[2]


def fake_session(
    client: FakeClient,
    tokenizer: Tokenizer | None = None,
    pooling: PoolingSpec | None = None,
    **model: Any,
) -> Session:
    """The front end around ``client``; without a tokenizer ids go in and out."""
    config = EngineConfig(model=ModelConfig(model="fake", **model), disable_log_stats=True)
    return Session(config, client, tokenizer, client.clock, pooling=pooling)


def scheduled_session(
    clock: Callable[[], float],
    *,
    num_blocks: int = 200,
    depth: int = 1,
    worker: Any = None,
    tokenizer: Tokenizer | None = None,
    ranks: Callable[[], list[RankUse]] = list,
    **options: Any,
) -> Session:
    """The front end around a real scheduler and a fake worker; without a tokenizer ids go in and
    out. ranks: returns what ranks do, for those who watch."""
    options = {"max_num_batched_tokens": 256, "max_num_seqs": 8, "max_model_len": 256, **options}
    sched = SchedulerConfig(**options)
    scheduler = make_scheduler(sched, KVManager(num_blocks, 16), clock=clock)
    core = EngineCore(scheduler, worker or DigestWorker(num_blocks, 16), depth)
    config = EngineConfig(model=ModelConfig(model="fake"), scheduler=sched, disable_log_stats=True)
    methods = CoreWatch(core, clock, ranks=ranks).methods
    client = InprocClient(core, FakeDecided(), clock=clock, methods=methods)
    return Session(config, client, tokenizer, clock)


def end_of(request: AddRequest, token: int, num_output: int) -> FinishReason | None:
    stops = [*request.eos_token_ids, *request.params.stop_token_ids]
    if token in stops and num_output > request.params.min_tokens:
        return "stop"
    return "length" if num_output >= request.max_tokens else None


def counting(request: AddRequest, position: int) -> int:
    """A script: 10, 11, 12, ..."""
    return 10 + position


def replay(token_ids: list[int]) -> Callable[[AddRequest, int], int]:
    """A script: these tokens, from the beginning for every request, over and over."""
    tokens = list(itertools.islice(itertools.cycle(token_ids), 10_000))
    return lambda request, position: tokens[position]

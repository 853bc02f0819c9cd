"""A scheduler run against the digest worker, with every check on. Shared by several tests."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.config.sched import SchedulerConfig
from engine.kv.block_pool import BlockPool
from engine.kv.manager import KVManager
from engine.kv.retention import ShelvedPool
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest, Finished, Started
from engine.messages.step import StepPlan
from engine.sched.interface import StepOutputs
from engine.sched.plugins.kept import GuardedCachePolicy
from engine.sched.policies import POLICIES
from engine.sched.scheduler import Scheduler
from engine.states.decide import StateSnapshots
from engine.states.policies import find_snapshot_policy
from policylab.verify.check import check_empty, check_plan, check_snapshots, check_state
from policylab.verify.fake import DigestWorker, digest_of, mix

VOCAB_SIZE = 1000  # of the digest worker, if it is not told another


def make_request(request_id: str, prompt: list[int], max_tokens: int = 16, **fields) -> AddRequest:
    """An AddRequest with defaults for what a test does not care about."""
    params = fields.pop("params", None) or SamplingParams(max_tokens=max_tokens)
    fields = {"seed": 0, "arrival_time": 0.0, **fields}
    return AddRequest(request_id, prompt, params, max_tokens=max_tokens, **fields)


def make_scheduler(
    *,
    num_blocks: int = 1000,
    block_size: int = 16,
    caching: bool = True,
    policy: object = "fcfs",
    resources=(),
    scheduler_cls: type[Scheduler] = Scheduler,
    clock: Callable[[], float] = float,
    **config,
) -> Scheduler:
    """A scheduler; its clock stands still if none is given. ``snapshot_blocks``: as in
    ``KVManager.keep_states``; 0: the model has no states. ``snapshot_policy``: as the option
    ``state_snapshot_policy``. ``cache_policy``: an object."""
    snapshot_blocks = config.pop("snapshot_blocks", 0)
    snapshot_policy = find_snapshot_policy(config.pop("snapshot_policy", "cost"))
    config = {"max_num_batched_tokens": 1024, "max_num_seqs": 16, "max_model_len": 2048, **config}
    cache_policy = config.pop("cache_policy", None)
    pool = BlockPool if cache_policy is None else ShelvedPool
    kv = KVManager(pool(num_blocks), block_size, enable_prefix_caching=caching)
    if snapshot_blocks:
        kv.keep_states(snapshot_blocks)
        resources = (*resources, *[StateSnapshots(snapshot_policy)] * caching)
    chosen = POLICIES[policy]() if isinstance(policy, str) else policy
    sched_config = SchedulerConfig(**config)
    scheduler = scheduler_cls(sched_config, kv, chosen, clock=clock, resources=resources)
    if cache_policy is not None:
        GuardedCachePolicy(cache_policy, scheduler)
    return scheduler


def granted(scheduler: Scheduler, plan: StepPlan) -> dict[str, int]:
    """Tokens by request id, in plan order."""
    by_slot = {req.slot: req.request_id for req in scheduler.roster.running}
    columns = zip(plan.slots.tolist(), plan.counts.tolist(), strict=True)
    return {by_slot[slot]: count for slot, count in columns}


@dataclass
class Run:
    """Scheduler and digest worker, ``depth`` steps in flight."""

    scheduler: Scheduler
    worker: DigestWorker
    depth: int = 1
    flight: deque = field(default_factory=deque)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, tuple[str, object]] = field(default_factory=dict)
    plans: list[dict[str, int]] = field(default_factory=list)
    num_tokens: int = 0
    num_drafts: int = 0  # of a row in a step, at most
    starts: dict[str, list[Started]] = field(default_factory=dict)
    ends: dict[str, Finished] = field(default_factory=dict)
    is_undrawn: bool = False  # the newest step in flight waits for its masks

    def add(self, request: AddRequest) -> None:
        self.scheduler.add_request(request)
        self.outputs[request.request_id] = []
        self.finished.pop(request.request_id, None)

    def launch(self) -> bool:
        """Plan and launch one step; False if there is nothing to do, or one waits for masks."""
        if self.is_undrawn:
            return False
        plan = self.scheduler.schedule()
        check_state(self.scheduler, num_drafts=self.num_drafts)
        if plan.is_empty:
            return False
        check_plan(self.scheduler, plan)
        check_snapshots(self.scheduler, plan)
        self.plans.append(granted(self.scheduler, plan))
        self.num_tokens += plan.num_tokens
        self.flight.append((plan, self.worker.launch(plan)))
        self.is_undrawn = plan.masks is not None
        return True

    def draw_if_alone(self) -> None:
        """The step that waits for masks is drawn when all before it are settled."""
        if self.is_undrawn and len(self.flight) == 1:
            plan, ticket = self.flight[0]
            self.is_undrawn = False
            if plan.masks.ahead is not None:
                plan.masks.drawn = self.worker.preview(ticket)
            self.worker.sample(ticket, self.scheduler.masks(plan))

    def settle(self) -> None:
        """Take the oldest result."""
        self.draw_if_alone()
        plan, result = self.flight.popleft()
        self.read(self.scheduler.update_from_output(plan, self.worker.collect(result)))
        self.draw_if_alone()
        check_state(self.scheduler, num_drafts=self.num_drafts)

    def read(self, outputs: StepOutputs) -> None:
        """What clients hear."""
        for out in outputs.values():
            counts = out.counts or [1] * len(out.request_ids)
            tokens = iter(out.token_ids)
            for request_id, count in zip(out.request_ids, counts, strict=True):
                assert request_id not in self.finished, f"{request_id}: output after its end"
                self.outputs[request_id] += [next(tokens) for _ in range(count)]
            for started in out.started:
                self.starts.setdefault(out.request_ids[started.index], []).append(started)
            for end in out.finished:
                self.finished[out.request_ids[end.index]] = (end.reason, end.stop_reason)
                self.ends[out.request_ids[end.index]] = end

    def step(self) -> bool:
        """One step of a core: launch up to ``depth``, settle the oldest."""
        while len(self.flight) < self.depth and self.launch():
            pass
        if self.flight:
            self.settle()
            return True
        return False

    def drain(self, limit: int = 5000) -> None:
        """Step until nobody is left."""
        for _ in range(limit):
            if not self.step():
                break
        else:
            raise AssertionError(f"no end after {limit} steps")
        check_empty(self.scheduler)


def make_run(*, depth: int = 1, fail=None, **options) -> Run:
    """A run with its own pool."""
    scheduler = make_scheduler(**options)
    kv = scheduler.kv
    extra = {} if fail is None else {"fail": fail}
    worker = DigestWorker(kv.pool.num_blocks, kv.block_size, **extra)
    if options.get("snapshot_blocks"):
        worker.keep_states(most_drafts=4)
    return Run(scheduler, worker, depth)


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    """What the fake model says after this prompt."""
    digest, tokens = digest_of(prompt), []
    for _ in range(num_tokens):
        tokens.append(digest % VOCAB_SIZE)
        digest = mix(digest, tokens[-1])
    return tokens


def random_requests(rng: random.Random, count: int, longest: int = 20) -> list[AddRequest]:
    """Requests with shared beginnings, salts, priorities and lengths."""
    shared = [rng.randrange(1000) for _ in range(2 * longest)]
    requests = []
    for index in range(count):
        length = rng.randint(1, longest)
        common = rng.randint(0, length)
        prompt = shared[:common] + [rng.randrange(1000) for _ in range(length - common)]
        requests.append(
            make_request(
                str(index),
                prompt,
                rng.randint(1, longest),
                priority=rng.randint(-1, 2),
                cache_salt=rng.choice([None, None, None, "a", "b"]),
                client_index=rng.randint(0, 1),
            )
        )
    return requests

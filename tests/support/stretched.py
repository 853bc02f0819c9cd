"""Random engines and workloads on a virtual clock, run step by step and with stretches: two traces
that must be equal to the last bit."""

from __future__ import annotations

import hashlib
from collections.abc import Container
from dataclasses import dataclass, field, replace
from math import inf
from random import Random
from typing import Any

from engine.config.kv_groups import sized
from engine.config.sched import SchedulerConfig
from engine.errors import RequestError
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest, CoreOutputs
from engine.messages.step import StepPlan
from engine.sched.interface import PauseState
from engine.sched.plugins.find import choose, make_scheduler
from engine.sched.policies import POLICIES
from engine.sched.predict.cost import StepShape
from engine.sched.scheduler import Scheduler
from policylab.sim.job import END, FILLER
from policylab.sim.jumps.blocks import RepeatingKV
from policylab.sim.jumps.core import JumpingCore
from policylab.sim.jumps.stretch import Stretch
from policylab.sim.kv_groups import groups_with
from policylab.sim.worker import Cost, Launched, StepCost, TimedWorker, VirtualClock
from policylab.verify.draw import WILD_CACHE

IDLE_SECONDS = 0.01
FEATURES = ("deadlines", "aborts", "resets", "pauses", "clients", "salts", "turns", "twins")


@dataclass(frozen=True, kw_only=True)
class Coming:
    """What happens at a time: a request, which has so many tokens, or something else."""

    time: float
    add: AddRequest | None = None
    num_output: int = 0
    abort: str = ""
    reset: bool = False
    pause: PauseState | None = None


@dataclass(frozen=True, kw_only=True)
class StretchCase:
    """An engine and what comes."""

    config: SchedulerConfig
    num_blocks: int
    block_size: int
    caching: bool
    windows: tuple[int, ...] = (0,)
    coming: list[Coming]
    seed: int
    is_uneven: bool = False

    def cost(self) -> Cost:
        """The cost of this run."""
        return Uneven(self.seed) if self.is_uneven else StepCost()


class Uneven:
    """Durations that are drawn, the host's among them; and sometimes none at all."""

    def __init__(self, seed: int) -> None:
        self._dice, self._host = Random(seed), Random(seed + 1)

    def seconds(self, shape: StepShape) -> float:
        return StepCost().seconds(shape) * self._dice.choice((0.0, 0.5, 1.0, 1.7))

    def host_seconds(self, num_seqs: int) -> float:
        return self._host.choice((0.0, 1e-3, 1e-5 * num_seqs))


@dataclass
class Trace:
    """What can be seen of a run."""

    plans: list[str] = field(default_factory=list)
    heard: list[Any] = field(default_factory=list)  # by step: time, requests, tokens, starts, ends
    states: dict[int, str] = field(default_factory=dict)  # behind a call of the core, by step
    totals: dict[str, Any] = field(default_factory=dict)
    num_jumped: int = 0
    num_stretches: int = 0


class Recorder(TimedWorker):
    """Keeps every plan that it is given."""

    plans: list[str]

    def launch(self, plan: StepPlan) -> Launched:
        self.plans.append(digest(plan))
        return super().launch(plan)


def digest(plan: StepPlan) -> str:
    """All that a plan says."""
    names = ("slots", "generations", "starts", "counts", "samples")
    columns = [getattr(plan, name).tolist() for name in ("rows", *names)]
    deltas = [getattr(plan, f"block_{name}").tolist() for name in ("slots", "indices", "ids")]
    if plan.block_groups is not None:
        deltas.append(plan.block_groups.tolist())
    new = [(seq.request_id, seq.slot, len(seq.token_ids)) for seq in plan.new]
    text = repr((plan.step, columns, deltas, new, plan.freed_slots, plan.num_tokens, plan.parts))
    return text


def run(case: StretchCase, *, stretches: bool, sees: Container[int] | None = None) -> Trace:
    """The case to its end. ``sees``: after which steps to look at the state; all of them."""
    trace, clock = Trace(), VirtualClock()
    budget = case.config.max_num_batched_tokens
    groups = sized(groups_with(case.windows), budget, case.block_size)
    kv = RepeatingKV(
        choose(case.config).pool(case.num_blocks * len(groups)),
        case.block_size,
        enable_prefix_caching=case.caching,
        groups=groups,
    )
    scheduler = make_scheduler(case.config, kv, clock=clock, seed=case.seed)
    assert isinstance(scheduler, Scheduler)
    lengths = {c.add.request_id: c.num_output for c in case.coming if c.add is not None}
    worker = Recorder(clock, case.cost(), case.config.max_num_seqs, lengths)
    worker.plans = trace.plans
    depth = case.config.num_steps_in_flight
    core = JumpingCore(scheduler, worker, depth, clock=clock, jumps=stretches)
    coming = case.coming[::-1]
    num_idle = 0
    while coming or core.has_work:
        while coming and coming[-1].time <= clock.now:
            _happen(coming.pop(), scheduler, trace)
        num_plans = len(trace.plans)
        outputs = core.step(coming[-1].time if coming else inf)
        worker.rest()
        if core.stretch is not None:
            _jumped(core.stretch, trace, num_plans)
        if outputs:
            trace.heard.append(_heard(outputs))
        num_steps = scheduler.settler.counters.num_steps
        if sees is None or num_steps in sees:
            trace.states[num_steps] = state_of(scheduler, clock)
        if core.is_idle:
            num_idle += 1
            until = coming[-1].time if coming else inf
            if scheduler.has_unfinished_requests():
                until = min(until, clock.now + IDLE_SECONDS)
            clock.now = max(clock.now, until) if until < inf else clock.now
        else:
            num_idle = 0
        if num_idle > 5000:
            trace.heard.append("stuck")
            break
    trace.totals = totals_of(scheduler, worker, clock)
    return trace


def _happen(event: Coming, scheduler: Scheduler, trace: Trace) -> None:
    if event.add is not None:
        try:
            scheduler.add_request(event.add)
        except RequestError as error:
            trace.heard.append(f"{event.add.request_id}: {error}")
    if event.abort:
        ended = scheduler.finish_requests(event.abort)
        trace.heard.append([repr(each) for each in ended])
    if event.reset:
        trace.heard.append(scheduler.reset_prefix_cache())
    if event.pause is not None:
        scheduler.set_pause_state(event.pause)


def _jumped(stretch: Stretch, trace: Trace, num_plans: int) -> None:
    """The plans of the stretch come before the one that was launched behind it."""
    trace.num_stretches += 1
    trace.num_jumped += stretch.num_steps
    trace.plans[num_plans:num_plans] = map(digest, stretch.plans())
    ids = list(stretch.request_ids)
    trace.heard += [
        [(end, ids, [stretch.token] * len(ids), [], [])] for end in stretch.ends.tolist()
    ]


def _heard(outputs: dict[int, CoreOutputs]) -> list[Any]:
    heard = []
    for _, out in sorted(outputs.items()):
        details = list(map(repr, out.started)), list(map(repr, out.finished))
        heard.append((out.time, list(out.request_ids), list(out.token_ids), *details))
    return heard


def state_of(scheduler: Scheduler, clock: VirtualClock) -> str:
    """A hash of all that later steps depend on."""
    roster, kv, table = scheduler.roster, scheduler.kv, scheduler.roster.table
    rows = []
    for req in roster.by_id.values():
        row, at = req.row, [getattr(table, name).at[req.row] for name in COLUMNS]
        times = (req.first_token_time, req.last_token_time)
        history = (len(req.tokens), req.rank, times, repr(req.history))
        tables = [kv.held(req, group) for group in range(kv.num_groups)]
        blocks = (tables, int(kv.num_held[row]), int(kv.num_published[row]))
        rows.append((req.request_id, row, at, history, blocks))
    cache = kv.cache
    text = repr(
        (
            clock.now,
            scheduler.view.now,
            rows,
            [[req.request_id for req in queue] for queue in (roster.running, roster.waiting)],
            list(roster.parked),
            roster.freed_slots,
            kv.pool.free_order(),
            kv.pool.num_refs,
            cache.hashes,
            sorted((key, cache.find_all(key)) for key in set(cache.hashes) - {None}),
            repr(scheduler.settler.counters),
            vars(roster.waits)["_totals"],
            (scheduler.num_in_flight, scheduler.view.step.index),
        )
    )
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


COLUMNS = (
    *("num_prompt", "num_tokens", "num_computed", "num_pending", "limit", "generation", "slot"),
    *("in_flight", "client", "alive", "has_output", "flags", "considered", "stop_id"),
)


def totals_of(scheduler: Scheduler, worker: TimedWorker, clock: VirtualClock) -> dict[str, Any]:
    """What is left at the end."""
    stats, view = scheduler.make_stats(), scheduler.view
    assert stats is not None
    stats.hook_seconds = {}
    return {
        "stats": repr(stats),
        "coefficients": view.cost.coefficients,  # type: ignore[attr-defined]
        "observed": view.cost.num_observed,  # type: ignore[attr-defined]
        "last": repr(view.last),
        "now": (clock.now, worker.busy_seconds),
        "dice": view.rng.random(),
        "judgements": repr(scheduler.take_judgements()),
    }


def compare(case: StretchCase) -> Trace:
    """Both ways; raises ``AssertionError`` at the first difference."""
    stretched = run(case, stretches=True)
    stepped = run(case, stretches=False, sees=stretched.states)
    for index, (one, other) in enumerate(zip(stepped.plans, stretched.plans, strict=False)):
        assert one == other, f"plan {index}\nstepped:   {one}\nstretched: {other}"
    assert len(stepped.plans) == len(stretched.plans), "one has more plans"
    for one, other in zip(stepped.heard, stretched.heard, strict=False):
        assert one == other, f"stepped:   {one}\nstretched: {other}"
    assert len(stepped.heard) == len(stretched.heard), "one has more outputs"
    for step, state in stretched.states.items():
        assert stepped.states.get(step) == state, f"the state behind step {step} differs"
    for name, value in stepped.totals.items():
        assert stretched.totals[name] == value, f"{name}: {value}, {stretched.totals[name]}"
    return stretched


# -- cases


def draw_case(seed: int, policy: str | None = None) -> StretchCase:
    """Small pools and few seats, and outputs long enough that steps repeat."""
    rng = Random(seed)
    features = {name for name in FEATURES if rng.random() < 0.35}
    block_size = rng.choice((1, 2, 3, 4, 8, 16, 16))
    max_model_len = rng.choice((40, 150, 400))
    is_tight = rng.random() < 0.3  # seats for more than there are blocks for
    num_tokens = rng.choice((1.1, 1.5, 2) if is_tight else (1.1, 2, 4, 10)) * max_model_len
    num_blocks = 2 + int(num_tokens) // block_size
    config = draw_config(rng, policy or rng.choice(sorted(POLICIES)), max_model_len)
    if is_tight:
        budget = max(20, config.max_num_batched_tokens)
        config = replace(config, max_num_seqs=20, max_num_batched_tokens=budget)
    if seed % 3 == 0:
        config = replace(config, cache_policy=WILD_CACHE)
    num_requests = rng.choice((3, 8, 20))
    gap = rng.choice((0.0, 0.02, 0.1, 0.5, 2.0))
    shared = [rng.randrange(2, 9) for _ in range(max_model_len)]
    coming: list[Coming] = []
    time = 0.0
    for number in range(num_requests):
        time += rng.expovariate(1.0) * gap
        coming.append(_request(rng, str(number), time, max_model_len, shared, features))
    coming += _troubles(rng, features, time + 1.0, num_requests)
    return StretchCase(
        config=config,
        num_blocks=num_blocks,
        block_size=block_size,
        caching=rng.random() < 0.8,
        coming=sorted(coming, key=lambda event: event.time),
        seed=rng.randrange(2**31),
        is_uneven=rng.random() < 0.3,
        windows=rng.choice(((0,), (0,), (0, 9), (0, 0, 5, 40), (7,), (1, 30), (0, -6), (-8, 5))),
    )


def draw_config(rng: Random, policy: str, max_model_len: int) -> SchedulerConfig:
    seats = rng.choice((1, 2, 4, 7, 12, 20))
    chunked = rng.random() < 0.75
    budget = max(seats + rng.choice((0, 1, 3)), rng.choice((1, 8, 64)))
    return SchedulerConfig(
        max_num_batched_tokens=budget if chunked else max(budget, max_model_len),
        max_num_seqs=seats,
        max_model_len=max_model_len,
        enable_chunked_prefill=chunked,
        max_mixed_prefill_tokens=rng.choice((0, 0, 4)) * chunked,
        watermark=rng.choice((None, None, None, 0.0, 0.2)),
        scheduling_policy=policy,
        num_steps_in_flight=rng.choice((1, 1, 2, 2, 3)),
        length_predictor=rng.choice(("none", "history", "oracle")),
        max_waiting_requests=rng.choice((None, None, 5)),
    )


def _request(
    rng: Random, name: str, time: float, longest: int, shared: list[int], features: set[str]
) -> Coming:
    num_prompt = rng.randint(1, max(1, longest // rng.choice((2, 4, 20))))
    max_tokens = rng.randint(1, longest - num_prompt)
    num_output = rng.randint(1, max_tokens) if rng.random() < 0.7 else max_tokens + 1
    common = rng.randint(0, num_prompt) if rng.random() < 0.6 else 0
    prompt = shared[:common] + [rng.randrange(2, 9) for _ in range(num_prompt - common)]
    if "twins" in features and rng.random() < 0.5:
        prompt = shared[:num_prompt]
    if "turns" in features and rng.random() < 0.7:  # it goes on where others' answers do
        common = rng.randint(1, min(num_prompt, 4))
        prompt = shared[:common] + [FILLER] * (num_prompt - common)
    times = {}
    if "deadlines" in features:
        for deadline in ("deadline", "queue_deadline", "end_deadline"):
            if rng.random() < 0.3:
                times[deadline] = time + rng.expovariate(1.0)
    add = AddRequest(
        name,
        prompt,
        SamplingParams(max_tokens=max_tokens),
        seed=0,
        arrival_time=time,
        max_tokens=max_tokens,
        eos_token_ids=[END] if num_output <= max_tokens else [],
        priority=rng.randint(0, 2),
        user=f"u{rng.randrange(3)}",
        client_index=rng.randrange(2) if "clients" in features else 0,
        cache_salt=rng.choice((None, "a")) if "salts" in features else None,
        hints={"output_tokens": min(num_output, max_tokens), "program": f"p{rng.randrange(2)}"},
        **times,
    )
    return Coming(time=time, add=add, num_output=num_output)


def _troubles(rng: Random, features: set[str], last: float, num_requests: int) -> list[Coming]:
    troubles = []
    if "aborts" in features:
        names = [str(rng.randrange(num_requests)) for _ in range(3)]
        troubles += [Coming(time=rng.random() * last, abort=name) for name in names]
    if "resets" in features:
        troubles += [Coming(time=rng.random() * last, reset=True) for _ in range(3)]
    if "pauses" in features:
        begun = rng.random() * last
        state = rng.choice((PauseState.PAUSED_NEW, PauseState.PAUSED_ALL))
        troubles += [
            Coming(time=begun, pause=state),
            Coming(time=begun + rng.random(), pause=PauseState.UNPAUSED),
        ]
    return troubles

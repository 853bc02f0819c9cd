"""Runs a case with the real scheduler, a worker that verifies the KV it reads, and all checks."""

from __future__ import annotations

import copy
import hashlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple, cast

from engine.config.kv_groups import FULL, Group, window_blocks
from engine.core.engine_core import Executor
from engine.core.group import OtherRanks, WorkerGroup
from engine.errors import RankError, RefusedError, RequestError
from engine.kv.manager import KVManager
from engine.kv_transfer.awaited import seconds_of
from engine.messages.requests import AddRequest
from engine.messages.step import NewSeq, StepPlan, StepResult
from engine.sched.interface import PauseState, StepOutputs
from engine.sched.plugins.find import Chosen, choose, make_scheduler
from engine.sched.predict.headroom import Headroom
from engine.sched.scheduler import Scheduler
from engine.states.decide import StateSnapshots
from engine.states.policies import find_snapshot_policy
from policylab.verify.adapters import MOST_TICKS, Adapters
from policylab.verify.case import (
    WILD,
    Abort,
    Add,
    Bring,
    Case,
    Event,
    Jump,
    Load,
    Pause,
    Reset,
    ResetEncoder,
    Setup,
    Unload,
    Wake,
    Write,
)
from policylab.verify.clients import Clients, LiveRequest
from policylab.verify.fake import DigestWorker, LateWorker
from policylab.verify.halves import (
    DraftCounts,
    Halves,
    MakeHalves,
    NoGuide,
    WorkersDrafts,
    check_wishes_for_drafts,
    max_drafts,
    worker_proposes,
)
from policylab.verify.invariants import CacheTruth, Invariants, check_stats
from policylab.verify.needs import NEEDS, Need, NeededDrafts
from policylab.verify.pictures import Pictures
from policylab.verify.ranks import LocalRanks
from policylab.verify.stages import StagedWorker
from policylab.verify.tiers import SimulatedTiers

SLACK_STEPS = 100


def loses_some(step: int, index: int) -> bool:
    """True if a snapshot of states cannot be saved in this step."""
    return step % 9 == index % 4


KINDS: dict[str, type[Need]] = {**NEEDS, Adapters.name: Adapters}


class CaseOutcome(NamedTuple):
    """The result of a run."""

    num_steps: int
    num_accepted: int
    digest: str  # of all plans
    num_drafts_right: int = 0  # accepted drafts of the engine's own features
    num_followed: int = 0  # requests that followed their real grammar to the end
    num_loads: int = 0  # of adapters into slots
    num_failed_loads: int = 0  # adapters that could not be read
    num_encoded: int = 0  # media items
    num_failed_media: int = 0  # items of which that could not be encoded
    num_loaded: int = 0  # KV blocks, from stores outside the pool


@dataclass
class PlannedSums:
    """Sums over all steps so far."""

    num_tokens: int = 0
    num_full: int = 0
    """The number of steps that computed tokens."""
    seconds: float = 0.0
    """Total duration of the steps on the worker."""


class Simulation:
    """Runs a case. All methods raise ``AssertionError`` for a broken rule.

    ``every``: the whole state is checked once in this many operations. ``leaks``: search for
    references to ended requests at the end. ``plugins``: also check policy and resources.
    ``halves``: makes real drafters and grammars for cases that use them. ``ranks``: further ranks,
    in place of those of this process."""

    def __init__(
        self,
        case: Case,
        *,
        every: int = 1,
        leaks: bool = True,
        plugins: bool = True,
        halves: MakeHalves | None = None,
        ranks: OtherRanks | None = None,
    ) -> None:
        setup = case.setup
        self.case = case
        self.now = self.latest = 0.0
        self.num_steps = 0
        self.planned = PlannedSums()
        self.halves = self._make_halves(setup, halves)
        self.clients = Clients(
            setup.config.max_model_len,
            on_end=lambda live: self.truth.learn(live.req, live.extras),
            num_tokens_used=setup.num_tokens_used,
            guide=self.halves.guide if setup.grammar_ticks >= 0 else None,
        )
        self.counts = DraftCounts()
        self.needs = [self._make_need(name) for name in setup.needs]
        self._kept: dict[tuple[Any, ...], Any] = {}  # what the first rank has read, by request
        if self.adapters is not None:
            self.clients.adapter_may_fail = self.adapters.may_fail
        if self.tiers is not None:
            self.clients.loads_may_fail = self.tiers.may_fail
        if self.pictures is not None:
            self.clients.media_may_fail = self.pictures.may_fail
        self.scheduler = self._make_scheduler(setup)
        self.worker = worker_class(setup)(
            setup.num_blocks,
            setup.block_size,
            vocab_size=setup.num_tokens_used,
            windows=setup.windows,
            content=self.clients.content
            if setup.ranks == 1
            else self._kept_by(self.clients.content),
            fail=self._kept_by(self._fail),
        )
        if self.tiers is not None:
            self.tiers.connect(0, self.worker)
        if setup.snapshot_blocks:
            self.worker.keep_states(most_drafts(setup), loses_some)
        self.ranks = LocalRanks(
            [self._make_rank(setup, rank) for rank in range(1, setup.ranks)],
            Random(setup.seed),
            setup.rank_fault,
        )
        self.executor: Executor[Any] = self.worker
        if setup.ranks > 1:
            self.executor = group = WorkerGroup(cast(Any, self.worker), ranks or self.ranks)
            if self.tiers is not None:
                self.tiers.call_others = group.call_others
        if worker_proposes(setup):
            self.worker.offer = WorkersDrafts(self.clients.answer_if_alive)
        if setup.seed % 4 < 2:  # with defaults it would not decide within such short runs
            self.scheduler.view.headroom = Headroom(learning_steps=2, look_every=4)
        self.truth = CacheTruth(self.scheduler, self.worker)
        self.invariants = Invariants(
            self.scheduler,
            self.worker,
            self.needs,
            every,
            plugins=plugins,
            num_drafts=max_drafts(setup),
        )
        self._leaks = leaks
        self._fixed = (1, 8)[setup.seed % 3 > 0]  # fixed cost of a step, in tokens
        self._flight: deque[tuple[StepPlan, StepResult]] = deque()
        self._is_undrawn = False  # True while the newest step in flight waits for its masks
        self._pace = Random(setup.seed)
        self._trace = hashlib.blake2b(digest_size=16)
        self.heard: Callable[[StepOutputs], None] = lambda outputs: None
        """Called with the outputs of each step."""

    def run(self) -> CaseOutcome:
        """Apply all events of the case, then run steps until the remaining requests have ended. If
        one of the ranks is to fail, that ends the run."""
        try:
            return self._run()
        except RankError:
            if self.case.setup.rank_fault is None:
                raise
            return self.outcome

    def _run(self) -> CaseOutcome:
        events = deque(sorted(self.case.events, key=lambda event: event.at))
        for tick in range(self.case.num_ticks):
            while events and events[0].at == tick:
                self.happen(events.popleft())
            self.move()
        self.drain()
        assert not self.ranks.must_be_found, f"{self.case.setup.rank_fault} was not found"
        return self.outcome

    @property
    def outcome(self) -> CaseOutcome:
        """The result so far."""
        return CaseOutcome(
            self.num_steps,
            self.clients.num_accepted,
            self.digest,
            self.counts.num_accepted_tokens,
            self.clients.num_followed,
            *((0, 0) if self.adapters is None else self.adapters.counts),
            *((0, 0) if self.pictures is None else self.pictures.counts),
            0 if self.tiers is None else self.tiers.copies.num_loaded,
        )

    @property
    def adapters(self) -> Adapters | None:
        """The resource for adapters, if the case has one."""
        return next((need for need in self.needs if isinstance(need, Adapters)), None)

    @property
    def pictures(self) -> Pictures | None:
        """The resource for media whose content comes later, if the case has one."""
        return next((need for need in self.needs if isinstance(need, Pictures)), None)

    @property
    def tiers(self) -> SimulatedTiers | None:
        """The resource for KV tiers, if the case has one."""
        return next((need for need in self.needs if isinstance(need, SimulatedTiers)), None)

    @property
    def digest(self) -> str:
        """A hash of all plans so far."""
        return self._trace.hexdigest()

    # -- what happens

    def happen(self, event: Event) -> None:
        """Apply one event."""
        scheduler = self.scheduler
        match event:
            case Add(request=request, fails_at=fails_at):
                self.add(request, fails_at)
            case Abort(request_ids=ids):
                alive = self.clients.alive(ids)
                ended = [each.request_id for each in scheduler.finish_requests(ids)]
                names = [req.request_id for req in alive]
                assert ended == names, f"abort of {ids} ended {ended}, expected {names}"
                self.clients.abort(alive)
            case Reset(reset_running=reset_running):
                self._reset(reset_running)
            case Pause(state=state):
                scheduler.set_pause_state(state)
            case Jump(seconds=seconds):
                self.now += seconds
                self.latest = max(self.latest, self.now)
            case Wake(request_id=request_id):
                scheduler.wake(request_id)
            case Write() | Load() | Unload():
                self._change_adapters(event)
            case ResetEncoder() | Bring():
                self._change_media(event)
        self.invariants.changed()

    def add(self, request: AddRequest, fails_at: int | None = None) -> bool:
        """Add a request. Returns whether it was accepted. Checks that it is refused exactly if it
        can never run or its id is in use."""
        scheduler, config = self.scheduler, self.scheduler.config
        num_prompt = len(request.prompt_token_ids)
        num_output = request.max_tokens if request.pooling is None else 1
        most = config.max_model_len + (request.pooling is not None)
        longest = min(num_prompt + num_output, most) - 1
        can_run = 0 < num_prompt < most
        can_run = can_run and scheduler.kv.blocks_for(longest) <= scheduler.kv.num_usable
        can_run = can_run and (self.pictures is None or self.pictures.can_serve(request))
        is_known = request.request_id in self.clients.live
        if is_known and not self.clients.alive([request.request_id]):
            return False  # clients reuse an id only after its end was reported
        hints = copy.deepcopy(request.hints)
        if self.adapters is not None:
            chosen = self.adapters.chosen(request)
            if chosen is None:
                return False
            request = chosen
        try:
            req = scheduler.add_request(request)
        except RefusedError as error:
            assert can_run and not is_known, f"{request.request_id}: refused for now: {error}"
        except RequestError as error:
            assert not can_run or is_known, f"{request.request_id}: refused: {error}"
        else:
            assert can_run and not is_known, f"{request.request_id} should be refused"
            self.clients.accept(req, fails_at, hints)
            return True
        return False

    def _change_media(self, event: ResetEncoder | Bring) -> None:
        if isinstance(event, ResetEncoder):
            self.scheduler.reset_encoder_cache()
        elif self.pictures is not None:
            self.pictures.bring(event.key, event.request_ids, event.error)

    def _change_adapters(self, event: Write | Load | Unload) -> None:
        match event:
            case _ if self.adapters is None:
                pass
            case Write(path=path, content=content):
                self.adapters.write(path, content)
            case Load(name=name, path=path, replaces=replaces):
                self.adapters.load(name, path, replaces=replaces)
            case Unload(name=name):
                self.adapters.unload(name)

    def _reset(self, reset_running: bool) -> None:
        scheduler = self.scheduler
        done = scheduler.reset_prefix_cache(reset_running)
        if reset_running:
            scheduler.reset_encoder_cache()
        loads = scheduler.kv.promotions
        loaded = {block for load in loads for block in (*load.blocks, *load.all_held)}
        is_free = scheduler.kv.num_free + len(loaded) == scheduler.kv.num_usable
        if done and self.tiers is not None:
            self.tiers.invalidate()
        assert done == is_free, f"cache reset: {done}; all blocks are free: {is_free}"
        if done:
            cached = [b for b in range(scheduler.kv.num_blocks) if scheduler.kv.cache.hash_of(b)]
            assert not cached, f"blocks {cached} are cached after a reset"

    # -- steps

    def launch(self) -> bool:
        """Plan and launch a step. Returns False if the plan is empty, or if the newest step in
        flight still waits for its token masks."""
        self._draw_if_alone()
        if self._is_undrawn:
            return False
        scheduler = self.scheduler
        self._tick()
        if self.tiers is not None:  # loads may have ended
            self.invariants.prefix_ends.look()
        plan = scheduler.schedule()
        self.num_steps += 1
        self.planned.num_tokens += plan.num_tokens
        self.planned.num_full += bool(plan.num_tokens)
        for column in (plan.rows, plan.starts, plan.counts, plan.block_ids):
            self._trace.update(column.tobytes())
        self.invariants.planned(plan)
        self.clients.watch(plan)
        if self.adapters is not None:
            self.adapters.planned(plan)
            for new in plan.new:
                content = self.adapters.started(new.request_id, new.slot)
                self.clients.use(new.request_id, content)
        if self.pictures is not None:
            self.pictures.planned(plan)
        check_wishes_for_drafts(scheduler, plan, max_drafts(self.case.setup))
        if plan.is_empty:
            return False
        result = self.executor.launch(plan)
        result.seconds = (self._fixed + plan.num_tokens) * self.case.setup.tick / 16
        self.planned.seconds += result.seconds
        if plan.num_tokens:  # others send no changes of block tables, e.g. one that frees outputs
            self.invariants.launched()
        self._flight.append((plan, result))
        self._is_undrawn = plan.masks is not None
        return True

    def settle(self) -> None:
        """Collect the result of the oldest step in flight and apply it to the scheduler."""
        self._draw_if_alone()
        plan, result = self._flight.popleft()
        collected = self.executor.collect(result)
        if max_drafts(self.case.setup):
            self.counts.add(plan, collected)
        outputs = self.scheduler.update_from_output(plan, collected)
        self._hear(outputs)
        self.invariants.settled(plan)

    def step(self) -> None:
        """Launch as many engine steps as may be in flight, then apply the oldest one's result."""
        while len(self._flight) < self.scheduler.config.num_steps_in_flight and self.launch():
            pass
        if self._flight:
            self.settle()
        else:
            self._hear(self.scheduler.take_outputs())

    def step_or_wait(self) -> None:
        """Take a step; if there is nothing to compute, advance the clock to the next timer."""
        num_steps = self.num_steps
        self.step()
        if not self._flight and self.num_steps == num_steps + 1:
            self._wait()

    def drain(self) -> None:
        """Run steps until all requests have ended, and check that this takes a bounded number of
        steps [10]."""
        scheduler = self.scheduler
        scheduler.set_pause_state(PauseState.UNPAUSED)
        patience = 4 / (1 - self._idle_share)
        work = sum(map(self._work, self.clients.live.values()))
        bound = self.num_steps + SLACK_STEPS + patience * work
        while self.has_work:
            if self.pictures is not None and self.pictures.bring_next():
                bound += 1
            self.step_or_wait()
            assert self.num_steps <= bound, (
                f"unfinished after {self.num_steps} steps: {list(self.clients.live)}; "
                f"blocked: {scheduler.settler.counters.blocked!r}"
            )
        self._hear(scheduler.take_outputs())
        self.clients.check_over()
        if self.adapters is not None:
            self.adapters.check_over()
        if self.pictures is not None:
            self.pictures.check_over()
        if self.tiers is not None:
            self.tiers.check_over()
            self.truth.check_stored(self.tiers.stored)
        check_stats(scheduler, self.planned.num_tokens, self.planned.num_full)
        self.truth.check()
        self.invariants.ended(leaks=self._leaks)
        self.counts.check(self.halves.resources)

    @property
    def has_work(self) -> bool:
        """True if requests have not ended, or the scheduler does not know the end of a load."""
        scheduler = self.scheduler
        is_reading = self.adapters is not None and self.adapters.is_reading
        is_loading = self.tiers is not None and self.tiers.is_loading
        is_busy = self._flight or is_reading or is_loading
        return bool(scheduler.has_requests() or is_busy)

    # -- helpers

    def _hear(self, outputs: StepOutputs) -> None:
        self.clients.hear(outputs, self.latest)
        self.heard(outputs)

    def _make_need(self, name: str) -> Need:
        setup, answers = self.case.setup, self.clients.answers
        if name == Pictures.name:
            cache_size, whole_media = setup.encoder_cache_size, setup.whole_media
            return Pictures(
                setup.needs[name], answers, cache_size=cache_size, whole_media=whole_media
            )
        if name == SimulatedTiers.name:
            return SimulatedTiers(setup.needs[name], answers, setup)
        return KINDS[name](setup.needs[name], answers)

    def _fail(self, new: NewSeq, upto: int) -> str | None:
        """Why the worker cannot compute the positions of a sequence before ``upto``, if so."""
        media = None if self.pictures is None else self.pictures.device.reason(new, upto)
        return self.clients.fail(new, upto) or media

    def _kept_by(self, answer: Callable[..., Any]) -> Callable[..., Any]:
        """For one of the ranks: ``answer(new, ...)``, as the rank got it that called it first.
        A call is known by its sequence and by how often it was made, since ids are used again."""
        if self.case.setup.ranks == 1:
            return answer
        num_calls: Counter[tuple[Any, ...]] = Counter()

        def kept(new: NewSeq, *more: int) -> Any:
            call = (new.request_id, new.seed, tuple(new.token_ids), *more)
            num_calls[call] += 1
            key = (*call, num_calls[call])
            if key not in self._kept:
                self._kept[key] = answer(new, *more)
            return copy.copy(self._kept[key])

        return kept

    def _make_rank(self, setup: Setup, rank: int) -> DigestWorker:
        """The worker of a further rank. It reads what the first rank has read, even if it is late
        and the request has ended meanwhile."""
        worker = worker_class(setup)(
            setup.num_blocks,
            setup.block_size,
            vocab_size=setup.num_tokens_used,
            windows=setup.windows,
            content=self._kept_by(self.clients.content),
            fail=self._kept_by(self._fail),
        )
        if setup.snapshot_blocks:
            worker.keep_states(most_drafts(setup), loses_some)
        if self.tiers is not None:
            self.tiers.connect(rank, worker)
        return worker

    def _make_halves(self, setup: Setup, make: MakeHalves | None) -> Halves:
        if make is not None:
            return make(setup)
        assert not setup.has_halves, "this case has drafts or grammars: pass halves"
        return Halves((), guide=lambda add: NoGuide())

    def _draw_if_alone(self) -> None:
        """If the only step in flight waits for its token masks, make them and sample the step."""
        if self._is_undrawn and len(self._flight) == 1:
            plan, result = self._flight[0]
            self._is_undrawn = False
            assert plan.masks is not None
            if plan.masks.ahead is not None:
                plan.masks.drawn = self.executor.preview(result)
            self.executor.sample(result, self.scheduler.masks(plan))

    def _make_scheduler(self, setup: Setup) -> Scheduler:
        config = setup.config
        chosen = choose(config)
        kv = KVManager(
            chosen.pool(setup.num_blocks),
            setup.block_size,
            enable_prefix_caching=setup.caching,
            groups=[make_group(window, setup) for window in setup.windows],
        )
        if setup.snapshot_blocks:
            kv.keep_states(setup.snapshot_blocks, setup.snapshot_interval * setup.block_size)
        policies = (chosen.policy, chosen.cache_policy)
        if config.scheduling_policy in policies or config.cache_policy in policies:
            policies = copy.deepcopy(policies)  # each run uses its own
        snapshots = StateSnapshots(find_snapshot_policy(setup.snapshot_policy))
        states = [] if kv.states is None else [snapshots]
        resources = (*self.halves.resources, *chosen.resources, *self.needs, *states)
        chosen = Chosen(chosen.cls, policies[0], resources, policies[1])
        scheduler = make_scheduler(
            config, kv, clock=lambda: self.now, seed=setup.seed, chosen=chosen
        )
        assert isinstance(scheduler, Scheduler), "only the shared scheduler can be checked"
        return scheduler

    def move(self) -> None:
        """Do the work of one tick: a whole engine step or, at random unless the engine is steady,
        only a launch or only the result of the oldest step."""
        dice = self._pace.random()  # one random number per tick, whatever happens
        if self.case.setup.is_steady or dice < 0.5:
            self.step()
        elif dice < 0.75:
            if len(self._flight) < self.scheduler.config.num_steps_in_flight:
                self.launch()
        elif self._flight:
            self.settle()
        else:
            self._hear(self.scheduler.take_outputs())

    def _tick(self) -> None:
        self.now += self.case.setup.tick
        self.latest = max(self.latest, self.now)
        for need in self.needs:
            need.tick()

    def _wait(self) -> None:
        """Advance the clock to the next timer."""
        due = self.scheduler.intake.timers.next_time()
        if due is not None and due > self.now:
            self.now = due

    @property
    def _idle_share(self) -> float:
        """The share of a random policy's answers that may leave a request without tokens."""
        config = self.case.setup.config
        return (
            float(config.policy_options.get("rate", 0.2))
            if config.scheduling_policy == WILD
            else 0.0
        )

    def _work(self, live: LiveRequest) -> int:
        """The largest number of steps that the request would take if it were alone."""
        req = live.req
        waits = self.case.setup.grammar_ticks + 1
        if not waits and req.add.grammar is not None:  # read by a resource of the case
            waits = abs(int(req.add.grammar))
        waits += 2 * MOST_TICKS * (req.adapter is not None and self.adapters is not None)
        waits += 2 * self.case.setup.needs.get(SimulatedTiers.name, 0)
        waits += int((seconds_of(req.add.kv_transfer_params) or 0) / self.case.setup.tick)
        return int(req.max_total + waits + self.scheduler.config.num_steps_in_flight)


def worker_class(setup: Setup) -> type[DigestWorker]:
    """The class of the engine's workers."""
    if setup.config.pipeline_parallel_size > 1:
        return StagedWorker
    return LateWorker if setup.seed % 2 else DigestWorker


def most_drafts(setup: Setup) -> int:
    """The largest number of draft tokens of a request in one step, simulated ones included."""
    return max(max_drafts(setup), setup.needs.get(NeededDrafts.name, 0))


def make_group(window: int, setup: Setup) -> Group:
    """The KV manager's group of layers with this window, see ``Setup.windows``."""
    if not window:
        return FULL
    size, budget = abs(window), setup.config.max_num_batched_tokens
    most = window_blocks(size, budget, setup.block_size)
    return Group(window=size, max_blocks=most, is_chunked=window < 0)

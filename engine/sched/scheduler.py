"""Scheduler: plans steps. The policy states preferences; the scheduler checks and applies them.

There are no prefill and decode phases. Each step distributes a budget of tokens among requests,
best rank first. A request can compute all tokens that have no KV yet, also tokens that steps in
flight will sample; a decode is a request with one token to compute.

    begin_step ──> grant_plain (decodes without special needs, in bulk)
                └> for each request offered: tokens_for ─> secure (seat, blocks, victims) ─> grant
    seal ──> StepPlan

All hooks are called before any state changes, so no change ever has to be undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from random import Random
from typing import ClassVar

from msgspec.structs import replace

from engine.config.sched import SchedulerConfig
from engine.kv.changes import CacheChanges
from engine.kv.manager import KVManager
from engine.messages.kv_orders import Loaded
from engine.messages.requests import AddRequest, Arrival, FinishReason
from engine.messages.stats import SchedulerStats
from engine.messages.step import Masks, StepPlan, StepResult
from engine.sched.interface import (
    FinishedRequest,
    PauseState,
    RequestCounts,
    SchedulerInterface,
    StepOutputs,
)
from engine.sched.micro_batches import MicroBatches, StageChunks
from engine.sched.plugins.hooks import (
    DECIDING,
    SHAPING,
    FaultLog,
    PolicyGuard,
    ReentryGuard,
    not_reentrant,
)
from engine.sched.plugins.resources import Resources
from engine.sched.policy import Admission, Policy
from engine.sched.predict.headroom import Judgement
from engine.sched.predict.loads import LoadChoice
from engine.sched.request import Request, end_of
from engine.sched.resource import Fit, OnRefuse, Resource
from engine.sched.roster import Cause, Roster
from engine.sched.step.builder import pad_drafts, prefill_cap, room_next_to_decodes, seal
from engine.sched.step.decodes import FEW, DecodeFastPath
from engine.sched.step.intake import Intake, TimerKind
from engine.sched.step.preempt import cut_to_blocks, victims_for
from engine.sched.step.settle import Settler
from engine.sched.step.stalls import StallDetector
from engine.sched.step.stats import make_stats
from engine.sched.step_state import Step
from engine.sched.table import SERIAL, WATCHED
from engine.sched.view import View

# A subclass that overrides one of these is called for every request: nothing is granted in bulk.
BULK_PARTS = ("tokens_for", "secure", "grant")


class Scheduler(SchedulerInterface):
    """The scheduling mechanism that all policies share.

    A custom scheduling loop can call ``begin_step``, ``tokens_for``, ``secure``, ``grant``,
    ``preempt`` and ``seal``. ``clock`` and ``timer`` return seconds; ``timer`` only measures how
    long hooks take.
    """

    few_decodes: ClassVar[int] = FEW
    """Up to this many running requests, decodes are granted in a loop, not with numpy arrays."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        policy: Policy,
        *,
        clock: Callable[[], float],
        resources: Sequence[Resource] = (),
        seed: int = 0,
        timer: Callable[[], float] = float,
    ) -> None:
        faults = FaultLog(config.max_policy_faults, timer)
        self.config = config
        self.kv = kv
        self.policy = policy
        self.roster = Roster(config.max_num_seqs)
        if config.pipeline_parallel_size > 1:
            num_stages = config.pipeline_parallel_size
            resources = (MicroBatches(num_stages, self.roster), *resources)
            if config.min_stage_chunk:
                resources = (StageChunks(config.min_stage_chunk, num_stages), *resources)
        self.resources = Resources(resources, faults)
        self.view = View(config, kv, self.roster, Random(seed))
        self.guard = PolicyGuard(policy, faults, self.view)
        self.active_policy: Policy = self.guard  # the policy of this step
        self.settler = Settler(self.roster, kv, self.guard, self.view, self.resources)
        self.intake = Intake(config, self.settler)
        self.pause_state = PauseState.UNPAUSED
        self.num_in_flight = 0
        self._stalls = StallDetector(config.stalled_steps, self.settler.counters)
        self._clock = clock
        own_parts = [getattr(type(self), p) is not getattr(Scheduler, p) for p in BULK_PARTS]
        few = self.few_decodes if config.pipeline_parallel_size == 1 else 0  # a loop counts no room
        self._fast_path = DecodeFastPath(
            self.settler, self.guard, self.secure, is_open=not any(own_parts), few=few
        )
        for resource in resources:
            resource.attach(self)

    # -- adding and ending requests

    @not_reentrant
    def add_request(self, add: AddRequest) -> Request:
        self.view.now = self._clock()
        return self.intake.take(add)

    @not_reentrant
    def finish_requests(
        self, request_ids: str | Iterable[str] | None, reason: FinishReason = "abort"
    ) -> list[FinishedRequest]:
        by_id = self.roster.by_id
        if request_ids is None:
            request_ids = list(by_id)
        elif isinstance(request_ids, str):
            request_ids = [request_ids]
        alive = [by_id[name] for name in dict.fromkeys(request_ids) if name in by_id]
        self.view.now = self._clock()
        for req in alive:
            self.settler.finish(req)
        return [
            FinishedRequest(req.request_id, req.add.client_index, end_of(req, 0, reason))
            for req in alive
        ]

    def wake(self, request_id: str) -> None:
        req = self.roster.parked.get(request_id)
        if req is not None:
            self.view.now = self._clock()
            self.roster.wake(req, self.view.now)

    @not_reentrant
    def arrived(self, arrival: Arrival) -> None:
        self.view.now = self._clock()
        self.resources.arrived(arrival)

    @not_reentrant
    def transferred(self, report: Loaded) -> None:
        self.view.now = self._clock()
        self.kv.set_time(self.view.now)
        self.resources.transferred(report)

    def name_adapter(self, req: Request, adapter: str) -> None:
        req.add = replace(req.add, adapter=adapter)
        self.roster.table.facts.set_adapter(req.row, adapter)
        self.kv.forget_prefix(req)
        self.roster.rank_again(req, self.guard.rank(req, self.view))

    def watch_again(self, req: Request) -> None:
        """Call the resources' ``watches`` and ``serializes`` again, and store their answers."""
        flags = self.roster.table.flags.at
        flags[req.row] = flags[req.row] & ~(WATCHED | SERIAL) | self.resources.flags(req)

    # -- the step

    def schedule(self) -> StepPlan:
        """Plan the next step: offer tokens to requests, best rank first, until the budget is
        used."""
        step = self.begin_step()
        if self.roster.by_id:
            self.serve(self.offers(step), step)
        return self.seal(step)

    def serve(self, offers: Iterable[Request], step: Step) -> None:
        """Give each offered request as many tokens as it may have, until the budget is used."""
        plain, index = self.roster.table.plain.at, step.index
        grant_one = None
        for req in offers:
            if step.tokens_left <= 0:
                break
            if plain[req.row] == index:
                if grant_one is None:
                    grant_one = self._fast_path.granter(step)
                grant_one(req)
                continue
            if not step.offer(req):  # already offered or preempted, or admission is closed
                continue
            fit = self.tokens_for(req, step)
            if fit.num_tokens <= 0:
                self._refuse(req, fit, step)
            elif self.secure(req, fit.num_tokens, step):
                self.grant(req, fit.num_tokens, step)

    def begin_step(self) -> Step:
        """Begin a step: run due timers, set the token budget, update ranks, and preempt the
        requests that the policy's ``evict`` names."""
        view, counters = self.view, self.settler.counters
        self.guard.faults.begin_step()
        view.now = self._clock()
        self.kv.set_time(view.now)
        self._run_timers()
        for req in self.resources.take_orphans():
            self.wake(req.request_id)
        counters.num_steps += 1
        step = view.step = Step(counters.num_steps, self.config.max_num_batched_tokens, self.roster)
        limits, may_preempt = self.guard.limits(view), self.guard.waiting_may_preempt
        step.narrow(limits.max_tokens, limits.max_seqs)
        if self.pause_state is PauseState.PAUSED_ALL:
            step.narrow(0)
        if self.pause_state is not PauseState.UNPAUSED:
            step.close(Cause.PAUSED)
        elif not limits.admission:
            step.close(Cause.POLICY)
        elif not (step.num_free_seats or may_preempt):
            step.close(Cause.SEATS)
        was_left_out = self.guard.take_rerank()
        if self.guard.dynamic or was_left_out:
            self.guard.rerank(self.roster.running, self.roster.by_row)
            if step.admission_open or was_left_out:  # else the waiting queue is not read
                self.guard.rerank(self.roster.waiting, self.roster.by_row)
        for req in list(self.guard.evict(view)):
            self.preempt(req, step)
        self.resources.begin_step(step)
        return step

    def offers(self, step: Step) -> Iterator[Request]:
        """Yield the requests that may get tokens in this step, in the policy's order, without
        decodes that were already scheduled in bulk."""
        policy, num_waiting = self.active_policy, len(self.roster.waiting)
        contested = policy.waiting_may_preempt and num_waiting
        if contested or not (self._fast_path.is_open and self._fast_path.grant_plain(step)):
            # A policy may yield a request twice; the limit stops a policy that yields for ever.
            yield from islice(policy.order(self.view), 2 * len(self.roster.by_id))
            return
        yield from self._fast_path.rest(step)
        for _ in range(num_waiting):
            if not step.admission_open or (req := policy.next_waiting(self.view)) is None:
                return
            yield req

    def tokens_for(self, req: Request, step: Step) -> Fit:
        """How many tokens the request may get now, by the budget, limits, policy and resources."""
        pending, is_waiting = req.num_pending, req.is_waiting
        if pending and (is_waiting or req.is_serial):
            # Preempted or serial: it waits until tokens being sampled are known.
            return Fit(0, Cause.BLOCKS, OnRefuse.CLOSE)
        num_left = req.num_uncomputed
        if is_waiting:
            num_left -= self.kv.ready(req)
        if num_left == 1:
            room = min(step.tokens_left, req.max_total - req.num_tokens - pending)
            wanted = min(1 + self.resources.extra(req, step), room)
            return self._allowed(req, num_left, wanted, step)
        most = min(num_left, step.tokens_left - step.num_kept_tokens)
        spared = min(most, prefill_cap(self.config, self.roster), self._prompt_room(step))
        if spared <= 0:
            return Fit(0, Cause.TOKENS, OnRefuse.CLOSE)
        fit = self._allowed(req, num_left, spared, step)
        if spared == most or fit.num_tokens > 0 or fit.on_refuse in (OnRefuse.PARK, OnRefuse.FAIL):
            return fit
        # A resource may forbid to split it (an image): then it is computed whole, now or later.
        whole = self._allowed(req, num_left, most, step)
        if whole.num_tokens > 0 and step.num_prompt_tokens:
            return Fit(0, Cause.TOKENS, OnRefuse.CLOSE)
        return whole

    def _prompt_room(self, step: Step) -> int:
        """Number of tokens that prompts may still get in this step."""
        if self.guard.overrides(*SHAPING):
            return step.tokens_left
        return room_next_to_decodes(step, self.config, self.roster)

    def _allowed(self, req: Request, num_left: int, wanted: int, step: Step) -> Fit:
        """How many of the ``wanted`` tokens the policy and the resources allow the request to
        compute. ``num_left``: all tokens that it still has to compute."""
        may_be_cut = num_left == 1 or self.config.enable_chunked_prefill
        if wanted < num_left and not may_be_cut:
            return Fit(0, Cause.TOKENS, OnRefuse.CLOSE)
        if wanted > 0:
            allowed = self.active_policy.chunk(req, wanted, self.view)
            # A policy may hold back a prompt that must be computed whole, but not cut it.
            if may_be_cut or allowed <= 0:
                wanted = min(wanted, allowed)
        if wanted <= 0:
            return Fit(0, Cause.POLICY, OnRefuse.CLOSE)
        if wanted > 1 and may_be_cut and not req.is_waiting:
            wanted = cut_to_blocks(req, wanted, self.active_policy, self.view)
        return self.resources.fit(req, wanted, step)

    def secure(self, req: Request, num_tokens: int, step: Step) -> bool:
        """Get a seat and KV blocks for ``num_tokens`` more tokens of the request; False if that
        fails. Other requests are preempted only if that frees enough."""
        start = req.num_computed
        if req.is_waiting:
            if not self._admits(req, step):
                return False
            start = self.kv.ready(req)
        elif start + num_tokens <= self.kv.num_held[req.row] * self.kv.block_size:
            return True
        upto = start + num_tokens
        return self._make_room(req, upto, step) and self.kv.reserve(req, upto)

    def _make_room(self, req: Request, upto: int, step: Step) -> bool:
        """Preempt requests until a seat and blocks for the request's first ``upto`` tokens are
        free. Returns False, and preempts none, if that cannot free enough."""
        victims = victims_for(req, upto, self.active_policy, self.view)
        if victims is None:
            if req.is_waiting:
                step.close(Cause.BLOCKS if step.num_free_seats else Cause.SEATS)
            else:
                step.short.append(req)
            return False
        for victim in victims:
            self.preempt(victim, step, by=req.request_id)
        return True

    def grant(self, req: Request, num_tokens: int, step: Step) -> None:
        """Add ``num_tokens`` tokens of the request, whose blocks are reserved, to the step."""
        table, row = self.roster.table, req.row
        is_new = req.is_waiting
        if is_new:
            self._admit(req)
            self.resources.seated(req, step)
        is_prompt = is_new or req.num_uncomputed > 1
        samples = table.advance_one(row, num_tokens)
        self.kv.commit(req, min(table.num_computed.at[row], table.num_tokens.at[row]))
        step.record(req, num_tokens, is_new=is_new, is_prompt=is_prompt, samples=samples)
        self.resources.take(req, num_tokens, step)
        if self.guard.uses_ledger:
            self.view.ledger.on_grant(req, num_tokens)
        self.guard.on_grant(req, num_tokens, self.view)  # even if the default order is used

    def _refuse(self, req: Request, fit: Fit, step: Step) -> None:
        """Skip, park or end a request that gets no tokens now, or let no further request start."""
        if fit.on_refuse is OnRefuse.FAIL:
            self.settler.end(req, "error", fit.cause, fit.code)
        elif not req.is_waiting:
            if fit.on_refuse is OnRefuse.PARK:
                step.expecting.append(req)
        elif fit.on_refuse is OnRefuse.CLOSE:
            step.close(fit.cause)
        elif fit.on_refuse is OnRefuse.PARK:
            self._park(req, fit, step)
        else:
            step.skip(req, fit.cause)

    def _park(self, req: Request, fit: Fit, step: Step) -> None:
        """Park the request until ``wake``, if there is room for ``fit.room`` tokens."""
        if fit.room:
            if self.settler.end_if_never(req, fit.room):
                return
            if not (self._admits(req, step) and self._make_room(req, fit.room, step)):
                return
        self.roster.park(req, self.view.now, fit.cause)
        self.resources.parked(req, fit.by)

    def preempt(self, req: Request, step: Step, by: str = "its policy") -> None:
        """Free the request's blocks and seat; it returns to the queue and computes its tokens
        again. Tokens that steps in flight sample for it are kept. by: who preempts it."""
        self.settler.unseat(req, f"preempted by {by}")
        self.roster.table.considered.at[req.row] = step.index
        step.preempted.append(req)

    def seal(self, step: Step) -> StepPlan:
        """Finish the step and return its plan. The step is then in flight, unless it is empty."""
        is_paused = self.pause_state is not PauseState.UNPAUSED
        is_stopped = self.pause_state is PauseState.PAUSED_ALL
        if not (step.has_grants or self.num_in_flight or is_stopped):
            self._rescue(step)
        self._fast_path.write_back(step)
        cause = Cause.PAUSED if is_paused else step.closing_cause()
        self.roster.waits.close(self.view.now, cause, step.refused)
        is_idle = not (step.has_grants or self.num_in_flight or is_paused)
        is_idle = is_idle and not (step.expecting and not len(self.roster.waiting))
        self._stalls.look(is_idle, self.roster, cause, step.refused)
        plan = seal(step, self.roster, self.kv)
        self.resources.describe(plan)
        pad_drafts(plan, step)
        if plan.num_tokens:  # else no result needs to be awaited
            self.num_in_flight += 1
            self.settler.counters.num_computed_steps += 1
        self.settler.counters.num_scheduled_tokens += plan.num_tokens
        self.guard.faults.end_step()
        return plan

    # -- after the step

    def masks(self, plan: StepPlan) -> Masks | None:
        return self.resources.masks(plan)

    @not_reentrant
    def update_from_output(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        self.view.now = self._clock()
        if plan.num_tokens:  # else it only carried information to the worker
            self.num_in_flight -= 1
        has_on_step = self.guard.overrides("on_step")
        if plan.num_tokens or has_on_step:
            self.view.record_step(plan, result.seconds)
        if result.floor_seconds:
            self.settler.counters.step_seconds += result.measured_seconds
            self.settler.counters.floor_seconds += result.floor_seconds
        outputs = self.settler.settle(plan, result)
        if has_on_step:
            self.guard.on_step(self.view.last, self.view)
        return outputs

    @not_reentrant
    def take_outputs(self) -> StepOutputs:
        self.view.now = self._clock()
        self._run_timers()
        return self.settler.take_outputs()

    def shutdown(self) -> None:
        self.resources.shutdown()
        self.kv.shutdown()

    # -- queries

    @property
    def reentry(self) -> ReentryGuard:
        return self.guard.faults.reentry

    def report_fault(self, culprit: str, what: str, req: Request | None = None) -> None:
        """Log and count a fault of a plug-in that a resource calls (``AttachedScheduler``)."""
        self.guard.faults.record(culprit, req, what)

    def get_request_counts(self) -> RequestCounts:
        roster = self.roster
        return RequestCounts(len(roster.running), len(roster.waiting), len(roster.parked))

    def has_finished_requests(self) -> bool:
        return bool(self.roster.freed_slots)

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state

    @not_reentrant
    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        if reset_running:
            self.view.now = self._clock()
            self.kv.set_time(self.view.now)
            for req in list(self.roster.running):
                self.settler.restart(req.row)
        return self.kv.reset_prefix_cache()

    @not_reentrant
    def reset_encoder_cache(self) -> None:
        self.resources.reset()

    def follow_cache(self) -> CacheChanges | None:
        return self.kv.follow_cache()

    def take_judgements(self) -> list[Judgement | LoadChoice]:
        return [*self.view.headroom.take(), *self.view.loads.take()]

    def expect_judgement(self, judgement: Judgement | LoadChoice) -> None:
        if isinstance(judgement, LoadChoice):
            self.view.loads.expect(judgement)
        else:
            self.view.headroom.expected[judgement.step] = judgement.is_kept

    def make_stats(self) -> SchedulerStats:
        return make_stats(
            self.settler.counters, self.view, self.roster, self.resources, self.guard.faults
        )

    @property
    def is_transferring(self) -> bool:
        """True while KV is loaded into free blocks."""
        return bool(self.kv.promotions)

    # -- helpers

    def _rescue(self, step: Step) -> None:
        """Make progress when no request got a token and no step is in flight.

        First the step is planned again in the default order, if a plug-in may have caused this. If
        no request gets a token then either, the last running one may be preempted to free its
        blocks, or its seat if it awaits something, unless a load is about to free some blocks."""
        has_own_loop = type(self).schedule is not Scheduler.schedule
        if (has_own_loop or self.guard.overrides(*DECIDING)) and (
            len(self.roster.running) + len(self.roster.waiting)
        ):
            culprit = type(self).__name__ if has_own_loop else self.guard.idle_hooks(step)
            self._serve_by_default(step)
            self.settler.counters.count_rescue(culprit, was_saved=step.has_grants)
        is_stuck = self._stalls.is_stuck
        is_held_up = step.expecting and len(self.roster.waiting)
        is_short = step.short or is_held_up or is_stuck or not len(self.roster.running)
        if step.has_grants or not is_short:
            return
        if self.is_transferring and not is_stuck:
            return
        if running := self.roster.running:
            self.preempt(running[len(running) - 1], step, by="the lack of KV blocks")

    def _serve_by_default(self, step: Step) -> None:
        """Plan the step again with requests in the default order, not the policy's."""
        counters = self.settler.counters
        counters.num_steps += 1
        step.reopen(counters.num_steps, self.config.max_num_batched_tokens)
        if self.pause_state is PauseState.PAUSED_NEW:
            step.close(Cause.PAUSED)
        self.active_policy = self.guard.overrule()
        self.serve(self.active_policy.order(self.view), step)
        self.active_policy = self.guard

    def _run_timers(self) -> None:
        """Wake requests that were deferred until now, and end requests past their deadline."""
        for kind, req in self.intake.timers.due(self.view.now):
            if kind is TimerKind.WAKE:
                self.wake(req.request_id)
            elif kind is TimerKind.END_BY or req.history.scheduled_time is None:
                self.settler.expire(req, kind.value)

    def _admits(self, req: Request, step: Step) -> bool:
        """True if the policy admits this waiting request. After preemptions in this step, the
        request must also outrank all preempted ones."""
        policy, admission = self.active_policy, Admission.CLOSE
        outranked = policy.waiting_may_preempt and all(
            policy.outranks(req, other) for other in step.preempted
        )
        if not step.preempted or outranked:
            admission = policy.admit(req, self.view)
        cause = Cause.POLICY if self.guard.overrides("admit") else Cause.BLOCKS
        if admission is Admission.CLOSE:
            step.close(cause)
        elif admission is Admission.SKIP:
            step.skip(req, cause)
        return admission is Admission.YES

    def _admit(self, req: Request) -> None:
        """Start a waiting request: give it a seat, and skip the tokens whose KV is cached."""
        hit, history, now = self.kv.ready(req), req.history, self.view.now
        self.kv.count_lookup(req, hit, preempted=history.num_preempted > 0)
        if history.scheduled_time is None:
            history.scheduled_time = now
            history.num_cached = hit
            history.prefix_end = self.kv.prefix_end(req)
            self.intake.on_started(now)
        history.events.append(("scheduled", now))
        self.roster.table.start_from(req.row, hit)
        self.roster.seat(req, now)

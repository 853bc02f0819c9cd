"""Scheduler: the mechanism. A policy says what it prefers; this makes it legal and does it.

There is no prefill and no decode phase. A request has ``num_computed`` tokens in the cache and
catches up with the tokens it knows (or will know once the steps in flight are settled); a decode is
a request that is one token behind. Each step hands out a budget of tokens, best first.

    begin_step ──> grant_plain (decodes that need nobody's opinion, in bulk)
                └> for each request offered: tokens_for ─> secure (seat, blocks, victims) ─> grant
    seal ──> StepPlan

Everything is asked before anything is changed, so nothing is ever taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from random import Random

from engine.config.sched import SchedulerConfig
from engine.errors import PolicyError, RequestError
from engine.kv.manager import KVManager
from engine.messages.outputs import FinishReason
from engine.messages.requests import AddRequest
from engine.messages.step import StepPlan, StepResult
from engine.sched import builder, queues
from engine.sched.interface import RequestCounts, SchedulerInterface, StepOutputs
from engine.sched.policy import Admission, Policy
from engine.sched.request import Request, Status, check_can_run
from engine.sched.resource import Fit, OnRefuse, Resource
from engine.sched.roster import Roster, Rows
from engine.sched.settle import Settler
from engine.sched.stats import SchedulerStats
from engine.sched.view import View

SCALAR_UPTO = 16  # running requests up to which one by one is faster than in bulk
# Whoever overrides one of these is asked about every request, one by one.
BULK_HOOKS = ("order", "chunk", "evict", "on_grant")
BULK_PARTS = ("tokens_for", "secure", "grant")


class Scheduler(SchedulerInterface):
    """The shared mechanism under every policy.

    Public parts for loops of one's own: ``begin_step``, ``tokens_for``, ``secure``, ``grant``,
    ``preempt``, ``seal``. ``clock`` gives seconds; nothing here reads any other.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        policy: Policy,
        *,
        clock: Callable[[], float],
        resources: Sequence[Resource] = (),
        seed: int = 0,
    ) -> None:
        self.config = config
        self.kv = kv
        self.policy = policy
        self.resources = list(resources)
        self.roster = Roster(config.max_num_seqs)
        self.view = View(config, kv, self.roster, Random(seed))
        self.settler = Settler(self.roster, kv, policy, self.view, self.resources)
        self.num_in_flight = 0
        self._clock = clock
        self._num_steps = 0
        self._num_arrived = 0
        asked: list[tuple[type, type, str]] = [(type(policy), Policy, hook) for hook in BULK_HOOKS]
        asked += [(type(self), Scheduler, part) for part in BULK_PARTS]
        self._bulk = all(getattr(cls, name) is getattr(base, name) for cls, base, name in asked)

    # -- requests come and go

    def add_request(self, add: AddRequest) -> Request:
        if add.request_id in self.roster.by_id:
            raise RequestError(
                f"request id {add.request_id!r} is in use; wait until it has finished or choose "
                "another"
            )
        check_can_run(add, self.config, self.kv)
        req = Request(
            add,
            self._num_arrived,
            self.roster.table,
            max_model_len=self.config.max_model_len,
        )
        self._num_arrived += 1
        self.kv.ensure_rows(self.roster.table.num_rows)
        self.view.now = self._clock()
        try:
            watched = any(resource.watches(req) for resource in self.resources)
            self.roster.table.watched.at[req.row] = int(watched)
            self.policy.on_add(req, self.view)
            req.rank = self.policy.rank(req, self.view)
            self.roster.add(req)
        except BaseException:  # a policy that cannot take this one costs no row
            self.kv.forget(req)
            self.roster.table.give_back(req.row)
            raise
        return req

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, reason: FinishReason = "abort"
    ) -> list[Request]:
        by_id = self.roster.by_id
        if request_ids is None:
            request_ids = list(by_id)
        elif isinstance(request_ids, str):
            request_ids = [request_ids]
        alive = [by_id[name] for name in dict.fromkeys(request_ids) if name in by_id]
        for req in alive:
            self.settler.finish(req)
        return alive

    def wake(self, request_id: str) -> None:
        if request_id in self.roster.parked:
            self.roster.wake(self.roster.parked[request_id])

    # -- the step

    def schedule(self) -> StepPlan:
        """Grant plain decodes at once, then offer what is left of the step, best first."""
        step = self.begin_step()
        for req in self.offers(step):
            if step.is_full:
                break
            if not step.offer(req):  # seen or evicted in this step, or admission is closed
                continue
            fit = self.tokens_for(req, step)
            if fit.num_tokens <= 0:
                step.refuse(req, fit.on_refuse)
            elif self.secure(req, fit.num_tokens, step):
                self.grant(req, fit.num_tokens, step)
        self.unstick(step)
        return self.seal(step)

    def begin_step(self) -> builder.Step:
        """Fresh budgets; ranks that move are asked again; the policy's own evictions happen."""
        self._num_steps += 1
        view = self.view
        view.now = self._clock()
        step = view.step = builder.Step(
            self._num_steps, self.config.max_num_batched_tokens, self.roster
        )
        if self.policy.dynamic:
            for queue in (self.roster.running, self.roster.waiting):
                queue.rerank(lambda req: self.policy.rank(req, view))
        step.admission_open = bool(self.roster.num_free_seats) or self.policy.waiting_may_preempt
        for req in list(self.policy.evict(view)):
            if req.status is not Status.RUNNING:
                raise PolicyError(f"{type(self.policy).__name__}.evict: {req} is not running")
            self.preempt(req, step)
        for resource in self.resources:
            resource.begin_step(step)
        return step

    def offers(self, step: builder.Step) -> Iterator[Request]:
        """Whom to offer tokens: the policy's order, less what was granted in bulk."""
        contested = self.policy.waiting_may_preempt and len(self.roster.waiting)
        many = self._bulk and len(self.roster.running) > SCALAR_UPTO
        if contested or not (many and self.grant_plain(step)):
            # To name somebody twice is harmless; to go on naming for ever ends here.
            yield from islice(self.policy.order(self.view), 2 * len(self.roster.by_id))
            return
        rows = self.roster.running_rows()
        rest = self._by_rank(rows[self.roster.table.considered.all[rows] != step.index])
        yield from sorted(rest, key=lambda req: req.num_uncomputed != 1)
        for _ in range(len(self.roster.waiting)):
            if (req := self.policy.next_waiting(self.view)) is None:
                return
            yield req

    def grant_plain(self, step: builder.Step) -> bool:
        """Grant all running requests that are one token behind and watched by no resource.

        Done only if every running decode fits budget and free blocks; then the order among them
        does not matter and the plan is the one that offering them one by one would give.
        """
        table, kv = self.roster.table, self.kv
        rows = self.roster.running_rows()
        upto = table.num_tokens.all[rows] + table.num_pending.all[rows]
        computed = table.num_computed.all[rows]
        decode = (upto - computed == 1) & (upto < table.limit.all[rows])
        needs_block = decode & (computed >= kv.num_held[rows] * kv.block_size)
        num_decodes = int(decode.sum())
        if num_decodes > step.tokens_left or int(needs_block.sum()) > kv.pool.num_free:
            return False
        plain = decode & (table.watched.all[rows] == 0)
        growing = self._by_rank(rows[plain & needs_block])
        kv.reserve_next([req.row for req in growing])
        rows = rows[plain]
        table.num_computed.all[rows] += 1
        table.num_pending.all[rows] += 1
        table.in_flight.all[rows] += 1
        table.considered.all[rows] = step.index
        step.plain_rows = rows
        step.tokens_left -= len(rows)
        self.settler.commit_rows(rows)
        return True

    def tokens_for(self, req: Request, step: builder.Step) -> Fit:
        """How many tokens budget, caps, policy and resources allow the request now."""
        if req.is_waiting and req.num_pending:
            # Preempted; what it sampled must be known first.
            return Fit(0, "in flight", OnRefuse.CLOSE)
        behind = req.num_uncomputed
        if req.is_waiting:
            behind -= self.kv.lookup(req).num_tokens
        wanted = min(behind, step.tokens_left, self._prefill_cap())
        if wanted < behind and not self.config.enable_chunked_prefill:
            return Fit(0, "token budget", OnRefuse.CLOSE)
        if wanted:
            wanted = max(0, min(wanted, int(self.policy.chunk(req, wanted, self.view))))
        return self._fit_resources(req, Fit(wanted, "token budget", OnRefuse.CLOSE), step)

    def secure(self, req: Request, num_tokens: int, step: builder.Step) -> bool:
        """Get a seat and blocks for this many more tokens; decide first, then evict."""
        start = req.num_computed
        if req.is_waiting:
            if not step.admits(self._admission(req, step)):
                return False
            start = self.kv.lookup(req).num_tokens
        victims = self.victims_for(req, start + num_tokens)
        if victims is None:
            step.refuse(req, OnRefuse.CLOSE)
            return False
        for victim in victims:
            self.preempt(victim, step)
        return self.kv.reserve(req, start + num_tokens)

    def victims_for(self, req: Request, upto: int) -> list[Request] | None:
        """Whom to preempt so that there is a seat and room for ``req``; None: it cannot be had."""
        victims: list[Request] = []
        if req.is_waiting and not self.policy.waiting_may_preempt:
            fits = self.roster.num_free_seats and self.kv.fits(req, upto)
            return victims if fits else None
        candidates: list[Request] | None = None
        while not (
            (not req.is_waiting or self.roster.num_free_seats + len(victims))
            and self.kv.fits(req, upto, victims)
        ):
            if candidates is None:
                candidates = self._candidates(req)
            if not candidates:
                return None
            victim = self.policy.victim(candidates, req, self.view)
            if victim is None:
                return None
            if victim not in candidates:
                raise PolicyError(
                    f"{type(self.policy).__name__}.victim: {victim} is no candidate for {req}"
                )
            candidates.remove(victim)
            victims.append(victim)
        return victims

    def grant(self, req: Request, num_tokens: int, step: builder.Step) -> None:
        """The request computes these tokens in this step; its blocks are reserved."""
        table, row = self.roster.table, req.row
        is_new = req.is_waiting
        if is_new:
            self._admit(req)
        upto = table.num_computed.at[row] + num_tokens
        table.num_computed.at[row] = upto
        table.in_flight.at[row] += 1
        samples = upto >= table.num_tokens.at[row] + table.num_pending.at[row]
        if samples:
            table.num_pending.at[row] += 1
        self.kv.commit(req, min(upto, table.num_tokens.at[row]))
        step.record(req, num_tokens, is_new=is_new, samples=samples)
        for resource in self.resources:
            resource.take(req, num_tokens, step)
        self.policy.on_grant(req, num_tokens, self.view)

    def preempt(self, req: Request, step: builder.Step) -> None:
        """Take blocks and seat; the request waits at its rank and will recompute.

        Steps in flight still bring it their tokens: they are on their way and they are right.
        """
        self.kv.release(req)
        self.roster.table.num_computed.at[req.row] = 0
        self.roster.table.considered.at[req.row] = step.index
        req.num_preempted += 1
        self.view.num_preemptions += 1
        self.roster.unseat(req)
        step.preempted.append(req)
        for resource in self.resources:
            resource.release(req)

    def unstick(self, step: builder.Step) -> None:
        """Nobody got a token and nothing is in flight: the lowest holder makes room."""
        if not step.has_grants and not self.num_in_flight and len(self.roster.running):
            self.preempt(self.roster.running[len(self.roster.running) - 1], step)

    def seal(self, step: builder.Step) -> StepPlan:
        """The plan; from here on the step is in flight, unless there is nothing in it."""
        plan = builder.seal(step, self.roster, self.kv)
        if not plan.is_empty:
            self.num_in_flight += 1
            for resource in self.resources:
                resource.describe(plan)
        self.view.num_scheduled_tokens += plan.num_tokens
        return plan

    # -- after the step

    def update_from_output(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        self.num_in_flight -= 1
        self.view.now = self._clock()
        return self.settler.settle(plan, result)

    # -- questions

    def get_request_counts(self) -> RequestCounts:
        roster = self.roster
        return RequestCounts(len(roster.running), len(roster.waiting), len(roster.parked))

    def has_finished_requests(self) -> bool:
        return bool(self.roster.freed_slots)

    def reset_prefix_cache(self) -> bool:
        return self.kv.reset_prefix_cache()

    def make_stats(self) -> SchedulerStats:
        counts = self.get_request_counts()
        return SchedulerStats(
            num_running=counts.running,
            num_waiting=counts.waiting,
            num_parked=counts.parked,
            kv_usage=self.kv.usage,
            prefix_queries=self.kv.counts.queries,
            prefix_hits=self.kv.counts.hits,
            num_preemptions=self.view.num_preemptions,
            num_failed=self.settler.num_failed,
            num_steps=self._num_steps,
            num_scheduled_tokens=self.view.num_scheduled_tokens,
        )

    # -- helpers

    def _fit_resources(self, req: Request, fit: Fit, step: builder.Step) -> Fit:
        settled = fit.num_tokens == 0
        while not settled:  # monotone answers: asking again until all agree ends
            settled = True
            for resource in self.resources:
                answer = resource.fit(req, fit.num_tokens, step)
                if answer.num_tokens < fit.num_tokens:
                    on_refuse = answer.on_refuse or resource.on_refuse
                    fit, settled = answer._replace(on_refuse=on_refuse), False
        return fit

    def _by_rank(self, rows: Rows) -> list[Request]:
        by_row = self.roster.by_row
        reqs = [req for row in rows.tolist() if (req := by_row[row]) is not None]
        return sorted(reqs, key=queues.by_rank)

    def _prefill_cap(self) -> int:
        """Cap on one prompt's tokens in this step: its share if that is above the threshold."""
        config = self.config
        if not config.long_prefill_token_threshold or not config.enable_chunked_prefill:
            return config.max_num_batched_tokens
        competing = len(self.roster.running) + len(self.roster.waiting)
        share = config.max_num_batched_tokens // max(1, competing)
        return max(config.long_prefill_token_threshold, share)

    def _admission(self, req: Request, step: builder.Step) -> Admission:
        """The policy's answer; after a preemption only who outranks every evicted one may enter."""
        policy = self.policy
        if step.preempted and not (
            policy.waiting_may_preempt
            and all(policy.outranks(req, other) for other in step.preempted)
        ):
            return Admission.CLOSE
        return policy.admit(req, self.view)

    def _candidates(self, req: Request) -> list[Request]:
        """Running requests that ``req`` outranks and that were not offered in this step."""
        index, outranks = self.view.step.index, self.policy.outranks
        return [
            other
            for other in self.roster.running
            if other.considered != index and other is not req and outranks(req, other)
        ]

    def _admit(self, req: Request) -> None:
        hit = self.kv.num_adopted(req) * self.kv.block_size
        resumed = req.num_preempted > 0
        self.kv.count_lookup(req.num_tokens, hit, preempted=resumed)
        if req.scheduled_time is None:
            req.scheduled_time = self.view.now
            req.num_cached = hit
        self.roster.table.num_computed.at[req.row] = hit
        self.roster.seat(req)

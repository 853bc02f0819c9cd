"""Invariants: what must hold after every step, over several steps, and at the end of a run.

=====  ==============================================================  ==========================
[1]    each block is free, held, or loaded into                        ``check.check_blocks``
[2]    a block's reference count is its number of tables and loads     ``check.check_blocks``
[3]    a slot has one writer, and no reader of a shared block writes   ``check.check_plan``
[4]    block tables fit the tokens; waiting requests hold no blocks    ``check.check_counts``
[5]    token budget, seats and limits of resources are kept            ``check_plan``, ``needs``
[6]    a live request is in one queue, under one id                    ``check.check_members``
[7]    each request ends once; each token is sent once, in order       ``clients``
[8]    a block cached under a hash holds that content's KV             ``CacheTruth``
[9]    no KV is shared across salts, adapters or media                 ``clients``
[10]   while a request could run, one does; every request ends         ``ProgressCheck``
[11]   no request is preempted repeatedly without a new token          ``ProgressCheck``
[12]   a request that can never run is refused when it arrives         ``simulation``
[13]   without requests no block is held and no data is kept           ``Invariants.ended``
[14]   the worker's block tables equal the scheduler's                 ``check_mirror``
[15]   the same case gives the same plans                              ``swarm``
[16]   policies break no contract                                      ``check_faults``
[17]   clock jumps change no plan of fcfs and priority (no adapters)   ``swarm``
[18]   pauses stop requests, deadlines end them                        ``check_wishes``
[19]   better ranks go first, unless the policy decides otherwise      ``check_order``
[20]   nothing is left unused that a request could use                 ``check.check_spare``
[21]   no request lacks blocks while a lower-ranked one gets tokens    ``check.check_ranked``
[22]   drafts are requested only where a step can verify them          ``halves``
[23]   drafts are counted as they were verified                        ``halves.DraftCounts``
[24]   prompt tokens are limited in steps with decodes                 ``check.check_mixed``
[25]   ``rank`` and ``ranks`` of a policy agree                        ``check.check_ranks``
[26]   a request knows why its prefix hit ended                        ``prefix_truth``
[27]   states are loaded where a hit ends, and saved in spare blocks   ``check_snapshots``
[28]   a request runs with the adapter that its name had               ``adapters.started``
[29]   no adapter's slot or host copy is lost while requests need it   ``adapters.DeviceSlots``
[30]   a failed load ends its own requests alone                       ``clients.check_end``
[31]   clients that follow the cache know which blocks it has          ``FollowedCache``
[32]   tokens of media are computed with their encoder outputs         ``pictures.MediaDevice``
[33]   no more media are encoded in a step, or kept, than allowed      ``pictures.MediaDevice``
[34]   media that fail end the requests that need them alone           ``Pictures.may_fail``
[35]   free blocks lose their content in the cache policy's order      ``check.check_kept``
[36]   blocks are loaded into while nothing else uses them             ``SimulatedTiers.check``
[37]   after a load, its request has the prefix hit that it was for    ``SimulatedTiers``
[38]   stores outside the pool get only right content                  ``CacheTruth``
[39]   requests of several cores end once, and are then forgotten      ``apart``
[40]   no request decodes in two of the steps that stages compute      ``StagesCheck``
[41]   decodes are spread evenly over the steps that stages compute    ``StagesCheck``
=====  ==============================================================  ==========================
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from engine.kv.events import split_key
from engine.kv.prefix_index import Chains, Sha256Hasher
from engine.kv.snapshots import MARK
from engine.kv.tails import tail_keys
from engine.messages.step import StepPlan
from engine.sched.interface import PauseState
from engine.sched.request import Request
from engine.sched.roster import by_rank
from engine.sched.scheduler import Scheduler
from policylab.verify.check import (
    check_empty,
    check_mixed,
    check_plan,
    check_ranked,
    check_snapshots,
    check_spare,
    check_state,
)
from policylab.verify.fake import EMPTY_DIGEST, DigestWorker, mix
from policylab.verify.fake_states import ZERO_STATE
from policylab.verify.needs import Need, NeededDrafts
from policylab.verify.prefix_truth import FollowedCache, PrefixEndTruth
from policylab.verify.stages import StagesCheck

IDLE_STEPS = 4  # consecutive plans that may be empty although a request could run
MANY = 64  # remembered requests, above which finished ones are forgotten
# Preemptions of one request without a new token in between; more if its prompt takes more steps. A
# request that never goes on exceeds any limit; in tiny pools, 15 have been seen of one that did.
FUTILE_PREEMPTIONS = 24


class Invariants:
    """Checks a scheduler from outside after each of its operations.

    Plans, outputs and block tables are always checked, the whole state once in ``every``
    operations. ``plugins``: also check policy and resources. ``num_drafts``: the most draft tokens
    that real drafters propose for a request."""

    def __init__(
        self,
        scheduler: Scheduler,
        worker: DigestWorker,
        needs: Sequence[Need],
        every: int = 1,
        *,
        plugins: bool = True,
        num_drafts: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.worker = worker
        self.needs = needs
        self.every = every
        self.plugins = plugins
        self.progress = ProgressCheck(scheduler, needs)
        self.stages = StagesCheck(scheduler)
        self.prefix_ends = PrefixEndTruth(scheduler)
        self.followed = FollowedCache(scheduler)
        self.num_drafts = num_drafts + sum(
            need.amount for need in needs if isinstance(need, NeededDrafts)
        )
        self._num_looks = 0

    def planned(self, plan: StepPlan) -> None:
        """Check a new plan."""
        if self.plugins:
            self._check_plugins()
            check_spare(self.scheduler, plan)
            check_mixed(self.scheduler, plan)
            check_ranked(self.scheduler, plan)
        if not plan.is_empty:
            check_plan(self.scheduler, plan)
            check_snapshots(self.scheduler, plan)
        self.progress.planned(plan)
        self.stages.planned(plan)
        check_wishes(self.scheduler, plan)
        for req in self.scheduler.view.step.new:
            self.prefix_ends.check(req)
        self._look()

    def launched(self) -> None:
        """Check that the worker's block tables match the scheduler's after the launch of a step."""
        check_mirror(self.scheduler, self.worker)

    def settled(self, plan: StepPlan) -> None:
        """Check the state after a step's results were applied to the scheduler."""
        self.stages.settled(plan)
        self._look()

    def changed(self) -> None:
        """Check the scheduler's state after any event between steps, such as an abort."""
        self._look()

    def ended(self, *, leaks: bool) -> None:
        """Check that scheduler, worker and resources hold nothing after all requests have ended.
        ``leaks``: also search for references to ended requests."""
        check_empty(self.scheduler)
        assert not self.worker.seqs, f"the worker keeps {list(self.worker.seqs)}"
        for need in self.needs:
            need.tick()
        if self.plugins:
            self._check_plugins()
        leak = find_leak(self.scheduler) if leaks else None
        assert leak is None, f"a request is remembered: {leak}"

    def _check_plugins(self) -> None:
        check_faults(self.scheduler)
        check_order(self.scheduler)
        for need in self.needs:
            need.check(self.scheduler.roster.running)

    def _look(self) -> None:
        self.prefix_ends.look()
        self._num_looks += 1
        if self._num_looks % self.every == 0:
            check_state(self.scheduler, num_drafts=self.num_drafts)
            self.followed.check()


class ProgressCheck:
    """Checks that a request runs whenever one can, and that no request is preempted again and again
    without a new token."""

    def __init__(self, scheduler: Scheduler, needs: Sequence[Need]) -> None:
        self._scheduler = scheduler
        self._needs = needs
        self._num_idle = 0
        self._num_refusals = 0
        self._robbed: dict[
            Request, tuple[int, int]
        ] = {}  # output at the last preemption, preemptions since

    def planned(self, plan: StepPlan) -> None:
        """Check a new plan."""
        scheduler = self._scheduler
        preempted = scheduler.view.step.preempted
        num_refusals = sum(need.num_refusals for need in self._needs)
        is_excused = (
            plan.num_tokens
            or scheduler.num_in_flight > (not plan.is_empty)
            or scheduler.pause_state is not PauseState.UNPAUSED
            or num_refusals > self._num_refusals
            or preempted
            or scheduler.kv.promotions  # blocks are loaded into
            or not len(scheduler.roster.running) + len(scheduler.roster.waiting)
        )
        self._num_refusals = num_refusals
        self._num_idle = 0 if is_excused else self._num_idle + 1
        assert self._num_idle <= IDLE_STEPS, (
            f"{self._num_idle} empty plans, although {list(scheduler.roster.by_id)} could run: "
            f"{scheduler.settler.counters.blocked}"
        )
        for req in preempted:
            self._rob(req)

    def _rob(self, req: Request) -> None:
        if len(self._robbed) >= MANY:
            self._robbed = {each: n for each, n in self._robbed.items() if not each.is_finished}
        output, times = self._robbed.get(req, (-1, 0))
        times = times + 1 if output == req.num_output else 0
        self._robbed[req] = req.num_output, times
        is_default = not self._scheduler.config.policy_options  # options may cause it
        most = max(FUTILE_PREEMPTIONS, fewest_steps(req, self._scheduler))
        assert times <= most or not is_default, f"{req} was preempted {times} times without a token"


def fewest_steps(req: Request, scheduler: Scheduler) -> int:
    """How many steps a request's tokens take at least, next to decodes of others."""
    config, states = scheduler.config, scheduler.kv.states
    limits = (
        config.max_num_batched_tokens,
        config.long_prefill_token_threshold,
        config.max_mixed_prefill_tokens,
        0 if states is None else states.interval,  # a step ends at each snapshot
    )
    return -(-req.num_tokens // min(limit for limit in limits if limit))


class CacheTruth:
    """Computes the right content of KV blocks by block hash, and checks cached blocks."""

    def __init__(self, scheduler: Scheduler, worker: DigestWorker) -> None:
        self._kv = scheduler.kv
        self._worker = worker
        self._chains = Chains(Sha256Hasher(), scheduler.kv.block_size)
        self._digests: dict[bytes, list[int]] = {}  # by block hash: of each position
        self._states: dict[bytes, int] = {}  # by block hash: state after the block
        self._tails: dict[bytes, list[int]] = {}  # by key of a tail

    def learn(self, req: Request, extras: dict[int, int]) -> None:
        """Compute what the full KV blocks of an ended request, and tails that it may have had, must
        contain. ``extras``: numbers, by position, that salt, adapter and media add to the token
        ids."""
        digest, state, size = EMPTY_DIGEST, ZERO_STATE, self._kv.block_size
        chain: list[bytes] = []
        digests: list[int] = []
        self._chains.extend(chain, req, len(req.tokens))
        hashes = iter(chain)
        for position, token in enumerate(req.tokens):
            digest = mix(digest, token + extras.get(position, 0))
            state = mix(state, token + extras.get(position, 0))
            digests.append(digest)
            if (position + 1) % size == 0:
                block_hash = next(hashes)
                self._digests[block_hash], self._states[block_hash] = digests, state
                digests = []
            elif req.history.num_preempted:
                keys = tail_keys(self._chains, chain, req, position + 1, self._kv.num_groups)
                self._tails |= dict.fromkeys(keys, digests[:])

    def check(self) -> None:
        """Check the content of every cached KV block."""
        cache, kv = self._kv.cache, self._worker.kv
        for block in range(1, self._kv.num_blocks):
            key = cache.hash_of(block)
            if key is None or key.startswith(MARK):  # reserved: the snapshot's step never ended
                continue
            right = self._right(key)
            assert kv[block][: len(right)] == right, f"block {block} holds wrong content"

    def check_stored(self, stored: Iterable[tuple[bytes, list[int]]]) -> None:
        """Check the content of blocks that stores outside the pool were given."""
        for key, digests in stored:
            right = self._right(key)
            assert digests[: len(right)] == right, f"wrong content was stored under {key.hex()}"

    def _right(self, key: bytes) -> list[int]:
        """What a block with this key must hold, in its first positions if it is a tail."""
        if key in self._tails:
            return self._tails[key]
        block_hash, mark, index = key.rpartition(MARK)
        if not mark:
            block_hash = split_key(key)[0]
        assert block_hash in self._digests, f"{key.hex()} is the key of no known content"
        if not mark:
            return self._digests[block_hash]
        state = self._states[block_hash] ^ int.from_bytes(index, "little")
        return [state] * self._kv.block_size


def check_wishes(scheduler: Scheduler, plan: StepPlan) -> None:
    """Check that a pause is obeyed, and that no request outlives a deadline."""
    if scheduler.pause_state is PauseState.PAUSED_ALL:
        assert not plan.num_tokens, "tokens are computed in a pause"
    if scheduler.pause_state is not PauseState.UNPAUSED:
        assert not scheduler.view.step.new, "a request starts in a pause"
    now = scheduler.view.now
    for req in scheduler.roster.by_id.values():
        end, start = req.add.end_deadline, req.add.queue_deadline
        assert end is None or end > now, f"{req} has outlived its deadline {end} at {now}"
        has_started = req.history.scheduled_time is not None
        assert start is None or has_started or start > now, f"{req} should have started by {start}"


def check_order(scheduler: Scheduler) -> None:
    """Check that no request started while a better-ranked request waited, unless that request was
    refused or preempted in this step [19]."""
    step = scheduler.view.step
    if not step.new or scheduler.guard.overrides("order", "next_waiting"):
        return
    worst = max(map(by_rank, step.new))
    excused = {id(req) for req in step.preempted} | {id(req) for req, _ in step.refused}
    for req in scheduler.roster.waiting:
        if not by_rank(req) < worst:
            return
        assert id(req) in excused, f"{req} was overtaken by {step.new}"


def check_stats(scheduler: Scheduler, num_tokens: int, num_steps: int) -> None:
    """Check the scheduler's statistics after all requests have ended. ``num_tokens`` and
    ``num_steps``: the expected counts of tokens and of steps with tokens."""
    stats = scheduler.make_stats()
    assert stats.num_scheduled_tokens == num_tokens, f"{stats.num_scheduled_tokens} tokens counted"
    assert stats.num_steps == num_steps, f"{stats.num_steps} steps counted, there were {num_steps}"
    gauges = (stats.num_running, stats.num_waiting, stats.num_parked, stats.kv_usage)
    assert not any(gauges), f"requests are left in the statistics: {gauges}"
    assert stats.prefix_hits <= stats.prefix_queries, "there are more hits than queries"
    assert stats.preempted_hits <= stats.preempted_queries, "there are more hits than queries"


def check_mirror(scheduler: Scheduler, worker: DigestWorker) -> None:
    """Check that the worker has the scheduler's running requests and their block tables."""
    kv, seqs = scheduler.kv, worker.seqs
    running = scheduler.roster.running
    assert len(seqs) == len(running), f"the worker has {list(seqs)}, but {list(running)} run"
    for req in running:
        seq = seqs.get(req.slot)
        assert seq is not None, f"the worker has no sequence for {req}"
        for group, table in enumerate(seq.tables):
            held = kv.held(req, group)
            assert table == held, f"{req} holds {held}, the worker has {table}"


def check_faults(scheduler: Scheduler) -> None:
    """Check that policy and resources gave no invalid answer."""
    messages = scheduler.guard.faults.messages
    assert not messages, f"faults of plug-ins: {messages}"


def find_leak(root: object) -> str | None:
    """Search everything reachable from ``root``, a scheduler without requests, for a request;
    returns the path to it, or ``None``."""
    seen: set[int] = set()
    todo: list[tuple[str, object]] = [(type(root).__name__, root)]
    while todo:
        path, value = todo.pop()
        if isinstance(value, Request):
            return path
        if id(value) in seen or isinstance(value, _SIMPLE):
            continue
        seen.add(id(value))
        todo += [(path + step, inner) for step, inner in _inside(value)]
    return None


_BOUNDED = ("_members", "step")  # attributes that refer to the last step only
_SIMPLE = (str, bytes, int, float, type, type(None), np.ndarray, Need)


def _inside(value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"[{key!r}]", key
            yield f"[{key!r}]", inner
    elif isinstance(value, list | tuple | set | frozenset) or type(value).__name__ == "deque":
        for index, inner in enumerate(value):
            yield f"[{index}]", inner
    elif type(value).__module__.startswith(("engine.", "policylab.")):
        for name, inner in vars(value).items() if hasattr(value, "__dict__") else ():
            if name not in _BOUNDED:
                yield f".{name}", inner
        for name in getattr(type(value), "__slots__", ()):
            yield f".{name}", getattr(value, name, None)

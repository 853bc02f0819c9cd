"""SimulatedCore: the engine's scheduler, KV manager and step loop on a virtual clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import Any

from engine.config.sched import SchedulerConfig
from engine.messages.requests import AddRequest
from engine.sched.interface import StepOutputs
from engine.sched.plugins.find import choose, make_scheduler
from engine.states.decide import StateSnapshots
from engine.states.policies import find_snapshot_policy
from engine.states.policy import SnapshotPolicy
from policylab.sim.adapters import SimulatedAdapters
from policylab.sim.engine import Engine
from policylab.sim.jumps.blocks import RepeatingKV
from policylab.sim.jumps.core import JumpingCore
from policylab.sim.named import call
from policylab.sim.tiers import SimulatedTiers
from policylab.sim.timing import timing
from policylab.sim.watched import Watched
from policylab.sim.worker import VirtualClock

IDLE_SECONDS = 0.005  # between two polls while all requests wait for a time
MakeTiers = Callable[[Callable[[], float]], SimulatedTiers]


class SimulatedCore:
    """An engine core of a simulation, with a clock of its own."""

    def __init__(
        self,
        config: SchedulerConfig,
        engine: Engine,
        *,
        seed: int,
        jumps: bool = False,
        keeps_steps: bool = False,
        make_tiers: MakeTiers | None = None,
    ) -> None:
        """jumps: whether repeating steps may be jumped over. make_tiers: makes the stores of KV
        blocks outside the pool, for a clock."""
        self.clock = VirtualClock()
        chosen = choose(config)
        self.kv = RepeatingKV(
            chosen.pool(engine.num_blocks),
            engine.block_size,
            enable_prefix_caching=engine.enable_prefix_caching,
            groups=engine.groups,
        )
        if engine.snapshot_blocks:
            self.kv.keep_states(engine.snapshot_blocks)
        if self.kv.states is not None:
            snapshots = StateSnapshots(snapshot_policy_of(engine))
            chosen = chosen._replace(resources=(*chosen.resources, snapshots))
        self.adapters = SimulatedAdapters(
            engine.max_loras, engine.max_cpu_loras, self.clock, engine.loads.read
        )
        chosen = chosen._replace(resources=(*chosen.resources, self.adapters.slots))
        self._tiers = None if make_tiers is None else make_tiers(self.clock)
        if self._tiers is not None:
            chosen = chosen._replace(resources=(*chosen.resources, self._tiers.resource))
        self.policy_class = type(chosen.policy)
        scheduler = make_scheduler(
            config, self.kv, clock=self.clock, timer=time.perf_counter, seed=seed, chosen=chosen
        )
        self.lengths: dict[str, int] = {}
        """Output tokens of each unfinished request."""
        self._timing = timing(engine.cost, seed if engine.noise_seed is None else engine.noise_seed)
        worker = (self.clock, self._timing, engine.max_num_seqs, self.lengths)
        self.worker = Watched(*worker, kv=self.kv, keeps_steps=keeps_steps)
        self.worker.copy_seconds = engine.loads.copy
        self.worker.tiers = self._tiers
        self.core = JumpingCore(scheduler, self.worker, engine.depth, clock=self.clock, jumps=jumps)
        self.scheduler = scheduler

    def add(self, request: AddRequest, num_output: int) -> None:
        """Add a request that ends after this many output tokens, which takes some time. Raises
        ``RequestError``."""
        self.clock.now += self._timing.add_seconds(len(request.prompt_token_ids))
        self.scheduler.add_request(self.adapters.named(request))
        self.lengths[request.request_id] = num_output

    def call(self, name: str, *args: Any) -> None:
        """Call a method of the resource for KV tiers, as clients do by name."""
        assert self._tiers is not None
        self._tiers.resource.methods[name](*args)

    def step(self, until: float = inf) -> StepOutputs:
        """Take a step, or jump over steps that begin before ``until``. The clock then shows when
        the next one begins; without anything to compute it does not move. ``end_step`` must be
        called next."""
        if self._tiers is not None:
            for report in self._tiers.take_reports():
                self.scheduler.transferred(report)
        return self.core.step(until)

    def end_step(self) -> None:
        """Let the time of the host's work between two steps pass."""
        self.worker.rest()

    @property
    def next_time(self) -> float:
        """When there may be something to compute after a step that had nothing, in seconds on the
        clock; infinity if a request must come first."""
        until = self.adapters.reader.next_time
        if self._tiers is not None:
            until = min(until, self._tiers.next_time)
        if self.scheduler.has_unfinished_requests():
            until = min(until, self.clock.now + IDLE_SECONDS)
        return until


def snapshot_policy_of(engine: Engine) -> SnapshotPolicy:
    """Create the snapshot policy of an engine. Raises ``ConfigError``."""
    policy = engine.snapshot_policy
    if not isinstance(policy, str):
        return find_snapshot_policy(policy)
    name, options = call(policy, "--snapshot-policy", "marconi(alpha=0.5)")
    return find_snapshot_policy(name, options)

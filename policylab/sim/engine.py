"""Engine: the sizes and options of a simulated engine, and what its scheduler gets of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from typing import Any, NamedTuple

from engine.config.cache import CacheConfig
from engine.config.check import check_kind, check_range
from engine.config.core import CoreConfig
from engine.config.kv_groups import FULL, Group, longest_request, sized
from engine.config.sched import SchedulerConfig
from engine.errors import ConfigError
from engine.sched.plugins.find import find_policy
from engine.sched.predict.profile import AdapterCost, Profile
from policylab.sim.kv_groups import size_of
from policylab.sim.tiers import LINK, Tier, described
from policylab.sim.worker import StepCost, parameters_of
from policylab.sim.workloads import Workload

CORES = ("data_parallel_size", "prefill_cores", "decode_cores", "prefill_threshold")


class PolicyVariant(NamedTuple):
    """A policy with arguments for its constructor."""

    policy: Any
    options: dict[str, Any]

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{name_of(self.policy)}({options})"


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The sizes and options of the simulated engine."""

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    num_blocks: int = 700
    block_size: int = 16
    depth: int = 1
    length_predictor: Any = "none"
    enable_prefix_caching: bool = True
    kv_groups: tuple[Group, ...] = (FULL,)
    """Groups of the model's layers by sliding window; all take their blocks from one pool."""
    snapshot_blocks: int = 0
    """Blocks of a snapshot of the model's recurrent states; 0: it has no states. With states, steps
    are never jumped over, and each run is repeated without them for comparison."""
    snapshot_policy: Any = "cost"
    """Which of these snapshots are taken and stay: as ``state_snapshot_policy`` of an engine, or a
    name with options, as in "marconi(alpha=0.5)"."""
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    """Further options of ``SchedulerConfig``."""
    cost: StepCost | Profile = field(default_factory=StepCost)
    """The model of step times."""
    max_loras: int = 8
    """Different LoRA adapters among the running requests."""
    max_cpu_loras: int | None = None
    """Adapters in the host's memory; ``None``: all that were ever used."""
    adapter_cost: AdapterCost | None = None
    """How long it takes to load an adapter; ``None``: as the profile says, or the engine's guess. A
    step takes longer by the time to copy the adapters that it loads into slots."""
    kv_tiers: tuple[Tier, ...] = ()
    """Stores of KV blocks outside the pool, the fastest first. With any, steps are never jumped
    over."""
    data_parallel_size: int = 1
    """Cores that share the requests, each as described here. Their steps are never jumped over."""
    prefill_cores: int = 0
    """Cores that compute only long prompts, for ``decode_cores``."""
    decode_cores: int = 0
    """Cores that compute short prompts and all outputs, next to ``prefill_cores``."""
    prefill_threshold: int = CoreConfig.prefill_threshold
    """Prompts go to prefill cores if a decode core lacks at least this many of their tokens."""
    kv_link: Tier = LINK
    """What prefill cores store, and the link over which decode cores load it, one transfer after
    another."""
    stretches: bool = True
    """Jump over repeating steps, which gives the same run, bit by bit, in less time."""
    noise_seed: int | None = None
    """Seed of the noise of step times, if ``cost`` has any; default: the seed of the run."""
    max_idle_looks: int = 200_000
    """The run fails if the engine was polled this many times (every 5 ms) without computing
    anything."""

    def __post_init__(self) -> None:
        if not (isinstance(self.depth, int) and self.depth >= 1):
            raise ConfigError(f"depth is {self.depth!r}, must be 1 or more steps in flight")
        check_kind("snapshot_blocks", self.snapshot_blocks, (int,))
        check_range(self, 0, self.num_blocks - 1, "snapshot_blocks")
        for name in ("max_loras", "max_cpu_loras"):
            if (value := getattr(self, name)) is not None:
                check_kind(name, value, (int,))
                check_range(self, 1, None, name)
        counts = [getattr(self, name) for name in CORES]
        if counts != [getattr(Engine, name) for name in CORES]:
            CoreConfig(multiprocess=True, **dict(zip(CORES, counts, strict=True)))
        if self.prefill_cores and not self.enable_prefix_caching:
            raise ConfigError(
                f"prefill_cores is {self.prefill_cores}, but enable_prefix_caching is False: "
                "decode cores find the KV of prompts by the prefix cache"
            )

    @property
    def num_cores(self) -> int:
        """The number of cores."""
        return self.prefill_cores + self.decode_cores or self.data_parallel_size

    @property
    def loads(self) -> AdapterCost:
        """How long it takes to load an adapter."""
        if self.adapter_cost is not None:
            return self.adapter_cost
        return self.cost.adapters if isinstance(self.cost, Profile) else AdapterCost()

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups with the most blocks that a request holds in each."""
        return sized(self.kv_groups, self.max_num_batched_tokens, self.block_size)

    @property
    def longest_request(self) -> float:
        """Tokens of the longest request that the KV pool can hold."""
        longest = longest_request(self.num_blocks - 1, self.groups, self.block_size)
        return inf if longest is None else longest


def name_of(policy: Any) -> str:
    """The name of a policy as shown in tables."""
    if isinstance(policy, str | PolicyVariant):
        return str(policy)
    return policy.__name__ if isinstance(policy, type) else type(policy).__name__


def scheduler_config(policy: Any, workload: Workload, engine: Engine) -> SchedulerConfig:
    """The scheduler options for a run of the workload with this policy. Raises ``ConfigError`` for
    invalid options."""
    policy, options = policy if isinstance(policy, PolicyVariant) else (policy, {})
    CacheConfig(block_size=engine.block_size, num_kv_blocks=engine.num_blocks)
    return SchedulerConfig(
        **{
            "max_num_batched_tokens": engine.max_num_batched_tokens,
            "max_num_seqs": engine.max_num_seqs,
            "max_model_len": workload.max_model_len,
            "scheduling_policy": policy,
            "policy_options": options,
            "length_predictor": engine.length_predictor,
            "user_weights": weights_for(policy, options, workload),
            **engine.scheduler,
        }
    )


def weights_for(policy: Any, options: dict[str, Any], workload: Workload) -> dict[str, float]:
    """The weight of each user of the workload if the policy uses weights; otherwise empty."""
    weights = workload.user_weights
    return weights if weights and find_policy(policy, options).uses_ledger else {}


def described_engine(engine: Engine) -> dict[str, Any]:
    """The engine's options and step cost in the head of a run."""
    others = ["cost", "stretches", "kv_groups", "kv_tiers", "kv_link"]
    if engine.num_cores == 1:
        others += CORES
    options = {
        each.name: getattr(engine, each.name) for each in fields(engine) if each.name not in others
    }
    return {
        "engine": options
        | {"kv_groups": list(map(size_of, engine.kv_groups))}
        | ({"kv_tiers": described(engine.kv_tiers)} if engine.kv_tiers else {})
        | ({"kv_link": vars(engine.kv_link)} if engine.prefill_cores else {}),
        "cost": str(engine.cost),
        "step_cost": parameters_of(engine.cost),
    }

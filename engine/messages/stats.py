"""SchedulerStats: the statistics of a scheduler."""

from __future__ import annotations

import msgspec

SNAPSHOTS_PUBLISHED = "snapshots.published"  # a counter of the feature that takes snapshots


class GroupUse(msgspec.Struct, array_like=True, frozen=True):
    """The KV blocks in use in one group of layers. ``window``: the group's sliding window in
    tokens, 0 for full attention; the size of chunks if ``is_chunked``."""

    window: int
    num_blocks: int
    is_chunked: bool = False

    @property
    def attention(self) -> str:
        """Kind of attention, as in a model's ``layer_types``: full, sliding or chunked."""
        return "chunked" if self.is_chunked else "sliding" if self.window else "full"


class AdapterUse(msgspec.Struct, array_like=True, frozen=True):
    """The LoRA adapters in use. ``running``, ``waiting``: numbers of requests, by adapter name."""

    num_slots: int
    num_slots_used: int  # slots of the device that have an adapter
    num_host_copies: int  # adapters in the host's memory
    host_bytes: int
    running: dict[str, int] = {}
    waiting: dict[str, int] = {}


class StoreUse(msgspec.Struct, array_like=True, frozen=True):
    """A store of KV blocks outside the pool. ``num_cores``: that use it at present; a core leaves a
    store out after several failures. ``is_common``: all cores count the same blocks."""

    num_blocks: int
    num_bytes: int
    num_cores: int = 1
    is_common: bool = False


class RankUse(msgspec.Struct, array_like=True, frozen=True):
    """What a rank of core ``core`` has spent the time of its steps with since its start."""

    core: int
    rank: int
    step_seconds: float  # in steps
    wait_seconds: float  # of these, waiting for other ranks in operations that all do together
    stage_wait_seconds: float = 0.0  # waiting for hidden states of another stage of a pipeline


class SchedulerStats(msgspec.Struct, array_like=True, gc=False):
    """Current gauges, and counters since the start."""

    num_running: int
    num_waiting: int
    num_parked: int
    kv_usage: float  # 0 to 1
    prefix_queries: int  # tokens looked up at first admission
    prefix_hits: int  # of these, tokens found in the prefix cache
    num_preemptions: int
    num_failed: int  # requests that ended with an error
    num_steps: int  # steps that computed tokens
    num_scheduled_tokens: int
    preempted_queries: int = 0  # tokens looked up when preempted requests were admitted again
    preempted_hits: int = 0
    num_refused: int = 0  # requests refused by the policy or because the queue was full
    num_expired: int = 0  # requests ended at a deadline
    num_rescued_steps: int = 0  # steps in which the default order replaced the policy's
    num_policy_faults: int = 0
    wait_seconds: dict[str, float] = {}  # by cause, of requests that have ended
    hook_seconds: dict[str, float] = {}  # time in the hooks of policy and resources, by hook
    blocked: str = ""  # first request of a queue that makes no progress, and why
    num_cache_resets: int = 0  # times the prefix cache was emptied on request
    counters: dict[str, int] = {}  # of features, e.g. "drafts.num_accepted_tokens"
    step_seconds: float = 0.0  # duration of the steps that floor_seconds covers
    floor_seconds: float = 0.0  # least time these steps need, by the roofline model
    by_default: str = ""  # first case in which a default replaced a plug-in's result, and why
    prefix_missed: dict[str, int] = {}  # prompt tokens by reason why they were not in the cache
    kv_groups: list[GroupUse] = []  # of each group of layers; their blocks come from one pool
    num_snapshots: int = 0  # cached copies of recurrent states
    snapshot_usage: float = 0.0  # share of the KV blocks that hold these copies, 0 to 1
    adapters: AdapterUse | None = None  # ``None`` if the core takes no adapters
    waiting_by_cause: dict[str, int] = {}  # waiting and parked requests, by why they wait now
    stores: dict[str, StoreUse] = {}  # of KV blocks outside the pool, by name
    ranks: list[RankUse] = []  # of cores whose model several ranks compute

    @property
    def has_snapshots(self) -> bool:
        """True if snapshots of recurrent states are taken: the model has states, and prefixes are
        cached."""
        return SNAPSHOTS_PUBLISHED in self.counters

"""KV cache options."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from engine.config.check import check_range, check_types
from engine.config.option import EXAMPLE
from engine.errors import ConfigError

EVENTS_ENDPOINT = re.compile(r"ipc://.+|tcp://.+:([0-9]{1,5})")
MAX_EVENTS_PORT = 65534
MAX_EVENTS_STEPS = 10**9
MAX_BLOCKS = 2**24  # their free list alone takes half a GiB
TIERS = ("kv_offloading_size", "kv_offload_dir", "kv_transfer_config")  # options of KV stores
LEAST_GIB, MOST_GIB = 0.001, 2.0**20  # of KV blocks outside the pool
DEFAULT_GIB = 1.0  # of KV blocks that cores share or serve, if kv_offloading_size does not say
PEERS = "peers"  # value of kv_connector: engines serve their blocks to each other


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The KV cache: size, type, prefix sharing."""

    block_size: int | None = None
    """Tokens in a KV block. Default: 64 on a GPU, 16 on a CPU."""
    num_kv_blocks: int | None = None
    """Blocks in the KV pool. Default: enough for max_num_seqs requests of max_model_len, or as many
    as fit into kv_cache_memory_bytes or the share of memory for the pool."""
    kv_cache_dtype: Literal[
        "auto", "bfloat16", "fp8", "fp8_e4m3", "int8_per_token_head", "int8"
    ] = "auto"
    """Type of keys and values. auto: the type of activations; bfloat16: half of float32's bytes;
    fp8 (e4m3; CPUs and GPUs of compute capability 9.0 or more): half of a 16-bit type's bytes, with
    less exact outputs; int8_per_token_head, or int8 (CPUs): integers and a scale for each token and
    head, more exact than fp8."""
    mamba_ssm_cache_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the state matrices of Mamba layers and gated delta rules. auto: as config.json says,
    else float32. 16 bits halve the memory of states and snapshots, but round states after each
    token: in tiny models the mean KL divergence from float32 is up to 2e-6 (float16, numbers up to
    65,504) or 2e-3 (bfloat16)."""
    kv_cache_memory_bytes: int | None = None
    """Size of the KV pool in bytes, if num_kv_blocks is not given."""
    memory_utilization: float = 0.5
    """Share of free memory for the KV pool (CPU only)."""
    enable_prefix_caching: bool = True
    """Reuse the KV of prompts that begin with the same tokens."""
    prefix_caching_hash_algo: Literal["sha256", "fast"] = "sha256"
    """Hash of cached blocks. fast takes a third of the time, and is secure while its seed is
    secret."""
    state_snapshot_interval: int | None = None
    """Tokens between further snapshots of the states of a model with recurrent layers, a multiple
    of block_size. Default: snapshots only where prompts, outputs and cached prefixes end."""
    state_snapshot_policy: Any = "cost"
    """Which snapshots of these states are taken and which are dropped: cost, marconi, interval, or
    a SnapshotPolicy class, its dotted path or an instance."""
    kv_offloading_size: float | None = None
    """GiB of the host's memory for copies of KV blocks, which stay when the pool needs room for
    others. The cores of one machine share it. Memory is taken when it is first used, with a GPU
    soon after the start."""
    kv_offload_dir: str | Path | None = None
    """Directory for copies of KV blocks, which later engines with the same model use, too. Only
    this user can read its files."""
    kv_offload_dir_gib: float = 16.0
    """Most GiB of files in kv_offload_dir; the oldest blocks are dropped."""
    kv_transfer_config: dict[str, Any] | None = field(
        default=None, metadata={EXAMPLE: {"kv_connector": "pkg.Store"}}
    )
    """A further place for copies of KV blocks. kv_connector: peers (other engines, at the TCP
    address kv_ip and kv_port), an installed BlockStore's name, a class or its dotted path, or a
    function that makes one; kv_connector_extra_config: its options; kv_role: kv_both, kv_producer
    (it is only written) or kv_consumer (only read); kv_load_failure_policy: after a load that
    fails, requests compute their tokens (recompute, the default) or end with code
    kv_transfer_failed (fail)."""
    enable_kv_events: bool = False
    """Publish over ZeroMQ which blocks the prefix cache stores and evicts."""
    kv_events_endpoint: str | None = None
    """Address of these events, ipc:// or tcp://. Default: a new socket file, whose path is logged.
    Of several cores the n-th uses the n-th port from there on, or -n at the end of the file. Past
    events are at the first port after these, or at -replay."""
    kv_events_topic: str = ""
    """Topic of these events, for subscribers that filter by it, such as kv@POD@MODEL."""
    kv_events_buffer_steps: int = 10_000
    """Batches of events kept for subscribers that connect late or miss some."""

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, 1, 1024, "block_size")
        check_range(self, 2, MAX_BLOCKS, "num_kv_blocks")
        check_range(self, 1, None, "kv_cache_memory_bytes", "state_snapshot_interval")
        check_range(self, 1, MAX_EVENTS_STEPS, "kv_events_buffer_steps")
        if not 0.0 < self.memory_utilization <= 1.0:
            raise ConfigError(f"memory_utilization is {self.memory_utilization}, must be in (0, 1]")
        if self.state_snapshot_policy is None:
            raise ConfigError("state_snapshot_policy is None, must name a policy, e.g. 'cost'")
        self._check_events()
        self._check_tiers()

    def _check_events(self) -> None:
        endpoint = self.kv_events_endpoint
        found = EVENTS_ENDPOINT.fullmatch("ipc://any" if endpoint is None else endpoint)
        if found is None or not 0 < int(found[1] or 1) <= MAX_EVENTS_PORT:
            raise ConfigError(
                f"kv_events_endpoint is {endpoint!r}, must be ipc://PATH or tcp://HOST:PORT with a "
                f"port in 1..{MAX_EVENTS_PORT} (the next port replays past events)"
            )
        if self.enable_kv_events and not self.enable_prefix_caching:
            raise ConfigError(
                "enable_kv_events is True and enable_prefix_caching is False: without the cache "
                "there are no events; set both or neither"
            )

    @property
    def has_tiers(self) -> bool:
        """True if copies of KV blocks are kept outside the pool."""
        return any(getattr(self, name) is not None for name in TIERS)

    @property
    def serves_blocks(self) -> bool:
        """True if engines on other hosts may read this one's KV blocks."""
        options = self.kv_transfer_config or {}
        return options.get("kv_connector") == PEERS and options.get("kv_role") != "kv_consumer"

    def _check_tiers(self) -> None:
        check_range(self, LEAST_GIB, MOST_GIB, "kv_offloading_size", "kv_offload_dir_gib")
        for name in TIERS:
            if (value := getattr(self, name)) is None:
                continue
            what = f"{name} is {value!r:.80}, but"
            if not self.enable_prefix_caching:
                raise ConfigError(
                    f"{what} enable_prefix_caching is False: blocks are found again by the prefix "
                    f"cache; leave enable_prefix_caching on, or leave {name} out"
                )
            if self.prefix_caching_hash_algo != "sha256":
                raise ConfigError(
                    f"{what} prefix_caching_hash_algo is {self.prefix_caching_hash_algo!r}, whose "
                    "hashes differ between processes; set prefix_caching_hash_algo='sha256', or "
                    f"leave {name} out"
                )


def share_of_cache(cache: CacheConfig, num_cores: int) -> CacheConfig:
    """The options of each of ``num_cores`` cores on one machine, with an equal share of memory."""
    size = cache.kv_offloading_size
    return replace(
        cache,
        memory_utilization=cache.memory_utilization / num_cores,
        kv_offloading_size=None if size is None else max(LEAST_GIB, size / num_cores),
    )

"""Opens the stores of KV blocks that the options name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from engine.config.cache import PEERS
from engine.config.decide import ModelFacts
from engine.config.engine import EngineConfig, ResolvedConfig, with_shared_blocks
from engine.config.model import ModelConfig
from engine.errors import ConfigError
from engine.kv_transfer.disk import open_disk_store
from engine.kv_transfer.host import open_core_store
from engine.kv_transfer.peers.connector import NUM_THREADS, PeerConnector
from engine.kv_transfer.peers.options import ROLES, PeerOptions, peer_options
from engine.kv_transfer.stores import BlockStore, StoreIdentity
from engine.kv_transfer.tiers import FailurePolicy
from engine.sched.plugins.find import find_named

STORES_GROUP = "metronome.kv_stores"
GIB = 1 << 30
NAMESPACE_VERSION = 1
SAMPLED_PLACES = 256  # of a file of weights
SAMPLED_BYTES = 4096
READ_BYTES = 1 << 20  # at once, of files that are read whole
NUM_READERS = 4  # of such files at a time
WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt")
WITHOUT_EFFECT = (  # options of the model on which the content of blocks does not depend
    *("model", "tokenizer", "hf_token", "download_dir", "generation_config", "seed", "revision"),
    *("tokenizer_revision", "skip_tokenizer_init", "override_generation_config"),
)
OF_TEXT = (  # beginnings of the names of files on which it does not depend
    *("tokenizer", "vocab", "merges", "generation_config", "special_tokens", "added_tokens"),
    "chat_template",
)
OF_VLLM = (  # connectors that its users may name
    *("NixlConnector", "MooncakeConnector", "P2pNcclConnector", "MoRIIOConnector"),
    *("LMCacheConnectorV1", "LMCacheMPConnector", "MultiConnector", "OffloadingConnector"),
)
HOST_SPEED, DISK_SPEED, OTHER_SPEED = 4e9, 1e9, 5e8  # bytes/s that are expected at first
KEYS = ("kv_connector", "kv_role", "kv_connector_extra_config", "kv_load_failure_policy")
PEER_KEYS = (*KEYS, "kv_ip", "kv_port", "engine_id")


class PlannedStore(NamedTuple):
    """A store to open. ``speed``: bytes per second that it is expected to supply."""

    name: str
    speed: float
    open: Callable[[StoreIdentity], BlockStore]
    role: str = "kv_both"
    paces_writes: bool = False
    num_threads: int = 1


class OpenStore(NamedTuple):
    """A store. ``reads``: blocks are loaded from it; ``writes``: blocks are stored there;
    ``paces_writes``: writing takes so much processor time that steps would take longer;
    ``num_threads``: loads from it at the same time; ``memory``: the bytes of the host's memory into
    which this process writes, if it keeps blocks there."""

    store: BlockStore
    reads: bool = True
    writes: bool = True
    paces_writes: bool = False
    num_threads: int = 1
    memory: NDArray[np.uint8] | None = None


class PlannedStores:
    """The stores that the options name, the fastest first. Raises ``ConfigError``."""

    def __init__(self, config: EngineConfig, rank: int = 0) -> None:
        """rank: of the worker that opens them; each rank keeps its own part of every block."""
        config = with_shared_blocks(config)  # a core without a launcher has its options as given
        cache, plans = config.cache, []
        options = cache.kv_transfer_config
        self._peers = _peer_connector(options or {}, config, rank)
        if cache.kv_offloading_size is not None:
            plans.append(PlannedStore("host", HOST_SPEED, partial(self._open_host, config)))
        if cache.kv_offload_dir is not None:
            open_disk = partial(_open_disk, str(cache.kv_offload_dir), cache.kv_offload_dir_gib)
            plans.append(PlannedStore("disk", DISK_SPEED, open_disk, paces_writes=True))
        self.failure_policy = _failure_policy(options or {})
        if self._peers is not None:
            if self._peers.options.receives:
                open_peers = self._peers.open
                plans.append(
                    PlannedStore(
                        PEERS, OTHER_SPEED, open_peers, "kv_consumer", num_threads=NUM_THREADS
                    )
                )
        elif options is not None and not (plans and set(options) == {"kv_load_failure_policy"}):
            plans.append(_connector(options))
        self._plans = plans
        self._memory: NDArray[np.uint8] | None = None  # of the store that was opened last
        self.own_bytes = int((cache.kv_offloading_size or 0.0) * GIB)
        """Bytes of the host's memory that the stores of this core take, in all its ranks."""
        self.rank = rank
        self.num_ranks = config.parallel.num_workers
        """Ranks that compute the model together."""
        self.gpu_share = config.gpu.gpu_memory_utilization
        """Share of a GPU's memory that this engine takes."""
        self.is_shared = config.num_cores > 1 or cache.serves_blocks
        """True if other cores or engines may use what this one stores in the host's memory."""

    @property
    def is_between_hosts(self) -> bool:
        """True if hosts with copies of the same files use each other's blocks."""
        return self._peers is not None

    @property
    def peer_options(self) -> PeerOptions | None:
        """Which engines compute prompts for each other; ``None`` without the connector between
        them."""
        return None if self._peers is None else self._peers.options

    def announce(self, host: str, port: int, keys: Sequence[bytes]) -> None:
        """Expect blocks of this rank at the engine whose rank 0 serves its own at this address."""
        if self._peers is not None:
            self._peers.announce(host, port + self.rank, keys)

    @property
    def speeds(self) -> list[float]:
        """Bytes per second that each store is expected to supply."""
        return [plan.speed for plan in self._plans]

    def open(self, namespace: str, block_bytes: int) -> list[OpenStore]:
        """Open the stores for blocks of this namespace and size. Raises ``ConfigError``."""
        identity = StoreIdentity(namespace, block_bytes, self.rank, self.num_ranks)
        opened: list[OpenStore] = []
        try:
            for plan in self._plans:
                reads, writes = plan.role != "kv_producer", plan.role != "kv_consumer"
                store = plan.open(identity)
                memory, self._memory = self._memory, None
                opened.append(
                    OpenStore(store, reads, writes, plan.paces_writes, plan.num_threads, memory)
                )
        except BaseException:
            for each in opened:
                each.store.close()
            raise
        return opened

    def _open_host(self, config: EngineConfig, identity: StoreIdentity) -> BlockStore:
        store = open_core_store(config, identity)
        self._memory = store.memory
        if self._peers is None or not self._peers.options.sends:
            return store
        try:
            return self._peers.serve(store, identity)
        except BaseException:
            store.close()
            raise


def namespace_of(
    config: ResolvedConfig,
    facts: ModelFacts,
    drafting: ModelConfig | None,
    *,
    by_content: bool = False,
) -> str:
    """Hex digest of all that the content of KV blocks depends on, apart from their tokens: model
    and weights, types, block size and layout, draft model. Engines with equal digests may use each
    other's blocks. by_content: copies of the same files have the same digest; they are all read."""
    models = [config.model] if drafting is None else [config.model, drafting]
    longest = config.scheduler.max_model_len
    about = {
        "version": [NAMESPACE_VERSION, version("metronome-engine")],
        "models": [_model(model, longest, by_content=by_content) for model in models],
        "cache": {
            "dtype": config.cache.kv_cache_dtype,
            "states": config.cache.mamba_ssm_cache_dtype,
            "hash": config.cache.prefix_caching_hash_algo,
        },
        "block_size": config.block_size,
        "block_bytes": facts.block_bytes,
        "groups": [(group.window, group.is_chunked) for group in facts.kv_groups],
        "snapshot_blocks": facts.snapshot_blocks,
        "pictures": config.media.mm_processor_kwargs,
        "device": config.device,
    }
    if (parallel := config.parallel).pipeline_parallel_size > 1:
        about["stages"] = [parallel.pipeline_parallel_size, parallel.pipeline_layer_split]
    text = json.dumps(about, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _model(model: ModelConfig, max_model_len: int, *, by_content: bool) -> dict[str, Any]:
    options = {name: value for name, value in asdict(model).items() if name not in WITHOUT_EFFECT}
    if model.load_format == "dummy":
        options["seed"] = model.seed
    path, digest_of = Path(model.model), content_digest if by_content else weights_digest
    longest = max_model_len if _depends_on_length(path) else None
    return {**options, "files": digest_of(path), "longest": longest}


def _depends_on_length(path: Path) -> bool:
    """True if the frequencies of rotary embeddings may depend on ``max_model_len``."""
    if not path.is_dir():
        return True
    text = (path / "config.json").read_text()
    return any(kind in text for kind in ("dynamic", "longrope", '"su"'))


def weights_digest(path: Path) -> str:
    """Digest of a model's configuration and code, and of samples of its weights, with the sizes and
    times of their files: a change of weights changes it, and copying them may."""
    digest = hashlib.sha256()
    for file in _files(path):
        if file.suffix in (".json", ".py"):
            digest.update(f"{file.name} {file.stat().st_size}".encode() + file.read_bytes())
        else:
            about = file.stat()
            digest.update(f"{file.name} {about.st_size} {about.st_mtime_ns}".encode())
            with file.open("rb") as stream:
                for place in range(SAMPLED_PLACES):
                    stream.seek(about.st_size * place // SAMPLED_PLACES)
                    digest.update(stream.read(SAMPLED_BYTES))
    return digest.hexdigest()


def content_digest(path: Path) -> str:
    """Digest of a model's configuration, code and weights. It reads all of their bytes, several
    files at a time."""
    digest, files = hashlib.sha256(), _files(path)
    with ThreadPoolExecutor(NUM_READERS) as readers:
        for file, content in zip(files, readers.map(_content, files), strict=True):
            digest.update(f"{file.name} {content}\n".encode())
    return digest.hexdigest()


def _content(file: Path) -> str:
    content, buffer = xxhash.xxh3_128(), bytearray(READ_BYTES)
    with file.open("rb", buffering=0) as stream:
        while num := stream.readinto(buffer):
            content.update(memoryview(buffer)[:num])
    return content.hexdigest()


def _files(path: Path) -> list[Path]:
    """The files of a model on which the content of KV blocks may depend."""
    if not path.is_dir():
        return [path]
    kinds = (".json", ".py", *WEIGHTS)
    return [
        file
        for file in sorted(path.iterdir())
        if file.is_file() and file.suffix in kinds and not file.name.startswith(OF_TEXT)
    ]


def _open_disk(directory: str, gib: float, identity: StoreIdentity) -> BlockStore:
    return open_disk_store(directory, int(gib * GIB), identity)


def _peer_connector(
    options: Mapping[str, Any], config: EngineConfig, rank: int
) -> PeerConnector | None:
    """The connector between engines, if the options name it. Raises ``ConfigError``."""
    if options.get("kv_connector") != PEERS:
        return None
    _check_options(options, PEER_KEYS)
    size = config.parallel.num_workers
    numbered = peer_options(options, config.core_index * size + rank, config.num_cores * size)
    return PeerConnector(numbered, config.core.core_secret)


def _connector(options: Mapping[str, Any]) -> PlannedStore:
    role, extra = _check_options(options, KEYS)
    if (name := options.get("kv_connector")) is None:
        raise ConfigError(
            "kv_transfer_config lacks kv_connector: give the name or the dotted path of a "
            "BlockStore class"
        )
    option = "kv_transfer_config: kv_connector"
    if name in OF_VLLM:
        raise ConfigError(
            f"{option} is {name!r}, which vLLM has: here {PEERS!r} lets engines on other hosts "
            "compute prompts, and kv_offloading_size and kv_offload_dir keep KV outside the pool"
        )
    make: Any = find_named(option, name, {}, STORES_GROUP)
    if not callable(make):
        raise ConfigError(
            f"{option} is {name!r:.80}, must be a BlockStore class or a function that makes one, "
            "or its name"
        )

    def open_connector(identity: StoreIdentity) -> BlockStore:
        try:
            store = make(identity, **extra)
        except ConfigError:
            raise
        except Exception as error:  # the connector's own code
            raise ConfigError(
                f"{option} {name!r:.80} cannot be opened: {type(error).__name__}: {error}"
            ) from error
        _check(store, option, name)
        opened: BlockStore = store
        return opened

    return PlannedStore(str(name), OTHER_SPEED, open_connector, role)


def _check_options(options: Mapping[str, Any], known: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Check the names of options and their values that all connectors have. Returns ``kv_role``
    and ``kv_connector_extra_config``. Raises ``ConfigError``."""
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ConfigError(
            f"kv_transfer_config has {', '.join(map(repr, unknown))}, which is not known; it takes "
            f"{', '.join(known)}"
        )
    role, extra = options.get("kv_role", "kv_both"), options.get("kv_connector_extra_config") or {}
    if role not in ROLES:
        raise ConfigError(
            f"kv_transfer_config: kv_role is {role!r:.80}, must be one of {', '.join(ROLES)}"
        )
    if not isinstance(extra, dict):
        raise ConfigError(
            f"kv_transfer_config: kv_connector_extra_config is {extra!r:.80}, must be a dict of "
            "options of the connector"
        )
    return role, extra


def _failure_policy(options: Mapping[str, Any]) -> FailurePolicy:
    policy = options.get("kv_load_failure_policy", "recompute")
    if policy not in ("recompute", "fail"):
        raise ConfigError(
            f"kv_transfer_config: kv_load_failure_policy is {policy!r:.80}, must be 'recompute' or "
            "'fail'"
        )
    return cast(FailurePolicy, policy)


def _check(store: object, option: str, name: object) -> None:
    methods = ("contains", "read", "write", "forget", "clear", "counts", "close")
    missing = [each for each in methods if not callable(getattr(store, each, None))]
    if missing or not isinstance(getattr(store, "name", None), str):
        what = ", ".join(missing) or "a name (a string)"
        raise ConfigError(f"{option} {name!r:.80} is no BlockStore: it lacks {what}")

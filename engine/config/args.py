"""The flat options of an engine, as users write them; names are vLLM's where they mean the same."""

from __future__ import annotations

import difflib
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from engine.assets import BOX_MODEL
from engine.config.cache import CacheConfig
from engine.config.check import check_types
from engine.config.cli import EXAMPLE
from engine.config.core import CoreConfig
from engine.config.dotted import load_logits_processor
from engine.config.engine import EngineConfig
from engine.config.env import core_secret, default_log_level, warn_of_typos
from engine.config.foreign import refusal
from engine.config.gpu import GPUConfig
from engine.config.model import ModelConfig, is_hub_name
from engine.config.polling import PollConfig, asked_decode_poll_timeout_ms
from engine.config.sched import SchedulerConfig
from engine.errors import ConfigError

# Whose options those are that are not the core's alone.
OF_BOTH = (
    *("model", "trust_remote_code", "seed", "log_level"),
    *("revision", "hf_token", "download_dir"),
)
OF_FRONT_ENDS = (
    *("tokenizer", "tokenizer_revision", "skip_tokenizer_init"),
    *("tokenizer_pool_size", "disable_log_stats"),
    *("multiprocess", "core_address", "core_hang_timeout"),
)
OF_STARTERS = ("data_parallel_size", "core_ready_timeout")  # of cores in processes of their own


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Options of an engine. ``create_config`` checks them and raises ``ConfigError``."""

    model: str | Path | None = None
    """Directory of the model (Hugging Face layout), or its name on a hub; the one in the box if not
    given."""
    tokenizer: str | Path | None = None
    """Directory of the tokenizer, or its name on a hub, if it is not the model's."""
    revision: str | None = None
    """Branch, tag or commit of a model given by name; its default branch if not given."""
    tokenizer_revision: str | None = None
    """Branch, tag or commit of the tokenizer; that of the model, unless tokenizer is given."""
    hf_token: str | bool | None = field(default=None, repr=False)
    """Token for gated and private models. If not given that of HF_TOKEN (which other users of the
    machine cannot see, as they can a command line) or of hf auth login; False (Python): none."""
    download_dir: str | Path | None = None
    """Cache that models are fetched to and found in; that of HF_HOME if not given."""
    skip_tokenizer_init: bool = False
    """Token ids in, token ids out: load no tokenizer."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type to compute in; auto is float32 on the CPU and the checkpoint's type on a GPU."""
    quantization: Literal["int8", "fp8"] | None = None
    """Quantise plain weights when they are loaded: int8, or fp8 on a GPU."""
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """dummy: seeded random weights from config.json alone."""
    trust_remote_code: bool = False
    """Let transformers run code that lies in the model directory."""
    seed: int = 0
    """Keys dummy weights and the noise of requests without a seed of their own."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; the model's own limit if not given."""
    max_num_seqs: int = 256
    """Requests that may run at once."""
    max_num_batched_tokens: int | None = None
    """Token budget of a step; 8192 if not given (with chunked prefill on a CPU 512, where larger
    steps gain nothing and hold up those who decode), or max_num_seqs if that is more."""
    block_size: int | None = None
    """Tokens per KV block; 64 on a GPU and 16 on a CPU if not given."""
    num_kv_blocks: int | None = None
    """Blocks in the KV pool; sized from free memory if not given."""
    kv_cache_dtype: Literal["auto", "bfloat16"] = "auto"
    """Type of keys and values; auto is the type computed in, bfloat16 halves float32's bytes."""
    kv_cache_memory_bytes: int | None = None
    """Size of the KV pool in bytes, if num_kv_blocks is not given."""
    memory_utilization: float = 0.5
    """Share of the free memory the KV pool may take when it is sized from it (CPU)."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory the engine may take; the KV pool gets what it leaves of that."""
    enable_prefix_caching: bool = True
    """Reuse the KV of prompts that begin alike."""
    prefix_caching_hash_algo: Literal["sha256", "fast"] = "sha256"
    """Hash of cached blocks; fast is 3 times as quick and secure while nobody knows the seed."""
    enable_kv_events: bool = False
    """Publish over ZeroMQ what is stored in the prefix cache and what is evicted."""
    kv_events_endpoint: str | None = None
    """Address to publish at, ipc:// or tcp://; a new socket file that is logged if not given."""
    kv_events_buffer_steps: int = 10_000
    """Batches of events that are remembered for listeners that come late or miss some."""
    enable_chunked_prefill: bool = True
    """Compute a long prompt in pieces beside decodes."""
    long_prefill_token_threshold: int = 0
    """Cap on one prompt's tokens in a step while others compete; 0 is no cap."""
    long_prefill_token_threshold_adaptive: bool = False
    """Raise that cap to an equal share of the step's tokens where it is below one."""
    watermark: float | None = None
    """Share of the KV blocks that a request leaves free as it starts beside others; judged by the
    measured time of steps if not given."""
    scheduling_policy: Any = "fcfs"
    """Name of a shipped policy, or a Policy class, its dotted path or an object of one."""
    scheduler_cls: Any = None
    """A SchedulerInterface class or its dotted path, in place of the shared mechanism."""
    policy_options: dict[str, Any] = field(
        default_factory=dict, metadata={EXAMPLE: {"default_deadline": 5.0}}
    )
    """Keyword arguments of the policy."""
    max_policy_faults: int = 3
    """Faults a policy or resource may make; with one more it is left out."""
    resources: list[Any] = field(default_factory=list)
    """Names, classes, dotted paths or objects of resources beside those the model needs."""
    speculative_config: dict[str, Any] | None = field(
        default=None, metadata={EXAMPLE: {"method": "ngram", "num_speculative_tokens": 4}}
    )
    """Guess tokens and verify them beside a request's own: method (ngram: what followed when the
    last tokens stood in its text before), num_speculative_tokens, prompt_lookup_min and
    prompt_lookup_max (5 if not given). Tokens are the same as without."""
    length_predictor: Any = "none"
    """How policies are told output lengths: none (max_tokens), history, oracle, or your own."""
    user_weights: dict[str, float] = field(
        default_factory=dict, metadata={EXAMPLE: {"ann": 2.0, "bob": 0.5}}
    )
    """Shares of users for fair policies; who is not named has 1.0."""
    max_waiting_requests: int | None = None
    """Requests that may wait; more are refused with an estimate of the wait. No bound if not
    given."""
    max_waiting_tokens: int | None = None
    """Prompt tokens that may wait in all; no bound if not given."""
    stalled_steps: int = 100
    """Steps without any progress after which the blocked head of the queue is named in the log."""
    step_log: str | Path | None = None
    """File to record every input and plan of the scheduler in, for metronome replay."""
    torch_profiler_dir: str | Path | None = None
    """Directory for the traces of start_profile and stop_profile, made if it is not there. The
    commands generate, chat and bench record what they do."""
    async_scheduling: bool | None = None
    """Plan the next step while one runs; if not given on with a GPU and off on a CPU, which has
    nothing to overlap with."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto is a CUDA GPU if there is one, else the CPU."""
    enforce_eager: bool = False
    """Launch every step call by call: no CUDA graphs."""
    cudagraph_capture_sizes: list[int] | None = None
    """Batch sizes decode steps are recorded for; 1, 2, 4, then every 8 and 16 up to max_num_seqs or
    512 if not given."""
    num_threads: int | None = None
    """Threads of CPU kernels; the cores this process may use if not given."""
    log_level: Literal["debug", "info", "warning", "error"] | None = None
    """How much the engine logs; METRONOME_LOG_LEVEL or info (commands: warning) if not given."""
    disable_log_stats: bool = False
    """Leave out the line of figures that is logged every few seconds while there is work."""
    logits_processors: list[Any] = field(default_factory=list)
    """Factories of custom logits processors, or their dotted paths, applied in this order."""
    multiprocess: bool = False
    """Run the core in a process of its own, which ends with this one."""
    data_parallel_size: int = 1
    """Cores that share the work, each in a process of its own with the whole model; a request goes
    where its prompt is cached, or where least is to be done."""
    core_address: str | None = None
    """Use the core that runs at this address, as metronome core printed it; give the model it has,
    for its tokenizer. Addresses of several cores, divided by commas, share the work."""
    core_ready_timeout: float = 600.0
    """Seconds the core's process may take to load the model."""
    core_hang_timeout: float = 300.0
    """Seconds one step may take; a core that needs longer is given up, and ended if it is ours."""
    drain_timeout: float = 30.0
    """Seconds for unfinished requests after a core's process got SIGTERM."""
    tokenizer_pool_size: int = 0
    """Processes that tokenise, and as many that detokenise; 0: this process does both."""
    decode_poll_timeout_ms: int | None = None
    """Milliseconds a core in a process of its own looks for messages between decode steps; if not
    given METRONOME_DECODE_POLL_TIMEOUT_MS, or 0, which does not wait."""
    idle_wait_ms: int = 1000
    """Longest sleep of such a core without work, in milliseconds; whatever arrives ends it."""

    @classmethod
    def from_options(cls, **options: Any) -> EngineArgs:
        """``EngineArgs(**options)``; an unknown option is named with the nearest known one."""
        known = [option.name for option in fields(cls)]
        for name in options:
            if name not in known:
                raise ConfigError(refusal(name) or _unknown_option(name, known))
        return cls(**options)

    def create_config(self) -> EngineConfig:
        """The checked configuration. Raises ``ConfigError`` naming value, limit and way out."""
        check_types(self)
        self._check_attached()
        warn_of_typos()
        return EngineConfig(
            model=self._model_config(),
            cache=self._cache_config(),
            scheduler=self._scheduler_config(),
            gpu=self._gpu_config(),
            device=self.device,
            async_scheduling=self.async_scheduling,
            num_threads=self.num_threads,
            log_level=default_log_level() if self.log_level is None else self.log_level,  # type: ignore[arg-type]
            disable_log_stats=self.disable_log_stats,
            step_log=None if self.step_log is None else str(self.step_log),
            torch_profiler_dir=_absolute("torch_profiler_dir", self.torch_profiler_dir),
            logits_processors=tuple(map(load_logits_processor, self.logits_processors)),
            core=self._core_config(),
            polling=PollConfig(
                decode_poll_timeout_ms=asked_decode_poll_timeout_ms(self.decode_poll_timeout_ms),
                idle_wait_ms=self.idle_wait_ms,
            ),
            tokenizer_pool_size=self.tokenizer_pool_size,
        )

    def _check_attached(self) -> None:
        """A core that runs already was given its options when it was started."""
        if self.core_address is None:
            return
        for option in fields(self):
            make, value = option.default_factory, getattr(self, option.name)
            default = option.default if make is MISSING else make()
            if option.name in (*OF_BOTH, *OF_FRONT_ENDS) or value == default:
                continue
            takes = "" if option.name in OF_STARTERS else "give it to metronome core, or "
            raise ConfigError(
                f"{option.name} is {value!r:.80}, but the core at {self.core_address} runs "
                f"already; {takes}leave it out"
            )

    def _core_config(self) -> CoreConfig:
        return CoreConfig(
            multiprocess=self.multiprocess,
            data_parallel_size=self.data_parallel_size,
            core_address=self.core_address,
            core_secret=core_secret(),
            core_ready_timeout=self.core_ready_timeout,
            core_hang_timeout=self.core_hang_timeout,
            drain_timeout=self.drain_timeout,
        )

    def _model_config(self) -> ModelConfig:
        return ModelConfig(
            model=str(BOX_MODEL) if self.model is None else _spelled(self.model),
            tokenizer=None if self.tokenizer is None else _spelled(self.tokenizer),
            revision=self.revision,
            tokenizer_revision=self.tokenizer_revision,
            hf_token=self.hf_token,
            download_dir=_absolute("download_dir", self.download_dir),
            skip_tokenizer_init=self.skip_tokenizer_init,
            dtype=self.dtype,
            quantization=self.quantization,
            load_format=self.load_format,
            max_model_len=self.max_model_len,
            trust_remote_code=self.trust_remote_code,
            seed=self.seed,
        )

    def _cache_config(self) -> CacheConfig:
        return CacheConfig(
            block_size=16 if self.block_size is None else self.block_size,
            num_kv_blocks=self.num_kv_blocks,
            kv_cache_dtype=self.kv_cache_dtype,
            enable_prefix_caching=self.enable_prefix_caching,
            prefix_caching_hash_algo=self.prefix_caching_hash_algo,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            memory_utilization=self.memory_utilization,
            enable_kv_events=self.enable_kv_events,
            kv_events_endpoint=self.kv_events_endpoint,
            kv_events_buffer_steps=self.kv_events_buffer_steps,
        )

    def _gpu_config(self) -> GPUConfig:
        sizes = self.cudagraph_capture_sizes
        return GPUConfig(
            gpu_memory_utilization=self.gpu_memory_utilization,
            enforce_eager=self.enforce_eager,
            cudagraph_capture_sizes=None if sizes is None else tuple(sizes),
            max_num_batched_tokens=self.max_num_batched_tokens,
            block_size=self.block_size,
        )

    def _scheduler_config(self) -> SchedulerConfig:
        budget = self.max_num_batched_tokens
        if budget is None:
            budget = max(512 if self.enable_chunked_prefill else 8192, self.max_num_seqs)
        return SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=self.max_num_seqs,
            # Unknown until the model is read: the least that passes every check stands in for it.
            max_model_len=self.max_model_len or max(1, self.long_prefill_token_threshold),
            enable_chunked_prefill=self.enable_chunked_prefill,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            long_prefill_token_threshold_adaptive=self.long_prefill_token_threshold_adaptive,
            watermark=self.watermark,
            scheduling_policy=self.scheduling_policy,
            scheduler_cls=self.scheduler_cls,
            num_steps_in_flight=2 if self.async_scheduling else 1,
            policy_options=dict(self.policy_options),
            max_policy_faults=self.max_policy_faults,
            resources=tuple(self.resources),
            speculative_config=(
                None if self.speculative_config is None else dict(self.speculative_config)
            ),
            length_predictor=self.length_predictor,
            user_weights=dict(self.user_weights),
            max_waiting_requests=self.max_waiting_requests,
            max_waiting_tokens=self.max_waiting_tokens,
            stalled_steps=self.stalled_steps,
        )


def _spelled(model: str | Path) -> str:
    """What was given as text. A ``Path`` is a place on this machine, never a name on a hub."""
    text = str(model)
    return f"./{text}" if isinstance(model, Path) and is_hub_name(text) else text


def _absolute(name: str, path: str | Path | None) -> str | None:
    """The path as a process with another current directory can use it."""
    if path is None:
        return None
    if not str(path):
        raise ConfigError(f"{name} is '', must be a path; leave it out if there is none")
    return str(Path(path).expanduser().absolute())


def _unknown_option(name: str, known: list[str]) -> str:
    ends = [option for option in known if option.endswith(f"_{name}")]  # as policy, predictor
    near = ends or difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "known are: " + ", ".join(known)
    return f"unknown option {name!r}; {hint}"

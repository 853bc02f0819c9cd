"""Options of the scheduler: as users set them, and with all defaults filled in."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any

from engine.config.check import check_kind, check_range, check_types
from engine.config.option import EXAMPLE
from engine.config.speculative import SpeculativeConfig
from engine.errors import ConfigError

INT32_MAX = 2**31 - 1  # plans have 32-bit columns
MAX_SEATS = 2**20


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """The scheduler: budgets, policy, drafts.

    An option that is ``None`` gets its value later, from model and device."""

    max_model_len: int | None = None
    """Longest prompt plus output, in tokens. Default: the model's limit."""
    max_num_seqs: int = 256
    """Most requests that run at the same time."""
    max_num_batched_tokens: int | None = None
    """Token budget of a step, at least max_num_seqs. Default: 8192; with chunked prefill on a CPU
    512, and for bfloat16 2048 with AMX and 1024 on processors like Zen 5. Larger steps gain little
    there and delay requests that decode."""
    enable_chunked_prefill: bool = True
    """Compute a long prompt in pieces, next to decodes."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in a step while other requests compete; 0: no cap."""
    long_prefill_token_threshold_adaptive: bool = False
    """Raise the threshold to the token budget per unfinished request, where that is more."""
    max_mixed_prefill_tokens: int | None = None
    """Most prompt tokens in a step with decodes; 0: no cap. If much more is waiting (twelve times
    as much; six times with AMX and on processors like Zen 5), the excess is computed too. Default:
    on a CPU with chunked prefill 48, for bfloat16 160 with AMX and 128 on processors like Zen 5;
    elsewhere, and with a policy that bounds or orders steps itself, 0."""
    watermark: float | None = None
    """Share of the KV blocks that must stay free when a request starts next to others. Default:
    decided from measured step times."""
    scheduling_policy: Any = "fcfs"
    """Name of a shipped policy, or a Policy class, its dotted path or an instance."""
    scheduler_cls: Any = None
    """SchedulerInterface class or its dotted path, which replaces the whole scheduler."""
    policy_options: dict[str, Any] = field(
        default_factory=dict, metadata={EXAMPLE: {"default_deadline": 5.0}}
    )
    """Keyword arguments of the policy."""
    cache_policy: Any = None
    """Which free KV blocks keep their content longest: lru, programs (those of a program during its
    tool calls), shares (no user more than a share), or a CachePolicy class, its dotted path or an
    instance. Default: lru, or the scheduling policy's own."""
    max_policy_faults: int = 3
    """Faults of a policy or resource that are tolerated; one more switches it off."""
    resources: list[Any] | tuple[Any, ...] = ()
    """Resources (limits and features of the scheduler, such as LoRA slots) beyond those the model
    needs: names, classes, dotted paths or instances."""
    speculative_config: dict[str, Any] | None = field(
        default=None, metadata={EXAMPLE: {"method": "ngram", "num_speculative_tokens": 4}}
    )
    """Draft tokens and verify them; the output stays the same. Keys: method,
    num_speculative_tokens, adaptive. ngram (drafts what followed the last tokens earlier in the
    text): prompt_lookup_min, prompt_lookup_max (5). suffix (what most often followed the longest
    matching suffix, in the text or earlier outputs): suffix_decoding_max_tree_depth (24, also the
    default number of drafts), suffix_decoding_max_cached_requests (10,000),
    suffix_decoding_max_spec_factor (1.0), suffix_decoding_min_token_prob (0.1). draft_model (what a
    smaller model predicts): model, revision, quantization. grammar (text that a structured output
    forces)."""
    length_predictor: Any = "none"
    """Source of output lengths for policies: none (max_tokens), history, oracle, or your own."""
    cost_profile: str | None = None
    """File of `metronome calibrate` that policies read as `view.cost`. Default: fitted to measured
    steps."""
    user_weights: dict[str, float] = field(
        default_factory=dict, metadata={EXAMPLE: {"ann": 2.0, "bob": 0.5}}
    )
    """Shares of users for fair policies; users without one have 1.0."""
    max_waiting_requests: int | None = None
    """Most requests in the queue; others are refused with an estimate of the wait. Default: no
    limit."""
    max_waiting_tokens: int | None = None
    """Most prompt tokens in the queue. Default: no limit."""
    stalled_steps: int = 100
    """Steps without progress after which the log names the blocked head of the queue."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.scheduling_policy is None:
            raise ConfigError(
                "scheduling_policy is None, must name a policy ('fcfs' is the default)"
            )
        check_range(self, 1, MAX_SEATS, "max_num_seqs")
        check_range(self, 0, INT32_MAX, "long_prefill_token_threshold", "max_mixed_prefill_tokens")
        check_range(self, 1, INT32_MAX, "max_model_len", "max_num_batched_tokens")
        check_range(self, 1, None, "max_waiting_requests", "max_waiting_tokens", "stalled_steps")
        check_range(self, 0, None, "max_policy_faults")
        if self.watermark is not None and not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark is {self.watermark}, must be at least 0 and below 1")
        self._check_budget()
        self._check_drafts()
        for user, weight in self.user_weights.items():
            check_kind("a key of user_weights", user, (str,))
            check_kind(f"user_weights[{user!r}]", weight, (float,))
            if not 0 < weight < inf:
                raise ConfigError(
                    f"user_weights[{user!r}] is {weight}, must be above 0 (1.0 is an equal share)"
                )

    def _check_budget(self) -> None:
        """Raise ``ConfigError`` if token budget, max_num_seqs and max_model_len contradict each
        other."""
        budget, longest = self.max_num_batched_tokens, self.max_model_len
        if budget is not None and budget < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({budget}) is below max_num_seqs "
                f"({self.max_num_seqs}): one step could not give every running request a token; "
                "raise the first or lower the second"
            )
        is_short = budget is not None and longest is not None and budget < longest
        if is_short and not self.enable_chunked_prefill:
            raise ConfigError(
                f"max_num_batched_tokens ({budget}) is below max_model_len "
                f"({longest}) and enable_chunked_prefill is False: long prompts could never run; "
                "raise the first or set enable_chunked_prefill"
            )
        if self.max_mixed_prefill_tokens and not self.enable_chunked_prefill:
            raise ConfigError(
                f"max_mixed_prefill_tokens is {self.max_mixed_prefill_tokens} and "
                "enable_chunked_prefill is False: prompts are not computed in pieces; leave one of "
                "them out"
            )
        if longest is not None and self.long_prefill_token_threshold > longest:
            raise ConfigError(
                f"long_prefill_token_threshold ({self.long_prefill_token_threshold}) is above "
                f"max_model_len ({longest}); lower it to that or less"
            )
        if self.long_prefill_token_threshold_adaptive and not self.long_prefill_token_threshold:
            raise ConfigError(
                "long_prefill_token_threshold_adaptive raises long_prefill_token_threshold, which "
                "is 0 (no cap); set that too, or neither"
            )

    def _check_drafts(self) -> None:
        if self.speculative_config is None:
            return
        num_drafts = SpeculativeConfig.of(self.speculative_config).num_speculative_tokens
        budget = self.max_num_batched_tokens
        if budget is not None and num_drafts >= budget:
            raise ConfigError(
                f"num_speculative_tokens is {num_drafts}: a decode needs {num_drafts + 1} tokens "
                f"per step, max_num_batched_tokens is {budget}; lower the first or raise the second"
            )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(SchedulerOptions):
    """The scheduler's options with all defaults filled in."""

    max_num_batched_tokens: int = 2048
    """Token budget of a step."""
    max_model_len: int = 2048
    """Longest prompt plus output, in tokens."""
    max_mixed_prefill_tokens: int = 0
    """Most prompt tokens in a step with decodes, unless much more is waiting; 0: no cap."""
    num_steps_in_flight: int = 1
    """Most steps in flight: 1 synchronous, 2 overlapped."""
    resources: tuple[Any, ...] = ()
    """Names, classes, dotted paths or instances of resources beyond those the model needs."""
    num_mixed_prefill_steps: int = 6
    """Steps over which waiting prompts are spread, ``max_mixed_prefill_tokens`` in each."""
    pipeline_parallel_size: int = 1
    """Stages of the model, each of which computes another step in flight. With several, a decode is
    in one step in flight, and decodes are spread evenly over as many steps as there are stages."""
    min_stage_chunk: int = 0
    """With several stages, each of which computes another chunk of a long prompt: tokens of its
    smallest chunks; 0: chunks are as large as steps allow."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, 1, None, "num_steps_in_flight", "num_mixed_prefill_steps")
        check_range(self, 1, None, "pipeline_parallel_size")
        check_range(self, 0, None, "min_stage_chunk")

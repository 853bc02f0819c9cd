"""Scheduler options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Budgets and policy of the scheduler."""

    max_num_batched_tokens: int = 2048
    """Token budget of a step."""
    max_num_seqs: int = 256
    """Requests that may run at once (seats)."""
    max_model_len: int = 2048
    """Longest prompt plus output, in tokens; decided from the model if not asked."""
    enable_chunked_prefill: bool = True
    """Compute a long prompt in pieces beside decodes."""
    long_prefill_token_threshold: int = 0
    """Cap on one prompt's tokens in a step while others compete; 0 is no cap."""
    scheduling_policy: Any = "fcfs"
    """Name of a shipped policy, or a Policy class, its dotted path or an object of one."""
    scheduler_cls: Any = None
    """A SchedulerInterface class or its dotted path, in place of the shared mechanism."""
    num_steps_in_flight: int = 1
    """Steps launched before the oldest is settled: 1 synchronous, 2 overlapped."""
    policy_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the policy."""

    def __post_init__(self) -> None:
        if self.scheduling_policy is None:
            raise ConfigError(
                "scheduling_policy is None, must name a policy ('fcfs' is the default)"
            )
        if self.max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs is {self.max_num_seqs}, must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs "
                f"({self.max_num_seqs}): one step could not give every running request a token; "
                "raise the first or lower the second"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_model_len "
                f"({self.max_model_len}) and chunked prefill is off: long prompts could never run"
            )
        if self.long_prefill_token_threshold > self.max_model_len:
            raise ConfigError(
                f"long_prefill_token_threshold ({self.long_prefill_token_threshold}) is above "
                f"max_model_len ({self.max_model_len})"
            )
        if self.long_prefill_token_threshold < 0:
            raise ConfigError("long_prefill_token_threshold must not be negative (0: no cap)")
        if self.num_steps_in_flight < 1:
            raise ConfigError(
                f"num_steps_in_flight is {self.num_steps_in_flight}, must be at least 1"
            )

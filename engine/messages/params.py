"""Sampling parameters of a request, as users write them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from engine.messages.validate import as_list, check_params

OutputKind = Literal["cumulative", "delta", "final"]
GREEDY_BELOW = 1e-5
NO_SEED = -1  # how some clients spell None


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How the next tokens of one request are chosen, when it stops and what it returns.

    Names and ranges are vLLM's. ``temperature=0`` is greedy; any other is taken as it is, however
    small. ``max_tokens=None`` means all that is left of ``max_model_len``. ``logprobs=k`` returns
    the k most likely tokens and the sampled one (-1: the whole vocabulary); ``prompt_logprobs``
    does so for prompt tokens from ``prompt_logprobs_start`` on. Log-probabilities are those of the
    model, before penalties and temperature. ``extra_args`` reaches policies and custom logits
    processors untouched. ``truncate_prompt_tokens=k`` keeps the last k tokens of a longer prompt
    (-1: as many as leave room for one output token).

    Raises ``RequestError`` (a ``ValueError``) that names field, value and range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: list[str] = []
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    detokenize: bool = True
    skip_special_tokens: bool = True
    output_kind: OutputKind = "cumulative"
    extra_args: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        self.stop = as_list(self.stop)
        self.stop_token_ids = as_list(self.stop_token_ids)
        self.bad_words = as_list(self.bad_words)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = as_list(self.allowed_token_ids)
        if self.seed == NO_SEED:
            self.seed = None
        check_params(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

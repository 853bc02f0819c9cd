"""SamplingParams: the sampling parameters of a request, and their checks."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import msgspec

from engine.errors import RequestError, RequestTypeError
from engine.messages.structured import StructuredOutputsParams

OutputKind = Literal["cumulative", "delta", "final"]
GREEDY_BELOW = 1e-5
NO_SEED = -1  # how some clients spell None


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How the tokens of a request are sampled, when it stops and what it returns, named as in vLLM.

    * ``temperature``: 0 is greedy.
    * ``max_tokens``: ``None`` is limited by ``max_model_len`` only.
    * ``logprobs``: number of most likely tokens to return with the sampled one (-1: the whole
      vocabulary), with the model's log-probabilities before penalties and temperature.
    * ``prompt_logprobs``: likewise, for prompt tokens from ``prompt_logprobs_start`` on.
    * ``truncate_prompt_tokens``: number of last prompt tokens to keep (-1: as many as fit).
    * ``extra_args``: values for policies and custom logits processors.

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
    structured_outputs: StructuredOutputsParams | None = None

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


MAX_LOGIT_BIAS = 100.0
OUTPUT_KINDS = ("cumulative", "delta", "final")
FLAGS = ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")


class ParamRange(NamedTuple):
    """The range of a numeric field. ``open_low``: the value must be greater than ``low``."""

    field: str
    low: float
    high: float
    hint: str = ""
    open_low: bool = False

    def holds(self, value: float) -> bool:
        return (self.low < value if self.open_low else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if math.isinf(self.high):
            limits = f"{'greater than' if self.open_low else 'at least'} {self.low:g}"
        else:
            limits = f"in {'(' if self.open_low else '['}{self.low:g}, {self.high:g}]"
        return f"{limits} ({self.hint})" if self.hint else limits


REAL_RANGES = (
    ParamRange("temperature", 0.0, 2.0, "0 is greedy"),
    ParamRange("top_p", 0.0, 1.0, "1 is off", open_low=True),
    ParamRange("min_p", 0.0, 1.0, "0 is off"),
    ParamRange("presence_penalty", -2.0, 2.0),
    ParamRange("frequency_penalty", -2.0, 2.0),
    ParamRange("repetition_penalty", 0.0, math.inf, "1 is off", open_low=True),
)
WHOLE_RANGES = (
    ParamRange("n", 1, math.inf),
    ParamRange("top_k", -1, math.inf, "0 and -1 are off"),
    ParamRange("min_tokens", 0, math.inf),
    ParamRange("prompt_logprobs_start", 0, math.inf),
)
OPTIONAL_WHOLE_RANGES = (
    ParamRange("max_tokens", 1, math.inf, "None is limited by max_model_len only"),
    ParamRange("seed", -(2**63), 2**63 - 1, "64 bits"),
    ParamRange("logprobs", -1, math.inf, "-1 is the whole vocabulary, None is off"),
    ParamRange("prompt_logprobs", -1, math.inf, "-1 is the whole vocabulary, None is off"),
    ParamRange("truncate_prompt_tokens", -1, math.inf, "-1 is all that fits, None is off"),
)


def check_params(params: SamplingParams) -> None:
    """Check all fields and combinations, except what depends on the vocabulary.

    Raises ``RequestError``, or its subclass ``RequestTypeError`` for a value of the wrong type.
    """
    for limits in REAL_RANGES:
        _check_real(limits, getattr(params, limits.field))
    for limits in WHOLE_RANGES:
        _check_whole(limits, getattr(params, limits.field))
    for limits in OPTIONAL_WHOLE_RANGES:
        value = getattr(params, limits.field)
        if value is not None:
            _check_whole(limits, value)
    _check_choices(params)
    _check_lists(params)
    _check_logit_bias(params.logit_bias)
    _check_extra_args(params.extra_args)
    _check_structured(params)
    _check_combinations(params)


def check_params_for_vocab(params: SamplingParams, vocab_size: int) -> None:
    """Check what depends on the vocabulary: token ids and the number of logprobs.

    Raises ``RequestError`` with field, value and the vocabulary's size.
    """
    for field in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        for token in getattr(params, field) or ():
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"{field} has token id {token}, must be in [0, {vocab_size - 1}]: "
                    f"the model's vocabulary has {vocab_size} tokens",
                    param=field,
                )
    for field in ("logprobs", "prompt_logprobs"):
        value = getattr(params, field)
        if value is not None and value > vocab_size:
            raise RequestError(
                f"{field} is {value}, must be at most {vocab_size}, the size of the model's "
                "vocabulary (-1 returns all of it)",
                param=field,
            )


def as_list(value: Any) -> Any:
    """Make a new list from a sequence, a single string or None (an empty list).

    Any other value is returned unchanged.
    """
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes):
        return list(value)
    return value


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refuse_type(field: str, value: object, wanted: str, what: str = "") -> NoReturn:
    """Raise ``RequestTypeError``: the field must have the type ``wanted``. what: words before the
    field's name in the message, e.g. "an entry of"."""
    raise RequestTypeError(
        f"{what} {field} is {value!r} ({type(value).__name__}), must be {wanted}".lstrip(),
        param=field,
    )


def _check_real(limits: ParamRange, value: Any, of: str = "") -> None:
    """Raise ``RequestError`` unless the value is a finite number within the limits. of: words after
    the field's name in the message, e.g. " of token 5"."""
    if type(value) not in (int, float):  # no bool, and no NumPy type, which msgpack cannot encode
        raise RequestTypeError(
            f"{limits.field}{of} is {value!r} ({type(value).__name__}), must be a Python number "
            f"{limits}",
            param=limits.field,
        )
    if not math.isfinite(value) or not limits.holds(value):
        raise RequestError(f"{limits.field}{of} is {value}, must be {limits}", param=limits.field)


def _check_whole(limits: ParamRange, value: Any) -> None:
    if not _is_whole(value):
        _refuse_type(limits.field, value, f"a whole number {limits}")
    if not limits.holds(value):
        raise RequestError(f"{limits.field} is {value}, must be {limits}", param=limits.field)


def _check_choices(params: SamplingParams) -> None:
    for field in FLAGS:
        value = getattr(params, field)
        if not isinstance(value, bool):
            _refuse_type(field, value, "True or False")
    if params.output_kind not in OUTPUT_KINDS:
        raise RequestError(
            f"output_kind is {params.output_kind!r}, must be one of: {', '.join(OUTPUT_KINDS)}",
            param="output_kind",
        )


def _check_lists(params: SamplingParams) -> None:
    for field in ("stop", "bad_words"):
        for word in _listed(params, field):
            if not isinstance(word, str):
                _refuse_type(field, word, "a string", "an entry of")
            if not word:
                message = f"{field} has an empty string, must have non-empty strings only"
                raise RequestError(message, param=field)
    for field in ("stop_token_ids", "allowed_token_ids"):
        for token in _listed(params, field):
            if not _is_whole(token):
                _refuse_type(field, token, "a token id (a whole number)", "an entry of")
            if token < 0:
                message = f"{field} has token id {token}, must be at least 0"
                raise RequestError(message, param=field)
    if params.allowed_token_ids == []:
        raise RequestError(
            "allowed_token_ids is [], must have at least one token (None allows all tokens)",
            param="allowed_token_ids",
        )


def _listed(params: SamplingParams, field: str) -> list[Any]:
    value = getattr(params, field)
    if value is None:  # only allowed_token_ids; the other fields have become lists
        return []
    if not isinstance(value, list):
        _refuse_type(field, value, "a list")
    return value


def _check_logit_bias(logit_bias: Any) -> None:
    if logit_bias is None:
        return
    if not isinstance(logit_bias, dict):
        _refuse_type("logit_bias", logit_bias, "a dict of token id to bias")
    limits = ParamRange("logit_bias", -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    for token, bias in logit_bias.items():
        if not _is_whole(token):
            _refuse_type("logit_bias", token, "a token id (a whole number)", "a key of")
        if token < 0:
            message = f"logit_bias has token id {token}, must be at least 0"
            raise RequestError(message, param="logit_bias")
        _check_real(limits, bias, f" of token {token}")


def _check_extra_args(extra_args: Any) -> None:
    if extra_args is None:
        return
    if not isinstance(extra_args, dict):
        _refuse_type("extra_args", extra_args, "a dict with strings as keys")
    for key in extra_args:
        if not isinstance(key, str):
            _refuse_type("extra_args", key, "a string", "a key of")


def _check_structured(params: SamplingParams) -> None:
    structured = params.structured_outputs
    if structured is None:
        return
    if not isinstance(structured, StructuredOutputsParams):
        _refuse_type("structured_outputs", structured, "a StructuredOutputsParams")
    if params.ignore_eos:
        raise RequestError(
            "ignore_eos is True with structured_outputs, but the output must end where its grammar "
            "ends; leave ignore_eos out",
            param="ignore_eos",
        )


def _check_combinations(params: SamplingParams) -> None:
    if params.n > 1 and params.is_greedy:
        raise RequestError(
            f"n is {params.n} with temperature {params.temperature}, but greedy sampling has only "
            "one result; set n=1 or a higher temperature",
            param="n",
        )
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError(
            f"min_tokens is {params.min_tokens}, must be at most max_tokens ({params.max_tokens})",
            param="min_tokens",
        )
    if params.stop and not params.detokenize:
        raise RequestError(
            f"stop is {params.stop} with detokenize=False, but stop strings are searched in the "
            "text; set detokenize=True or use stop_token_ids",
            param="stop",
        )
    if params.prompt_logprobs_start and params.prompt_logprobs is None:
        raise RequestError(
            f"prompt_logprobs_start is {params.prompt_logprobs_start} without prompt_logprobs; "
            "set prompt_logprobs as well",
            param="prompt_logprobs_start",
        )


def is_finite(value: object) -> bool:
    """True for a number that is finite as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # False for NaN

"""The field ``options`` of Ollama's requests."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from engine.messages.params import SamplingParams
from engine.server.errors import field_error

NO_LIMIT = (-2, -1, 0)
"""Values of ``num_predict`` for an answer of any length."""
WHOLE_TEXT = -1
NEW_NAMES = {"repeat_penalty": "repetition_penalty"}
SAMPLED = (
    "temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty",
    "frequency_penalty", "repeat_penalty",
)  # fmt: skip
WHOLE = ("num_predict", "num_ctx", "top_k", "seed", "repeat_last_n")
OFF = {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Penalties, with their values that change nothing."""


class Options(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sampling values and limits. ``None``: the client left the field out."""

    no_effect: ClassVar[dict[str, tuple[Any, ...]]] = {
        "mirostat": (0,),
        "penalize_newline": (True,),
        "tfs_z": (1, 1.0),
        "typical_p": (1, 1.0),
    }
    """Fields that this server does not have, and their values without an effect."""

    num_predict: int | float | None = None
    num_ctx: int | float | None = None
    temperature: float | None = None
    top_k: int | float | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | float | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # without an effect: how Ollama loads a model, and parts of what is off here
    embedding_only: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    low_vram: bool | None = None
    main_gpu: float | None = None
    mirostat_eta: float | None = None
    mirostat_tau: float | None = None
    num_batch: float | None = None
    num_gpu: float | None = None
    num_keep: float | None = None
    num_thread: float | None = None
    numa: bool | None = None
    use_mlock: bool | None = None
    use_mmap: bool | None = None
    vocab_only: bool | None = None

    def __post_init__(self) -> None:
        """Drop the fractions of whole numbers, as Ollama does: some clients send 40.0."""
        for name in WHOLE:
            value = getattr(self, name)
            if isinstance(value, float):
                setattr(self, name, int(value))


CLIENT_NAMES = {
    **{NEW_NAMES.get(name, name): (f"options.{name}",) for name in SAMPLED},
    "max_tokens": ("options.num_predict",),
    "max_completion_tokens": ("options.num_predict",),
}
"""Ollama's names of fields, by the engine's."""


def sampling_of(options: Options | None) -> dict[str, Any]:
    """The fields of a chat completion that the options mean. Raises ``ApiError``."""
    if options is None:
        return {}
    _check_last_n(options)
    found = {NEW_NAMES.get(name, name): getattr(options, name) for name in SAMPLED}
    most = options.num_predict
    if most is not None and most < min(NO_LIMIT):
        raise field_error(
            "options.num_predict", f"is {most}, must be at least 1, or -1 for no limit"
        )
    return {**found, "max_completion_tokens": None if most in NO_LIMIT else most}


def check_options(options: Options | None) -> None:
    """Check values that do not change the answer to a request. Raises ``ApiError`` or
    ``RequestError``."""
    given = {name: value for name, value in sampling_of(options).items() if value is not None}
    SamplingParams(max_tokens=given.pop("max_completion_tokens", None), **given)


def context_of(options: Options | None, max_model_len: int) -> int:
    """The most tokens of a prompt and the first token of its answer, at most ``max_model_len``.
    Raises ``ApiError``."""
    given = None if options is None else options.num_ctx
    if given is None:
        return max_model_len
    if given < 2:
        raise field_error(
            "options.num_ctx",
            f"is {given}, must be at least 2, for a token of prompt and answer",
        )
    return min(int(given), max_model_len)


def _check_last_n(options: Options) -> None:
    """Raise ``ApiError`` if penalties are wanted for a part of the text only."""
    is_penalised = any(getattr(options, name) not in (None, off) for name, off in OFF.items())
    if is_penalised and options.repeat_last_n not in (None, WHOLE_TEXT):
        raise field_error(
            "options.repeat_last_n",
            f"is {options.repeat_last_n}, but penalties are for the whole text here: leave it out, "
            "or set it to -1",
        )

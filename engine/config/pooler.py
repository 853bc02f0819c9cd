"""The option ``pooler_config``: what a user sets about pooling, under vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from engine.config.check import check_kind
from engine.config.near import did_you_mean, near_value
from engine.errors import ConfigError

PoolingMode = Literal["last", "cls", "mean"]
"""How the hidden states of a text become one vector: its last token's, its first token's, or the
mean of all."""
Activation = Literal["none", "normalize", "softmax", "sigmoid", "tanh"]
"""The last operation on a result. ``normalize`` divides a vector by its length."""

OPTION = "pooler_config"
MODES: dict[str, PoolingMode] = {"LAST": "last", "CLS": "cls", "MEAN": "mean"}
REFUSED = {
    "enable_chunked_processing": "long texts are computed in chunks without it: leave it out",
    "max_embed_len": "set truncate_prompt_tokens in requests, which cuts long texts",
    "step_tag_id": "process reward models are not supported",
    "returned_token_ids": "process reward models are not supported",
    "softmax": "set use_activation",
    "activation": "set use_activation",
    "task": "requests choose their task: leave it out, or set convert",
}
"""Keys of vLLM that have no effect here, and the way out."""


@dataclass(frozen=True, kw_only=True)
class PoolerOptions:
    """The keys of ``pooler_config``. ``None``: as the model's directory says."""

    pooling_type: str | None = None
    """LAST, CLS or MEAN; ALL for a result of each token."""
    seq_pooling_type: str | None = None
    """LAST, CLS or MEAN."""
    tok_pooling_type: str | None = None
    """ALL: the default task returns a result for each token."""
    use_activation: bool | None = None
    """Whether embeddings are normalised, and scores are passed through softmax or sigmoid, for
    requests that leave it open."""
    normalize: bool | None = None
    """Former name of ``use_activation``, for embeddings."""
    dimensions: int | None = None
    """Numbers of an embedding that are kept, for requests that leave it open."""
    is_matryoshka: bool | None = None
    """Whether requests may set ``dimensions``."""
    matryoshka_dimensions: list[int] | tuple[int, ...] | None = None
    """The values of ``dimensions`` that requests may set; empty: all."""
    logit_bias: float | None = None
    """Subtracted from scores before the activation; former name of ``logit_mean``."""
    logit_mean: float | None = None
    """Subtracted from scores before the activation."""
    logit_sigma: float | None = None
    """Scores are divided by it, after ``logit_mean`` was subtracted."""
    classifier_from_token: list[str] | tuple[str, ...] | None = None
    """Tokens whose logits after the last token are the scores, for ``convert="classify"``."""
    method: str | None = None
    """``from_2_way_softmax``: one score, from the logits of two tokens (the first means no);
    ``no_post_processing``: the logits."""

    @property
    def mode(self) -> PoolingMode | None:
        """The mode of pooling for one vector per text."""
        chosen = self.seq_pooling_type or self.pooling_type
        return None if chosen is None else MODES.get(chosen.upper())

    @property
    def is_by_token(self) -> bool:
        """True if the default task returns a result for each token."""
        chosen = self.tok_pooling_type or self.pooling_type
        return chosen is not None and chosen.upper() == "ALL"

    @property
    def is_activated(self) -> bool | None:
        return self.normalize if self.use_activation is None else self.use_activation

    @property
    def mean(self) -> float | None:
        return self.logit_bias if self.logit_mean is None else self.logit_mean


KINDS: dict[str, tuple[type, ...]] = {
    "pooling_type": (str,),
    "seq_pooling_type": (str,),
    "tok_pooling_type": (str,),
    "use_activation": (bool,),
    "normalize": (bool,),
    "dimensions": (int,),
    "is_matryoshka": (bool,),
    "matryoshka_dimensions": (list, tuple),
    "logit_bias": (float,),
    "logit_mean": (float,),
    "logit_sigma": (float,),
    "classifier_from_token": (list, tuple),
    "method": (str,),
}
METHODS = ("from_2_way_softmax", "no_post_processing")


def pooler_options(given: Mapping[str, Any] | None) -> PoolerOptions:
    """Check ``pooler_config`` and return its values. Raises ``ConfigError``."""
    known = [field.name for field in fields(PoolerOptions)]
    for key, value in (given or {}).items():
        if key in REFUSED and value is not None:
            raise ConfigError(f"{OPTION} has {key!r}, which has no effect here: {REFUSED[key]}")
        if key not in known and key not in REFUSED:
            near = did_you_mean(str(key), known) or f"; there are: {', '.join(known)}"
            raise ConfigError(f"{OPTION} has an unknown key {key!r:.80}{near}")
        if value is not None:
            check_kind(f"{OPTION}[{key!r}]", value, KINDS[key])
    values = given or {}
    options = PoolerOptions(
        pooling_type=values.get("pooling_type"),
        seq_pooling_type=values.get("seq_pooling_type"),
        tok_pooling_type=values.get("tok_pooling_type"),
        use_activation=values.get("use_activation"),
        normalize=values.get("normalize"),
        dimensions=values.get("dimensions"),
        is_matryoshka=values.get("is_matryoshka"),
        matryoshka_dimensions=values.get("matryoshka_dimensions"),
        logit_bias=values.get("logit_bias"),
        logit_mean=values.get("logit_mean"),
        logit_sigma=values.get("logit_sigma"),
        classifier_from_token=values.get("classifier_from_token"),
        method=values.get("method"),
    )
    _check_choices(options)
    _check_numbers(options)
    return options


def _check_choices(options: PoolerOptions) -> None:
    choices = {
        "pooling_type": (*MODES, "ALL"),
        "seq_pooling_type": tuple(MODES),
        "tok_pooling_type": ("ALL",),
    }
    for key, allowed in choices.items():
        value = getattr(options, key)
        if value is not None and value.upper() not in allowed:
            near = near_value(value.upper(), allowed)
            raise ConfigError(
                f"{OPTION}[{key!r}] is {value!r:.80}, must be one of: {', '.join(allowed)}{near}"
            )
    if options.method is not None and options.method not in METHODS:
        raise ConfigError(
            f"{OPTION}['method'] is {options.method!r:.80}, must be one of: {', '.join(METHODS)}"
            f"{near_value(options.method, METHODS)}"
        )
    tokens = options.classifier_from_token
    if tokens is not None and not (tokens and all(isinstance(each, str) for each in tokens)):
        raise ConfigError(
            f"{OPTION}['classifier_from_token'] is {tokens!r:.80}, must be a list of tokens, as in "
            '["no", "yes"]'
        )


def _check_numbers(options: PoolerOptions) -> None:
    sizes = options.matryoshka_dimensions or ()
    if not all(type(size) is int and size > 0 for size in sizes):
        raise ConfigError(
            f"{OPTION}['matryoshka_dimensions'] is {sizes!r:.80}, must be a list of whole numbers "
            "of at least 1"
        )
    if options.dimensions is not None and options.dimensions < 1:
        raise ConfigError(f"{OPTION}['dimensions'] is {options.dimensions}, must be at least 1")
    if options.logit_sigma is not None and not options.logit_sigma > 0:
        raise ConfigError(f"{OPTION}['logit_sigma'] is {options.logit_sigma}, must be above 0")


assert set(get_args(PoolingMode)) == set(MODES.values())

"""The options of speculative decoding: keys of ``speculative_config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from engine.config.check import check_kind, check_range, check_types
from engine.config.near import did_you_mean
from engine.errors import ConfigError

METHODS = ("ngram", "suffix", "draft_model", "grammar")
NGRAM = 5  # tokens, the default size of n-grams
MAX_NGRAM = 64  # each size needs a table of all tokens so far
MAX_DRAFTS = 256  # per sequence: more would mostly be rejected, after the cost of verifying them
DEPTH, CACHED, FACTOR, CHANCE = 24, 10_000, 1.0, 0.1  # vLLM's defaults for suffix decoding
MAX_CACHED = 1 << 20  # requests; their memory has a limit in bytes, too
EXAMPLE_OF_MODEL = '{"method": "draft_model", "model": "path/or/name", "num_speculative_tokens": 4}'
EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'
# The method that each option belongs to, by the start of its name.
PREFIXES = {
    "prompt_lookup_": "ngram",
    "suffix_decoding_": "suffix",
    "model": "draft_model",
    "revision": "draft_model",
    "quantization": "draft_model",
}


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are drafted for a decode step to verify."""

    method: str
    """ngram: what followed an earlier occurrence of the last tokens in the request's text; suffix:
    what most often followed the longest matching suffix, in the request's text or outputs of
    finished requests; draft_model: what a smaller model predicts; grammar: only the text that a
    structured output forces, which all methods draft."""
    num_speculative_tokens: int
    """Most drafts per decode; with suffix the default is suffix_decoding_max_tree_depth."""
    adaptive: bool = True
    """Verify only drafts with a measured gain above their cost; False: verify all proposals."""
    model: str | None = None
    """Directory of the draft model, or its name on a hub; it needs the main model's vocabulary."""
    revision: str | None = None
    """Branch, tag or commit of a draft model given by name."""
    quantization: Literal["int8", "int4", "fp8"] | None = None
    """Quantise the draft model's plain weights when they are loaded: int8, int4, or fp8 on a
    GPU."""
    prompt_lookup_min: int = NGRAM
    """Fewest tokens that must match. Default: prompt_lookup_max, or 5 if that is not given
    either."""
    prompt_lookup_max: int = NGRAM
    """Most tokens that are compared. Default: prompt_lookup_min, or 5 if that is not given
    either."""
    suffix_decoding_max_tree_depth: int = DEPTH
    """Most tokens that are compared."""
    suffix_decoding_max_cached_requests: int = CACHED
    """Finished requests whose outputs are kept; 0: only the request's own text is used."""
    suffix_decoding_max_spec_factor: float = FACTOR
    """Most drafts per matching token; one draft is always tried."""
    suffix_decoding_min_token_prob: float = CHANCE
    """Least probability that a draft and all drafts before it are right, estimated by how often
    they followed in earlier text."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> SpeculativeConfig:
        """Read the user's options. Raises ``ConfigError`` with the bad value and its limit."""
        check_method(options.get("method", METHODS[0]))  # before options of another method
        known = [option.name for option in fields(cls)]
        for name in options:
            if name not in known:
                raise ConfigError(
                    f"{name!r:.80} is not an option of speculative_config; there are: "
                    f"{', '.join(known)}{did_you_mean(str(name), known)}"
                )
        given = {name: value for name, value in options.items() if value is not None}
        if isinstance(given.get("model"), Path):
            given["model"] = str(given["model"])
        check_given(given)
        sizes = [value for name, value in given.items() if name.startswith("prompt_lookup_")]
        try:
            # Check what was given before defaults are derived from it, so that errors name it.
            requested = SpeculativeConfig(
                method=given["method"],
                num_speculative_tokens=given.get("num_speculative_tokens", 1),
                adaptive=given.get("adaptive", True),
                model=given.get("model"),
                revision=given.get("revision"),
                quantization=given.get("quantization"),
                prompt_lookup_min=given.get("prompt_lookup_min", NGRAM),
                prompt_lookup_max=given.get("prompt_lookup_max", NGRAM),
                suffix_decoding_max_tree_depth=given.get("suffix_decoding_max_tree_depth", DEPTH),
                suffix_decoding_max_cached_requests=given.get(
                    "suffix_decoding_max_cached_requests", CACHED
                ),
                suffix_decoding_max_spec_factor=given.get(
                    "suffix_decoding_max_spec_factor", FACTOR
                ),
                suffix_decoding_min_token_prob=given.get("suffix_decoding_min_token_prob", CHANCE),
            )
            if len(sizes) == 1:
                requested = replace(
                    requested, prompt_lookup_min=sizes[0], prompt_lookup_max=sizes[0]
                )
            if "num_speculative_tokens" not in given:  # optional for suffix
                depth = requested.suffix_decoding_max_tree_depth
                requested = replace(requested, num_speculative_tokens=depth)
            requested._check_order()
        except ConfigError as error:
            raise ConfigError(f"speculative_config: {error}") from error
        return requested

    def __post_init__(self) -> None:
        check_method(self.method)
        check_types(self)
        check_range(self, 1, MAX_DRAFTS, "num_speculative_tokens")
        check_range(self, 1, MAX_NGRAM, "prompt_lookup_min", "prompt_lookup_max")
        check_range(self, 1, MAX_DRAFTS, "suffix_decoding_max_tree_depth")
        check_range(self, 0, MAX_CACHED, "suffix_decoding_max_cached_requests")
        check_range(self, 0.0, float(MAX_DRAFTS), "suffix_decoding_max_spec_factor")
        check_range(self, 0.0, 1.0, "suffix_decoding_min_token_prob")

    def _check_order(self) -> None:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) is above prompt_lookup_max "
                f"({self.prompt_lookup_max}); lower the first or raise the second"
            )


def check_given(given: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if a required option is missing, or an option is for another method."""
    for name in ("method", "num_speculative_tokens"):
        if name not in given and given.get("method") != "suffix":
            example = EXAMPLE_OF_MODEL if "model" in given else EXAMPLE
            raise ConfigError(f"speculative_config lacks {name!r}; write one like {example}")
    if given["method"] == "draft_model" and given.get("model", "") == "":
        raise ConfigError(
            "speculative_config lacks 'model', a directory or name of the draft model; write "
            f"one like {EXAMPLE_OF_MODEL}"
        )
    for prefix, method in PREFIXES.items():
        for name, value in given.items():
            if name.startswith(prefix) and method != given["method"]:
                raise ConfigError(
                    f"speculative_config: {name} is {value!r:.80}, which is for method {method!r} "
                    f"and not {given['method']!r}; leave it out, or set method to {method!r}"
                )


def check_method(method: object) -> None:
    """Raise ``ConfigError`` for an unknown method."""
    check_kind("speculative_config: method", method, (str, NoneType))
    if method is not None and method not in METHODS:
        raise ConfigError(
            f"speculative_config: method {method!r:.80} is not available; there are: "
            f"{', '.join(METHODS)}{did_you_mean(str(method), METHODS)}"
        )

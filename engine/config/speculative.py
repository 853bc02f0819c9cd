"""Options of speculative decoding, as ``speculative_config`` has them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import NoneType
from typing import Any

from engine.config.check import check_kind, check_range, check_types
from engine.errors import ConfigError

METHODS = ("ngram",)
NGRAM = 5  # tokens, if no size of n-grams is given
MAX_NGRAM = 64  # each size has a table of all that was said
MAX_DRAFTS = 256  # a row: what is verified is computed, and most of so many would be wrong
EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are guessed that a decode verifies beside its own."""

    method: str
    """ngram: what followed when the last tokens stood in the request's text before."""
    num_speculative_tokens: int
    """Drafts for a decode, at most."""
    prompt_lookup_min: int = NGRAM
    """Tokens that must be the same, at least; prompt_lookup_max, or 5 if not given."""
    prompt_lookup_max: int = NGRAM
    """Tokens that are compared, at most; prompt_lookup_min, or 5 if not given."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> SpeculativeConfig:
        """Read what a user wrote. Raises ``ConfigError`` naming value, limit and way out."""
        check_method(options.get("method", METHODS[0]))  # before the options of another method
        known = [option.name for option in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(
                    f"{name!r:.80} is no option of speculative_config; there are: "
                    f"{', '.join(known)}{hint}"
                )
        given = {name: value for name, value in options.items() if value is not None}
        for name in known[:2]:
            if name not in given:
                raise ConfigError(f"speculative_config lacks {name!r}; one looks like {EXAMPLE}")
        sizes = [given[name] for name in known[2:] if name in given]
        try:
            # Before one size is taken for both: an error names what was given.
            asked = SpeculativeConfig(
                method=given["method"],
                num_speculative_tokens=given["num_speculative_tokens"],
                prompt_lookup_min=given.get("prompt_lookup_min", NGRAM),
                prompt_lookup_max=given.get("prompt_lookup_max", NGRAM),
            )
            if len(sizes) == 1:
                asked = replace(asked, prompt_lookup_min=sizes[0], prompt_lookup_max=sizes[0])
            asked._check_order()
        except ConfigError as error:
            raise ConfigError(f"speculative_config: {error}") from error
        return asked

    def __post_init__(self) -> None:
        check_method(self.method)
        check_types(self)
        check_range(self, 1, MAX_DRAFTS, "num_speculative_tokens")
        check_range(self, 1, MAX_NGRAM, "prompt_lookup_min", "prompt_lookup_max")

    def _check_order(self) -> None:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) is above prompt_lookup_max "
                f"({self.prompt_lookup_max}); lower the first or raise the second"
            )


def check_method(method: object) -> None:
    """Raise ``ConfigError`` for an unknown method to draft."""
    check_kind("speculative_config: method", method, (str, NoneType))
    if method is not None and method not in METHODS:
        near = difflib.get_close_matches(str(method).strip(" []").lower(), METHODS, n=1)
        raise ConfigError(
            f"speculative_config: method {method!r:.80} is not available; there are: "
            f"{', '.join(METHODS)}{f'; did you mean {near[0]!r}?' if near else ''}"
        )

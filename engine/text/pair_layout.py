"""How a tokenizer joins two texts to one sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as RustTokenizer

from engine.config.model import read_json

TYPES = "token_type_ids"
WITH_TYPES = frozenset({"Bert", "Electra", "Deberta", "DebertaV2"})
"""Tokenizers of transformers that give types of tokens if their file says nothing."""
MODELS_WITH_TYPES = frozenset({"bert", "electra", "nomic_bert"})
"""Models that have such a tokenizer if their file names none."""


class PairLayout(NamedTuple):
    """The special tokens around two texts that are joined to one sequence."""

    before: list[int]
    between: list[int]
    after: list[int]
    second: int | None
    """Index of the first token of type 1 if the first text is empty; ``None``: all have type 0."""

    @property
    def num_special(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)


def read_layout(tokenizer: RustTokenizer) -> PairLayout | None:
    """The layout of a tokenizer, read from a pair that it encodes; ``None`` if a letter has no
    tokens."""
    probe = tokenizer.encode("a", "b")
    parts, ids = probe.sequence_ids, probe.ids
    if 0 not in parts or 1 not in parts:
        return None
    begin, end = parts.index(0), len(parts) - parts[::-1].index(1)
    middle = [ids[index] for index in range(begin, end) if parts[index] is None]
    second = probe.type_ids.index(1) - parts.count(0) if 1 in probe.type_ids else None
    return PairLayout(ids[:begin], middle, ids[end:], second)


def has_token_types(root: Path, options: dict[str, Any]) -> bool:
    """Whether a model gets the types of tokens from its tokenizer, as in transformers.

    root: the tokenizer's directory; options: its tokenizer_config.json."""
    stated = options.get("model_input_names")
    if isinstance(stated, list):
        return TYPES in stated
    named = options.get("tokenizer_class")
    if isinstance(named, str):
        return named.removesuffix("Fast").removesuffix("Tokenizer") in WITH_TYPES
    config = read_json(root / "config.json") or {}
    return str(config.get("model_type")) in MODELS_WITH_TYPES

"""Selects the files of a repository to fetch: weights as safetensors, never a pickle."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from engine.config.model import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = (
    *("config.json", "generation_config.json", "quant_config.json", "quantize_config.json"),
    *("modules.json", "config_sentence_transformers.json", "sentence_*_config.json"),
    *("preprocessor_config.json", "processor_config.json"),
    "[0-9]*_*/config.json",
)
MODULE_WEIGHTS = ("[0-9]*_*/model.safetensors",)
"""Weights of modules after the model, in directories of sentence-transformers."""
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("tokenizer.model", "spiece.model", "tekken.json", "*.tiktoken"),
    *("vocab.json", "vocab.txt", "merges.txt"),
)
CODE = ("*.py",)
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
# The first of these that a repository has is fetched last, so its presence means completeness.
ANCHORS = ("config.json", "tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.txt")
VOCABULARIES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"),
    "spiece.model",
)


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A repository on a hub: the option that names it, and which of its files to fetch."""

    option: str
    name: str
    gguf: str | None = None
    """Type of quantisation, or name, of the GGUF file to fetch; ``None``: a model directory."""
    revision: str | None = None
    token: str | bool | None = field(default=None, repr=False)
    cache: str | None = None
    has_weights: bool = False
    has_tokenizer: bool = False
    has_code: bool = False
    is_adapter: bool = False
    """Fetch a LoRA adapter, and nothing else."""


def matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Return the names that match one of the patterns, sorted."""
    wanted = list(patterns)
    return sorted(name for name in names if any(fnmatchcase(name, each) for each in wanted))


def weights_at_top(names: Iterable[str]) -> list[str]:
    """Return the weight files at the top level that a loader uses without an index.

    Files in Mistral's own format (``consolidated*``) are left out."""
    names = set(names)
    if SINGLE in names:
        return [SINGLE]
    return sorted(
        name
        for name in names
        if name.endswith(".safetensors") and "/" not in name and not name.startswith("consolidated")
    )


def weights_of_index(index: dict[str, Any] | None) -> list[str]:
    """Return the weight files that an index lists; [] for a damaged index, which the loader
    reports."""
    places = None if index is None else index.get("weight_map")
    if not isinstance(places, dict):
        return []
    return sorted({str(name) for name in places.values()})


def missing_weights(root: Path) -> list[str]:
    """Return the names of the weight files that a directory should have but lacks."""
    index = root / INDEX
    if index.is_file():
        return [name for name in weights_of_index(read_json(index)) if not (root / name).is_file()]
    return [] if weights_at_top(file.name for file in root.iterdir()) else [SINGLE]


def missing_of_adapter(root: Path) -> list[str]:
    return [name for name in ADAPTER if not (root / name).is_file()]


def missing_tokenizer(root: Path) -> list[str]:
    return [] if any((root / name).is_file() for name in VOCABULARIES) else [VOCABULARIES[0]]


def of_kind(names: Collection[str], *suffixes: str) -> list[str]:
    """Return the names with one of these suffixes, sorted."""
    return sorted(name for name in names if PurePosixPath(name).suffix in suffixes)

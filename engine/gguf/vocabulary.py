"""Writes the tokenizer of a GGUF file as the JSON files of a model directory.

A text has the same ids as in the tokenizer from which the file was made, as far as the file
describes it: the Unicode form and the patterns that split text follow from a name, see
``pretokenizers``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine.errors import ModelError
from engine.gguf.header import GgufHeader
from engine.gguf.merges import read_merges, rebuilt_merges
from engine.gguf.pretokenizers import RULES, Rule
from engine.gguf.special_tokens import NAMED, added_tokens, end_ids
from engine.gguf.token_metadata import SPACE, TokenMetadata

Json = dict[str, Any]

TEMPLATE = "tokenizer.chat_template"
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Sampling values in GGUF files, below ``general.sampling``, and in generation_config.json."""


MAX_VALUE = 1e30  # of a sampling value; larger ones do not fit in 32 bits


@dataclass
class Draft:
    """A tokenizer before its special tokens are added."""

    vocabulary: dict[str, int]
    content: Json
    """The parts of tokenizer.json."""
    adds_bos: bool
    """Whether prompts begin with the BOS token if the file has no ``add_bos_token``."""


def write_tokenizer(header: GgufHeader, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json with the chat templates, and
    generation_config.json with the ids that end a text and the sampling values.

    Raises ``ModelError`` with the key and the reason if metadata are missing or damaged, or the
    tokenizer is of a kind that is not supported."""
    metadata = TokenMetadata(header)
    make = KINDS.get(metadata.kind)
    if make is None:
        raise metadata.fault(
            "model", f"is {metadata.kind!r:.60}, which is not supported; known: {', '.join(KINDS)}"
        )
    draft = make(metadata)
    named = named_tokens(metadata, draft.vocabulary)
    ends = end_ids(metadata, draft.vocabulary)
    config = tokenizer_config(metadata, named, draft.adds_bos)
    files = {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added_tokens(metadata, draft.vocabulary, ends),
            **draft.content,
            "post_processor": post_processor(metadata, draft, config),
        },
        "tokenizer_config.json": config,
        "generation_config.json": generation_config(metadata, ends),
    }
    for name, content in files.items():
        (directory / name).write_bytes(msgspec.json.encode(content))


def byte_level_bpe(metadata: TokenMetadata) -> Draft:
    """A tokenizer of kind ``gpt2``: merges bytes, which are written as letters."""
    rule = rule_of(metadata)
    if not rule.parts:
        return spaced_bpe(metadata, rule.adds_bos)
    vocabulary = metadata.vocabulary(spells_spaces=False)
    letters = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
    content = {
        "normalizer": {"type": "NFC"} if rule.is_composed else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(rule.parts)},
        "decoder": {**letters, "use_regex": True},
        "model": bpe(
            vocabulary, read_merges(metadata, vocabulary), ignore_merges=rule.ignores_merges
        ),
    }
    return Draft(vocabulary, content, rule.adds_bos)


def rule_of(metadata: TokenMetadata) -> Rule:
    """How the tokenizer splits text. Raises ``ModelError`` with the known names if its name is
    unknown or missing, since another rule would give the model a text that it cannot read."""
    name = metadata.get("pre")
    if isinstance(name, str) and name in RULES:
        return RULES[name]
    state = "is missing" if name is None else f"is {name!r:.60}, which is unknown"
    raise metadata.fault(
        "pre",
        f"{state}, so how text is split into tokens is unknown; convert the model again with a "
        f"current llama.cpp; known: {', '.join(RULES)}",
    )


def sentence_piece(metadata: TokenMetadata) -> Draft:
    """A tokenizer of kind ``llama``: merges characters by the scores of tokens."""
    return spaced_bpe(metadata, adds_bos=True)


def spaced_bpe(metadata: TokenMetadata, adds_bos: bool = True) -> Draft:
    """A tokenizer that writes a space as a letter, and characters that it lacks as bytes."""
    vocabulary = metadata.vocabulary(spells_spaces=True)
    has_merges = metadata.get("merges") is not None
    merges = (read_merges if has_merges else rebuilt_merges)(metadata, vocabulary)
    prefixes = metadata.kind == "llama" and metadata.flag("add_space_prefix", True)
    spell = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    read = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    prefix = {"type": "Prepend", "prepend": SPACE}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    decoders = [read, {"type": "ByteFallback"}, {"type": "Fuse"}]
    unknown = metadata.token_id("unknown")
    texts = {number: text for text, number in vocabulary.items()}
    content = {
        "normalizer": {"type": "Sequence", "normalizers": [prefix, spell]} if prefixes else spell,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [*decoders, strip] if prefixes else decoders},
        "model": bpe(
            vocabulary,
            merges,
            unk_token=None if unknown is None else texts.get(unknown),
            fuse_unk=True,
            byte_fallback="<0x00>" in vocabulary,
        ),
    }
    return Draft(vocabulary, content, adds_bos)


KINDS: Mapping[str, Callable[[TokenMetadata], Draft]] = {
    "gpt2": byte_level_bpe,
    "llama": sentence_piece,
    "gemma4": spaced_bpe,
}
"""Makers of tokenizers by ``tokenizer.ggml.model``."""


def bpe(vocabulary: dict[str, int], merges: list[str], **options: Any) -> Json:
    """The model of a BPE tokenizer in the format of tokenizer.json."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": vocabulary,
        "merges": merges,
    }


def named_tokens(metadata: TokenMetadata, vocabulary: dict[str, int]) -> dict[str, str]:
    """The texts of the tokens that the file names, by their names in tokenizer_config.json."""
    texts = {number: text for text, number in vocabulary.items()}
    numbers = {config: metadata.token_id(name) for name, config in NAMED.items()}
    return {name: texts[number] for name, number in numbers.items() if number in texts}


def tokenizer_config(metadata: TokenMetadata, named: dict[str, str], adds_bos: bool) -> Json:
    """The content of tokenizer_config.json."""
    # In some files of Gemma 4 the flag is false, although its prompts need the token.
    adds_bos_always = metadata.kind == "gemma4" and "bos_token" in named
    adds = {
        "add_bos_token": metadata.flag("add_bos_token", adds_bos and "bos_token" in named)
        or adds_bos_always,
        "add_eos_token": metadata.flag("add_eos_token", False),
    }
    for key, is_added in adds.items():
        token = key.removeprefix("add_")
        if is_added and token not in named:
            raise metadata.fault(key, f"is true, but {token}_id names no token")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **adds,
        **named,
        **chat_templates(metadata),
    }


def chat_templates(metadata: TokenMetadata) -> Json:
    """The chat templates as in tokenizer_config.json: one text, or a list of texts with names."""
    found = {}
    for key, value in metadata.header.metadata.items():
        if key != TEMPLATE and not key.startswith(f"{TEMPLATE}."):
            continue
        if not isinstance(value, str):
            raise ModelError(f"{metadata.header.path}: {key} is {value!r:.60}, must be a string")
        found[key.removeprefix(TEMPLATE).removeprefix(".") or "default"] = value
    if set(found) <= {"default"}:
        return {"chat_template": found["default"]} if found else {}
    return {"chat_template": [{"name": name, "template": text} for name, text in found.items()]}


def post_processor(metadata: TokenMetadata, draft: Draft, config: Json) -> Json | None:
    """The part of tokenizer.json that puts BOS and EOS around a prompt; ``None`` if not needed."""
    parts: list[Json] = []
    if draft.content["decoder"]["type"] == "ByteLevel":
        parts.append({**draft.content["decoder"], "trim_offsets": False})
    around = {
        name: config[name] if config[f"add_{name}"] else None for name in ("bos_token", "eos_token")
    }
    if any(around.values()):
        parts.append(prompt_template(draft.vocabulary, around["bos_token"], around["eos_token"]))
    if len(parts) == 2:
        return {"type": "Sequence", "processors": parts}
    return parts[0] if parts else None


def prompt_template(vocabulary: dict[str, int], bos: str | None, eos: str | None) -> Json:
    """A post-processor that puts tokens around each of one or two texts."""

    def around(sequence: str, kind: int) -> list[Json]:
        parts = [bos and special(bos, kind), {"Sequence": {"id": sequence, "type_id": kind}}]
        return [part for part in (*parts, eos and special(eos, kind)) if part]

    def special(token: str, kind: int) -> Json:
        return {"SpecialToken": {"id": token, "type_id": kind}}

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {
            token: {"id": token, "ids": [vocabulary[token]], "tokens": [token]}
            for token in (bos, eos)
            if token
        },
    }


def generation_config(metadata: TokenMetadata, ends: list[int]) -> Json:
    """The content of generation_config.json."""
    ids = {"eos_token_id": ends, "bos_token_id": metadata.token_id("bos")}
    ids |= {"pad_token_id": metadata.token_id("padding")}
    found: Json = {name: value for name, value in ids.items() if value not in (None, [])}
    for key, name in SAMPLING.items():
        value = metadata.header.metadata.get(f"general.sampling.{key}")
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not isfinite(value) or abs(value) > MAX_VALUE:
            raise ModelError(
                f"{metadata.header.path}: general.sampling.{key} is {value!r:.60}, must be a number"
            )
        # The file has 32 bits: 0.8 is read as 0.800000011920929.
        found[name] = value if isinstance(value, int) else float(str(np.float32(value)))
    return found

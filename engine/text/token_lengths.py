"""Bounds the characters that one token can stand for: a text longer than the token limit times this
bound is refused without being tokenised.

Some tokenizers drop characters, or merge many unknown characters into one token. For these there is
no bound."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

MOST_COMPOSED = 4  # characters that NFC merges into one, at most
COMPOSING = frozenset({"NFC", "NFKC"})
KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace", "NFD", "NFKD", "Prepend"})
"""Normalizers and pre-tokenizers that remove no characters."""


def max_chars_per_token(tokenizer: Tokenizer) -> int | None:
    """Return the most characters that one token can stand for; ``None`` if there is no bound."""
    parts = [*_parts(tokenizer.normalizer), *_parts(tokenizer.pre_tokenizer)]
    added = tokenizer.get_added_tokens_decoder().values()
    is_certain = (
        all(map(_keeps_all, parts))
        and not any(token.lstrip or token.rstrip for token in added)  # these remove spaces
        and _knows_all(tokenizer, parts)
    )
    if not is_certain:
        return None
    longest = max(map(len, _names(tokenizer)), default=0)
    is_composed = any(part["type"] in COMPOSING for part in parts)
    return longest * (MOST_COMPOSED if is_composed else 1) or None


def _names(tokenizer: Tokenizer) -> list[str]:
    """Return the texts of all tokens, read one by one: reading a large vocabulary in one call takes
    four times as long and blocks other threads."""
    num = tokenizer.get_vocab_size(with_added_tokens=False)
    names = list(filter(None, map(tokenizer.model.id_to_token, range(num))))
    if len(names) < num:  # its ids have gaps
        names = list(tokenizer.get_vocab(with_added_tokens=False))
    return names + [token.content for token in tokenizer.get_added_tokens_decoder().values()]


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """Yield the settings of a normalizer or pre-tokenizer, one part at a time."""
    if component is not None:
        yield from _flatten(json.loads(component.__getstate__()))


def _flatten(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if part["type"] != "Sequence":
        yield part
        return
    for inner in part.get("normalizers") or part.get("pretokenizers") or []:
        yield from _flatten(inner)


def _keeps_all(part: dict[str, Any]) -> bool:
    kind = part["type"]
    if kind == "Replace":
        text = part["pattern"].get("String")
        return text is not None and len(part["content"]) >= len(text)
    if kind in ("Split", "Punctuation"):
        return bool(part["behavior"] != "Removed")
    return kind in KEEPING or kind in COMPOSING


def _knows_all(tokenizer: Tokenizer, parts: list[dict[str, Any]]) -> bool:
    """Whether every character, known or unknown, becomes at least one token of its own."""
    model = tokenizer.model
    if not isinstance(model, BPE):
        return False
    if any(part["type"] == "ByteLevel" for part in parts):
        return all(model.token_to_id(letter) is not None for letter in ByteLevel.alphabet())
    if model.byte_fallback:
        return all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    return model.unk_token is not None and not model.fuse_unk

"""The text of each token, for tokenizers that decode a sequence by joining the texts of its tokens.

Decoding a new token is then a look-up in a table. This works for most tokenizers of language
models: those whose tokens are bytes shown as letters, and those that write a space as a special
letter, even if they drop one space at the start of a text."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"  # replaces bytes of an incomplete character


class TokenTexts(dict[int, str | None]):
    """The text that each token id adds to earlier text, computed at first use.

    ``None`` for a byte or a part of a character, whose text depends on its neighbours. Empty for a
    skipped special token, and for an id beyond the tokenizer's own, which pads a model's embedding
    table."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens

    def __missing__(self, token_id: int) -> str | None:
        text = self[token_id] = self._find(token_id)
        return text

    def _find(self, token_id: int) -> str | None:
        name = self._tokenizer.id_to_token(token_id)
        if name is None:
            return ""
        if name.startswith("<0x"):  # a byte is text only together with its neighbours
            return None
        alone, twice = (
            self._tokenizer.decode([token_id] * num, skip_special_tokens=self._skip)
            for num in (1, 2)
        )
        return None if REPLACEMENT in twice else twice[len(alone) :]


def joins_texts(tokenizer: Tokenizer) -> bool:
    """Whether decoding joins the texts of the tokens, except for bytes and the first token."""
    if tokenizer.decoder is None:
        return False
    parts = flat_parts(tokenizer.decoder)
    kinds = [part["type"] for part in parts]
    if kinds in (["ByteLevel"], ["Metaspace"]):
        return True
    while kinds and kinds[0] == "Replace":  # applies to each token by itself
        del kinds[0]
    if kinds == ["ByteFallback", "Fuse"]:
        return True
    if kinds != ["ByteFallback", "Fuse", "Strip"]:
        return False
    # It may strip one space at the start; with two, it would change more than the first token.
    return bool(parts[-1]["start"] <= 1 and parts[-1]["stop"] == 0)


def flat_parts(decoder: Any) -> list[dict[str, Any]]:
    """Return the settings of a tokenizer's decoder as a flat list, one dict per part."""
    return _flatten(json.loads(decoder.__getstate__()))


def _flatten(part: dict[str, Any]) -> list[dict[str, Any]]:
    if part["type"] != "Sequence":
        return [part]
    return [inner for each in part["decoders"] for inner in _flatten(each)]

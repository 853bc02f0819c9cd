"""The text of each token, for tokenizers whose text is that of their tokens one after the other.

Text that grows by a token then grows by an entry of a table, instead of by the difference of two
texts. Most tokenizers of language models are of this kind: those whose tokens are bytes shown as
letters, and those with a mark for the space; at the beginning of a text some of them drop a space.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"  # stands for bytes that are not a whole character


class TokenTexts(dict[int, str | None]):
    """The text a token adds after text that is out, by its id; made at first use.

    ``None`` where that takes more than the token to say: a byte. Empty where the token adds nothing
    wherever it stands: special and skipped, or beyond the tokenizer's own (rows that fill a model's
    table up).
    """

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
        if name.startswith("<0x"):  # bytes are text together with their neighbours
            return None
        alone, twice = (
            self._tokenizer.decode([token_id] * num, skip_special_tokens=self._skip)
            for num in (1, 2)
        )
        return None if REPLACEMENT in twice else twice[len(alone) :]


def joins_texts(tokenizer: Tokenizer) -> bool:
    """Whether a text is that of its tokens joined, but for bytes and the very first token."""
    if tokenizer.decoder is None:
        return False
    parts = flat_parts(tokenizer.decoder)
    kinds = [part["type"] for part in parts]
    if kinds in (["ByteLevel"], ["Metaspace"]):
        return True
    while kinds and kinds[0] == "Replace":  # in each token by itself
        del kinds[0]
    if kinds == ["ByteFallback", "Fuse"]:
        return True
    if kinds != ["ByteFallback", "Fuse", "Strip"]:
        return False
    # Of one space the text begins with: with two, more than the first token would be concerned.
    return bool(parts[-1]["start"] <= 1 and parts[-1]["stop"] == 0)


def flat_parts(decoder: Any) -> list[dict[str, Any]]:
    """A decoder as data, part by part."""
    return _flatten(json.loads(decoder.__getstate__()))


def _flatten(part: dict[str, Any]) -> list[dict[str, Any]]:
    if part["type"] != "Sequence":
        return [part]
    return [inner for each in part["decoders"] for inner in _flatten(each)]

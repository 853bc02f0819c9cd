"""Reads and checks the metadata of a GGUF file that describe its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
from gguf.constants import TokenType

from engine.errors import ModelError
from engine.gguf.header import GgufHeader

PREFIX = "tokenizer.ggml."
SPACE = "\u2581"  # stands for a space in the tokens of SentencePiece
DEFAULT_IDS = {"llama": {"bos": 1, "eos": 2}}
"""Ids that files of a kind may leave out."""


class TokenMetadata:
    """The tokens of a GGUF file, their types and scores, and the other values about its tokenizer.

    All methods raise ``ModelError`` with the key and the reason for a value that is missing, of a
    wrong type or out of range."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.kind = self._of_type("model", str, "a string")
        """The kind of tokenizer: ``"gpt2"`` for byte-level BPE, ``"llama"`` for SentencePiece."""

    @property
    def architecture(self) -> str:
        """The architecture of the model; empty if the file does not name it."""
        found = self.header.metadata.get("general.architecture")
        return found if isinstance(found, str) else ""

    def fault(self, key: str, why: str) -> ModelError:
        """An error that names the file and the key below ``tokenizer.ggml``."""
        return ModelError(f"{self.header.path}: {PREFIX}{key} {why}")

    def get(self, key: str) -> Any:
        """The value of a key below ``tokenizer.ggml``; ``None`` if it is missing."""
        return self.header.metadata.get(PREFIX + key)

    def _of_type(self, key: str, kind: type, described: str) -> Any:
        value = self.get(key)
        if not isinstance(value, kind):
            state = "is missing" if value is None else f"is {value!r:.60}"
            raise self.fault(key, f"{state}, must be {described}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """The value of a key that is true or false."""
        return default if self.get(key) is None else self._of_type(key, bool, "true or false")

    def strings(self, key: str) -> list[str]:
        """The value of a key that is a list of strings."""
        found: list[str] = self._of_type(key, list, "a list of strings")
        return found

    def numbers(self, key: str) -> np.ndarray[Any, Any] | None:
        """One number for each token; ``None`` if the key is missing."""
        if self.get(key) is None:
            return None
        found: np.ndarray[Any, Any] = self._of_type(key, np.ndarray, "a list of numbers")
        if len(found) != len(self._texts):
            raise self.fault(key, f"has {len(found)} values, {PREFIX}tokens has {len(self._texts)}")
        return found

    def token_id(self, name: str) -> int | None:
        """The id of a named token, such as ``"bos"``; ``None`` if the file does not name it."""
        key, count = f"{name}_token_id", len(self._texts)
        value = self.get(key)
        if value is None and name == "unknown" and TokenType.UNKNOWN in self.types:
            return self.types.index(TokenType.UNKNOWN)
        if value is None:
            value = DEFAULT_IDS.get(self.kind, {}).get(name)
            return value if value is None or value < count else None
        is_valid = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < count
        if not is_valid:
            raise self.fault(key, f"is {value!r:.60}, must be the id of one of {count} tokens")
        return int(value)

    @cached_property
    def _texts(self) -> list[str]:
        found = self.strings("tokens")
        if not found:
            raise self.fault("tokens", "is empty, must have the text of at least one token")
        return found

    @cached_property
    def types(self) -> list[int]:
        """The type of each token."""
        found = self.numbers("token_type")
        if found is None:
            return [int(TokenType.NORMAL)] * len(self._texts)
        wrong = np.flatnonzero((found < 0) | (found > max(TokenType)))
        if found.dtype.kind not in "iu" or len(wrong):
            number = int(wrong[0]) if len(wrong) else 0
            raise self.fault(
                "token_type", f"is {found[number]} for token {number}, must be one of 1 to 6"
            )
        types: list[int] = found.tolist()
        return types

    @cached_property
    def scores(self) -> np.ndarray[Any, Any] | None:
        """The score of each token, higher for tokens that are preferred; ``None`` if missing."""
        found = self.numbers("scores")
        if found is not None and not np.isfinite(found).all():
            number = int(np.flatnonzero(~np.isfinite(found))[0])
            raise self.fault("scores", f"is {found[number]} for token {number}, must be finite")
        return found

    def vocabulary(self, spells_spaces: bool) -> dict[str, int]:
        """The id of each token by its text, in ascending order. Ids without a token, which only pad
        the embedding table, are left out.

        spells_spaces: the tokenizer writes a space as a letter. Converters replace this letter in
        user-defined tokens, which is undone here for tokens of spaces alone."""
        texts = list(self._spelled()) if spells_spaces else self._texts
        numbered = [each for each in enumerate(texts) if not is_padding(*each)]
        found = {text: number for number, text in numbered}
        if not found:
            raise self.fault("tokens", "has no token but those that pad the vocabulary")
        if len(found) < len(numbered):
            seen: dict[str, int] = {}
            for number, text in numbered:
                if (first := seen.setdefault(text, number)) != number:
                    raise self.fault("tokens", f"has {text!r:.80} as token {first} and {number}")
        return found

    def _spelled(self) -> Iterator[str]:
        taken = set(self._texts)
        for text, kind in zip(self._texts, self.types, strict=True):
            spelled = text
            if kind == TokenType.USER_DEFINED and not text.strip(" "):
                spelled = SPACE * len(text)
            yield text if spelled in taken else spelled


def is_padding(number: int, text: str) -> bool:
    """Whether an id has no token. Converters name such ids after their number."""
    return not text or (text.startswith("[PAD") and text == f"[PAD{number}]")

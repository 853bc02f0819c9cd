"""Two ways to turn text into ids and back behind one small interface.

``tokenizers`` reads tokenizer.json itself. Tokenizers that exist only as Python code come through
transformers; they are slower, and otherwise the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from tokenizers import Tokenizer as RustTokenizer
from tokenizers.decoders import DecodeStream

from engine.text.token_lengths import max_chars_per_token

REPLACEMENT = "\ufffd"  # stands for bytes that are not a whole character

Step = Callable[[list[int]], str | None]
"""Takes the next ids of a growing sequence, gives the text they complete or ``None``."""


class Backend(Protocol):
    """Text to ids and back. Methods raise nothing for ids below ``vocab_size``."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """Ids of each text. Lets other threads run where it can."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str: ...
    def token_id(self, token: str) -> int | None: ...
    def max_chars_per_token(self) -> int | None:
        """Characters of a text for each of its tokens, at most; ``None`` if there is no bound."""

    def stream(self, context: list[int], skip_special_tokens: bool) -> Step:
        """Decode what follows ``context``, whose own text is not repeated.

        A step raises if the text it already gave out turns out to be wrong.
        """


class RustBackend:
    """A tokenizer of the ``tokenizers`` library."""

    def __init__(self, tokenizer: RustTokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        # Of one text too: ``encode`` lets no other thread run meanwhile, and takes longer.
        return [
            encoding.ids
            for encoding in self._tokenizer.encode_batch_fast(
                texts, add_special_tokens=add_special_tokens
            )
        ]

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def max_chars_per_token(self) -> int | None:
        return max_chars_per_token(self._tokenizer)

    def stream(self, context: list[int], skip_special_tokens: bool) -> Step:
        stream = DecodeStream(ids=context, skip_special_tokens=skip_special_tokens)
        return partial(stream.step, self._tokenizer)


class PythonBackend:
    """A tokenizer that transformers runs in Python."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    def encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        encode = partial(self._tokenizer.encode, add_special_tokens=add_special_tokens)
        return [list(encode(text)) for text in texts]

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token_id(self, token: str) -> int | None:
        found = self._tokenizer.get_vocab().get(token)
        return None if found is None else int(found)

    def max_chars_per_token(self) -> int | None:
        return None

    def stream(self, context: list[int], skip_special_tokens: bool) -> Step:
        return WindowStream(self, context, skip_special_tokens)


class WindowStream:
    """Decodes a short window twice per step: ids whose text is out, and these with the new ones.

    The difference is the new text. It is withheld while it ends in the middle of a character.
    """

    def __init__(self, backend: Backend, context: list[int], skip_special_tokens: bool) -> None:
        self._decode = partial(backend.decode, skip_special_tokens=skip_special_tokens)
        self._window = list(context)
        self._num_out = len(context)  # ids of the window whose text is out

    def __call__(self, token_ids: list[int]) -> str | None:
        self._window += token_ids
        before = self._decode(self._window[: self._num_out])
        text = self._decode(self._window)
        if len(text) <= len(before) or text.endswith(REPLACEMENT):
            return None
        if not text.startswith(before):
            raise ValueError("the text already given out has changed")
        del self._window[: self._num_out]
        self._num_out = len(self._window)
        return text[len(before) :]

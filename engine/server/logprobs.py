"""Log-probabilities as clients read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engine.messages.requests import CompletionOutput, Logprob
from engine.text.tokenizer import Tokenizer

Position = dict[int, Logprob]
LEAST = -9999.0  # what OpenAI says of what cannot be: JSON has no infinity


class TokenNames:
    """Tokens as text and as bytes."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def bytes_of(self, token_id: int) -> bytes | None:
        """What it adds to a text. ``None``: not known."""
        return None if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def text_of(self, token_id: int, *, is_unique: bool = False) -> str:
        """Its text. Of a part of a character U+FFFD, or, to be unique, as OpenAI's completions
        write it: ``bytes:\\xf0\\x9f``."""
        found = self.bytes_of(token_id)
        if found is None:
            return f"token_id:{token_id}"
        try:
            return found.decode()
        except UnicodeDecodeError:
            if is_unique:
                return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)
            return found.decode(errors="replace")


def chat_logprobs(
    completion: CompletionOutput, num: int, names: TokenNames
) -> dict[str, Any] | None:
    """As chat completions have them, with the ``num`` most likely tokens."""
    if completion.logprobs is None:
        return None
    content = []
    for token, at in zip(completion.token_ids, completion.logprobs, strict=True):
        top = [_entry(other, at[other], names) for other in _best(at, num)]
        content.append(_entry(token, at[token], names) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


class TextLogprobs:
    """As completions have them, of one text as it grows."""

    def __init__(self, num: int, names: TokenNames) -> None:
        """num: of the most likely tokens."""
        self._num = num
        self._names = names
        self._offset = 0  # in the text, of the next token

    def of(
        self, token_ids: Sequence[int], positions: Iterable[Position | None]
    ) -> dict[str, list[Any]]:
        """Of its next tokens; ``None`` of one that nothing predicts."""
        tokens, chosen, top, offsets = [], [], [], []
        for token, at in zip(token_ids, positions, strict=True):
            tokens.append(self._names.text_of(token, is_unique=True))
            chosen.append(None if at is None else _finite(at[token].logprob))
            top.append(None if at is None else self._top(token, at))
            offsets.append(self._offset)
            self._offset += self._num_characters(token)
        return {
            "tokens": tokens,
            "token_logprobs": chosen,
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _top(self, token: int, at: Position) -> dict[str, float]:
        """The most likely tokens and, if it is none of them, the one that was chosen."""
        top: dict[str, float] = {}
        for each in dict.fromkeys([*_best(at, self._num), token]):  # of equal texts the likelier
            name = self._names.text_of(each, is_unique=True)
            top.setdefault(name, _finite(at[each].logprob))
        return top

    def _num_characters(self, token: int) -> int:
        """That begin in it."""
        found = self._names.bytes_of(token) or b""
        return sum(byte & 0xC0 != 0x80 for byte in found)


def prompt_logprobs(positions: Sequence[Position | None] | None) -> list[Any] | None:
    """As vLLM has them: by token id, ``None`` for the first token."""
    if positions is None:
        return None
    return [
        None
        if at is None
        else {
            str(token): {
                "logprob": _finite(each.logprob),
                "rank": each.rank,
                "decoded_token": each.decoded_token,
            }
            for token, each in at.items()
        }
        for at in positions
    ]


def _entry(token: int, each: Logprob, names: TokenNames) -> dict[str, Any]:
    found = names.bytes_of(token)
    return {
        "token": names.text_of(token),
        "logprob": _finite(each.logprob),
        "bytes": None if found is None else list(found),
    }


def _best(at: Position, num: int) -> list[int]:
    return sorted(at, key=lambda token: at[token].rank or 0)[:num]


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)

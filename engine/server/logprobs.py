"""Convert log-probabilities to the formats of completions, chat completions and vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.messages.requests import CompletionOutput, Logprob
from engine.server.offsets import TextOffsets, prompt_offsets
from engine.text.tokenizer import Tokenizer

Position = dict[int, Logprob]
LEAST = -9999.0  # stands for minus infinity, as in OpenAI's API: JSON has no infinity


class TokenNames:
    """Texts and bytes of token ids."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer

    def bytes_of(self, token_id: int) -> bytes | None:
        """The bytes that a token adds to a text; ``None`` without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.token_bytes(token_id)

    def text_of(self, token_id: int, *, is_unique: bool = False) -> str:
        """The token's text. Bytes that are not valid UTF-8 become U+FFFD or, if ``is_unique``, an
        escape such as ``bytes:\\xf0\\x9f``, which OpenAI's completions use."""
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
    """Log-probabilities as in chat completions, with the ``num`` likeliest tokens per position."""
    if completion.logprobs is None:
        return None
    content = []
    for token, at in zip(completion.token_ids, completion.logprobs, strict=True):
        top = [_entry(other, at[other], names) for other in _best(at, num)]
        content.append(_entry(token, at[token], names) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


class LogprobEntry(NamedTuple):
    """A token and the log-probabilities at its position; ``None`` at a prompt's first token."""

    token: int
    at: Position | None


class TextLogprobs:
    """Collects the log-probabilities of one streamed text in the format of completions."""

    def __init__(self, num: int, names: TokenNames, offsets: TextOffsets) -> None:
        """num: number of likely tokens per position; offsets: finds character offsets of tokens."""
        self._num = num
        self._names = names
        self._offsets = offsets
        self._num_shown = 0  # characters of the text so far
        self._waiting: list[LogprobEntry] = []  # tokens that were not returned yet
        self._begins: list[int] = []  # offsets of the first tokens in ``_waiting``

    def echo(
        self,
        text: str,
        token_ids: Sequence[int],
        positions: Sequence[Position | None],
        *,
        may_be_cut: bool = False,
    ) -> None:
        """Add the prompt before generated text. positions: log-probabilities at each prompt token;
        may_be_cut: ``token_ids`` may lack the beginning of the prompt."""
        tokenizer = self._names.tokenizer
        begins = [0] * len(token_ids)
        if tokenizer is not None:
            begins = prompt_offsets(tokenizer, text, token_ids, may_be_cut=may_be_cut)
        self._waiting += [LogprobEntry(*each) for each in zip(token_ids, positions, strict=True)]
        self._begins += begins
        self._num_shown += len(text)

    def of(self, completion: CompletionOutput) -> dict[str, list[Any]]:
        """Return the log-probabilities of the tokens whose text is complete after this output.
        Tokens whose text may begin a stop string are returned by a later call, or never."""
        offsets = self._offsets
        self._num_shown += len(completion.text)
        offsets.add_text(completion.text)
        for token, at in zip(completion.token_ids, completion.logprobs or (), strict=True):
            self._waiting.append(LogprobEntry(token, at))
            offsets.add_token(token)
        self._begins += offsets.take(is_last=completion.finished)
        num = len(self._begins)
        entries, self._waiting = self._waiting[:num], self._waiting[num:]
        begins, self._begins = self._begins, []
        return {
            "tokens": [self._names.text_of(each.token, is_unique=True) for each in entries],
            "token_logprobs": [
                None if each.at is None else _finite(each.at[each.token].logprob)
                for each in entries
            ],
            "top_logprobs": [
                None if each.at is None else self._top(each.token, each.at) for each in entries
            ],
            "text_offset": [min(begin, self._num_shown) for begin in begins],
        }

    def _top(self, token: int, at: Position) -> dict[str, float]:
        """Log-probabilities of the most likely tokens and of ``token``, by the token's text."""
        top: dict[str, float] = {}
        for each in dict.fromkeys([*_best(at, self._num), token]):
            name = self._names.text_of(each, is_unique=True)
            top.setdefault(name, _finite(at[each].logprob))
        return top


def prompt_logprobs(positions: Sequence[Position | None] | None) -> list[Any] | None:
    """Log-probabilities by token id for each position of a prompt (``None`` for the first)."""
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

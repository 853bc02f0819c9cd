"""What clients are told: whole answers, and chunks of them."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.messages.requests import CompletionOutput, Logprob, RequestOutput
from engine.server.errors import ApiError

LOST = "\ufffd"  # in the text of a token that is a part of a character


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens that were read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Counted:
    """Tokens of one answer, of all its prompts and sequences."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}  # tokens, and those that were cached
        self._written = 0

    def add(self, place: int, output: RequestOutput) -> None:
        """place: of the prompt."""
        self._prompts[place] = (len(output.prompt_token_ids), output.num_cached_tokens)
        self._written += sum(len(each.token_ids) for each in output.outputs)

    @property
    def usage(self) -> Usage:
        read = sum(num for num, _ in self._prompts.values())
        cached = sum(num for _, num in self._prompts.values())
        return Usage(read, self._written, read + self._written, PromptDetails(cached))


def reason_of(completion: CompletionOutput) -> str | None:
    """Why the text has ended. Raises ``ApiError`` for an end that is no answer."""
    reason = completion.finish_reason
    if reason in (None, "stop", "length"):
        return reason
    if reason == "deadline":
        raise ApiError(408, completion.error or "the time for this request is over")
    if reason == "abort":
        raise ApiError(503, "the request was aborted: the server is ending", code="aborted")
    raise ApiError(500, completion.error or "the request failed", code="request_failed")


def bytes_of(text: str) -> list[int] | None:
    """Of a token's text; ``None`` if it is a part of a character."""
    return None if LOST in text else list(text.encode())


def chat_logprobs(completion: CompletionOutput, num: int) -> dict[str, Any] | None:
    """As chat completions have them, with the ``num`` most likely tokens."""
    if completion.logprobs is None:
        return None
    content = []
    for token, at in zip(completion.token_ids, completion.logprobs, strict=True):
        content.append(_entry(at[token]) | {"top_logprobs": [_entry(e) for e in _best(at, num)]})
    return {"content": content, "refusal": None}


def text_logprobs(completion: CompletionOutput, num: int, offset: int) -> dict[str, Any] | None:
    """As completions have them; offset: of the text among what was sent."""
    if completion.logprobs is None:
        return None
    tokens, chosen, top, offsets = [], [], [], []
    for token, at in zip(completion.token_ids, completion.logprobs, strict=True):
        text = at[token].decoded_token or ""
        tokens.append(text)
        chosen.append(_finite(at[token].logprob))
        top.append({e.decoded_token or "": _finite(e.logprob) for e in _best(at, num)})
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": tokens,
        "token_logprobs": chosen,
        "top_logprobs": top,
        "text_offset": offsets,
    }


def _entry(each: Logprob) -> dict[str, Any]:
    text = each.decoded_token or ""
    return {"token": text, "logprob": _finite(each.logprob), "bytes": bytes_of(text)}


def _best(at: dict[int, Logprob], num: int) -> list[Logprob]:
    return sorted(at.values(), key=lambda each: each.rank or 0)[:num]


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI says -9999 of what cannot be."""
    return max(logprob, -9999.0)

"""Client to core. Adds and aborts travel on one ordered channel."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.messages.params import SamplingParams


class AddRequest(msgspec.Struct, array_like=True, frozen=True, tag="add"):
    """One sequence to generate. ``n > 1`` was split into n of these before it came here.

    ``seed`` keys the sampling noise together with the position of each token. The request ends at
    any of ``eos_token_ids`` (empty if they are to be ignored) and of ``params.stop_token_ids``.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    arrival_time: float
    max_tokens: int  # resolved: never None
    eos_token_ids: list[int] = []
    priority: int = 0
    user: str = ""
    deadline: float | None = None
    cache_salt: str | None = None
    client_index: int = 0
    bad_words_ids: list[list[int]] = []  # SamplingParams.bad_words, as token ids
    hints: dict[str, Any] | None = None  # for policies; untouched by the engine


class AbortRequests(msgspec.Struct, array_like=True, frozen=True, tag="abort"):
    """Stop these requests; unknown ids do nothing."""

    request_ids: list[str]


class Control(msgspec.Struct, array_like=True, frozen=True, tag="control"):
    """A named utility call (reset_prefix_cache, pause, ...)."""

    call_id: int
    name: str
    args: list[Any] = []


ClientMessage = AddRequest | AbortRequests | Control

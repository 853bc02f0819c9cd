"""A request as the core gets it."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.messages.params import SamplingParams


class MediaItem(msgspec.Struct, array_like=True, frozen=True):
    """An image, sound or the like in a prompt: ``length`` placeholder tokens from ``offset`` on.

    ``hash`` names its content: equal hashes mean equal encoder output.
    """

    offset: int
    length: int
    hash: str


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
    adapter: str | None = None  # name of the LoRA adapter
    media: list[MediaItem] = []  # in order of offset
    grammar: str | None = None  # what the output must follow, in the form its backend knows
    kv_transfer_params: dict[str, Any] | None = None  # for the KV connector
    queue_deadline: float | None = None  # if not started by then, it ends with reason "deadline"
    end_deadline: float | None = None  # not finished by then: the same; ``deadline`` is only a wish

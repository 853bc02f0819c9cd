"""Requests that nobody should send, as they come over the wire, and what must become of each.

`refused`: answered with a reason, nothing else happens. `fault`: not even read. `error`: taken,
and ends alone with that reason. `ends`: strange but legal; it ends like any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest
from support.live_core import MAX_MODEL_LEN, VOCAB_SIZE

FIELDS = [each.name for each in msgspec.structs.fields(AddRequest)]
FAILING = 666  # a prompt with this token fails in the worker
NAN, INF = math.nan, math.inf


@dataclass(frozen=True)
class Poison:
    """A request with something wrong in it. ``raw`` replaces the whole of it."""

    name: str
    becomes: str
    fields: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    raw: Any = None

    def request(self, request_id: str, now: float) -> Any:
        """The plain value that travels."""
        if self.raw is not None:
            return self.raw
        good = AddRequest(request_id, [1, 2, 3], SamplingParams(), 0, now, 4)
        values = msgspec.to_builtins(good)
        values[1 + FIELDS.index("params")] = {"temperature": 0.0, **self.params}
        for name, value in self.fields.items():
            values[1 + FIELDS.index(name)] = value
        return values


def _params(becomes: str, *cases: tuple[str, Any]) -> list[Poison]:
    return [Poison(f"{name}={value!r:.30}", becomes, params={name: value}) for name, value in cases]


def _fields(becomes: str, *cases: tuple[str, Any]) -> list[Poison]:
    return [Poison(f"{name}={value!r:.30}", becomes, {name: value}) for name, value in cases]


POISON = [
    *_params(
        "fault",
        *(("temperature", value) for value in (NAN, INF, -INF, -1.0, "hot", None)),
        *(("top_p", value) for value in (0.0, 1.5, NAN, -0.1)),
        *(("top_k", value) for value in (-2, 1.5)),
        *(("min_p", value) for value in (-1.0, 2.0, NAN)),
        *(("presence_penalty", value) for value in (3.0, NAN)),
        *(("frequency_penalty", value) for value in (-3.0, INF)),
        *(("repetition_penalty", value) for value in (0.0, -1.0, NAN, INF)),
        *(("n", value) for value in (0, -1, "2")),
        *(("min_tokens", value) for value in (-1, 10**9)),
        *(("logprobs", value) for value in (-2, 0.5)),
        ("prompt_logprobs", -2),
        ("logit_bias", {1: NAN}),
        ("logit_bias", {-1: 1.0}),
        ("allowed_token_ids", []),
        ("stop_token_ids", [-1]),
        ("logit_bias", {"x": 1.0}),
        ("stop", [""]),
        ("no_such_parameter", 1),
    ),
    *_params(
        "refused",
        ("logit_bias", {VOCAB_SIZE: 1.0}),
        ("allowed_token_ids", [VOCAB_SIZE]),
    ),
    *_fields(
        "refused",
        ("prompt_token_ids", []),
        ("prompt_token_ids", [-1]),
        ("prompt_token_ids", [VOCAB_SIZE]),
        ("prompt_token_ids", [2**62]),
        ("prompt_token_ids", [1] * MAX_MODEL_LEN),
        ("prompt_token_ids", [1] * 100_000),
        ("max_tokens", 0),
        ("max_tokens", -(2**62)),
        ("max_tokens", 2**62),
        ("eos_token_ids", [-7]),
        ("bad_words_ids", [[VOCAB_SIZE]]),
        ("seed", 2**63),
        ("priority", 2**63),
        ("arrival_time", NAN),
        ("arrival_time", -INF),
        ("deadline", NAN),
        ("queue_deadline", NAN),
        ("end_deadline", NAN),
        ("end_deadline", -INF),
        ("adapter", "none-such"),
        ("grammar", "}{"),
        ("kv_transfer_params", {"do": "it"}),
        ("media", [[0, 2, "h"]]),
        ("media", [[-5, 10**9, "h"]]),
    ),
    *_fields(
        "fault",
        ("request_id", 17),
        ("request_id", None),
        ("prompt_token_ids", None),
        ("prompt_token_ids", ["a"]),
        ("prompt_token_ids", [1.5]),
        ("max_tokens", "many"),
        ("params", []),
        ("media", [[1]]),
        ("hints", [1]),
    ),
    Poison("a prompt that fails", "error", {"prompt_token_ids": [FAILING]}),
    Poison("the end of a prompt fails", "error", {"prompt_token_ids": [1] * 300 + [FAILING]}),
    Poison("nothing", "fault", raw=[]),
    Poison("no array", "fault", raw={"add": 1}),
    Poison("a name alone", "fault", raw=["add"]),
    Poison("another type", "fault", raw=["bye"]),
    Poison("a hundred arrays", "fault", raw=["add", *([[]] * 100)]),
    *_fields(
        "ends",
        ("client_index", 10**9),
        ("client_index", -1),
        ("priority", -(2**63)),
        ("user", "\x00" * 10_000),
        ("cache_salt", ""),
        ("hints", {"tier": {"a": [{}] * 100}}),
    ),
]

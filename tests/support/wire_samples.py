"""Good messages to damage, by the union of messages that one reader knows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from engine.ipc.codec import MessageEncoder
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest
from engine.messages.wire import PROTOCOL_VERSION, Call, FromClient, Hello, Submit
from support.wire_frames import DIRECTIONS, FULL_REQUEST, REQUEST

GRAMMAR = AddRequest(
    "g", [7] * 20, SamplingParams(), 0, 0.0, 4, grammar="root", kv_transfer_params={"remote": [1]}
)

SAMPLES: dict[Any, list[msgspec.Struct]] = {
    union: list(messages.values()) for messages, union in DIRECTIONS
}
SAMPLES[FromClient] += [
    Submit(2, [REQUEST, FULL_REQUEST, GRAMMAR]),
    Call(4, "stats"),
    Call(5, "echo", [{"a": [1, 2.5, None, b"bytes"]}]),
    Call(6, "reset_prefix_cache", [False]),
]


def harmless_to_others(token: bytes) -> list[msgspec.Struct]:
    """What a client may say to a core with this token without stopping others."""
    return [
        Hello(PROTOCOL_VERSION, token, "me") if isinstance(message, Hello) else message
        for message in SAMPLES[FromClient]
        if not (isinstance(message, Call) and message.name == "pause")
    ]


def frames_of(messages: Iterable[msgspec.Struct]) -> list[bytes]:
    """Each of them as the one frame that it is."""
    encoder = MessageEncoder()
    return [encoder.encode(message) for message in messages]

"""A good message of every type, by the union of messages that one reader knows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from engine.ipc.channel import Envelope
from engine.ipc.codec import Encoder
from engine.ipc.shm import Place
from engine.messages.outputs import CoreOutputs, Finished, Started, TokenLogprobs
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest, MediaItem
from engine.messages.wire import (
    Abort,
    Aborted,
    Answer,
    Bye,
    Call,
    Credit,
    Dead,
    Failure,
    Fault,
    FromClient,
    FromControl,
    Health,
    Hello,
    Outputs,
    Ping,
    Probe,
    Refusal,
    Shutdown,
    Submit,
    Submitted,
    ToClient,
    ToControl,
    Welcome,
)

TOKEN = bytes(range(100, 116))

SHORT = AddRequest("fuzz-1", [1, 2, 3], SamplingParams(temperature=0.0), 0, 0.0, 2)
FULL = AddRequest(
    "fuzz-2",
    list(range(1, 40)),
    SamplingParams(
        temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, seed=7, stop=["a", "bc"], logprobs=2
    ),
    seed=2**40,
    arrival_time=12.5,
    max_tokens=3,
    eos_token_ids=[2, 3],
    priority=-1,
    user="someone",
    deadline=1e9,
    cache_salt="salt",
    bad_words_ids=[[4, 5], [6]],
    hints={"tier": "gold", "weight": 1.5, "list": [1, None, True]},
    queue_deadline=1e9,
    end_deadline=1e9,
)
STRANGE = AddRequest(
    "fuzz-3",
    [7] * 20,
    SamplingParams(temperature=1.0, logit_bias={5: -1.5}, allowed_token_ids=[1, 2, 3]),
    0,
    0.0,
    4,
    adapter="none-such",
    media=[MediaItem(0, 4, "hash")],
    grammar="root ::= 'a'",
    kv_transfer_params={"remote": [1, 2]},
)
BATCH = CoreOutputs(
    ["a", "b", "c"],
    [1, 70000, 3, 4],
    [1, 2, 1],
    1234.5,
    started=[Started(0, 16, 1234.25)],
    finished=[
        Finished(1, "stop", 2, num_preemptions=1, waits={"kv": 0.5}, events=[("queued", 1.0)]),
        Finished(2, "error", message="it failed"),
    ],
    logprobs={0: [TokenLogprobs([1, 5], [-0.5, -1.25], 1)]},
    prompt_logprobs={1: [TokenLogprobs([2], [-0.25], 3)]},
    finished_ids=["b", "c"],
)

SAMPLES: dict[Any, list[msgspec.Struct]] = {
    FromClient: [
        Hello(1, TOKEN, "a client"),
        Submit(1, [SHORT]),
        Submit(2, [FULL, SHORT, STRANGE]),
        Abort(3, ["fuzz-1", "fuzz-2"]),
        Call(4, "stats"),
        Call(5, "echo", [{"a": [1, 2.5, None, b"bytes"]}]),
        Call(6, "reset_prefix_cache", [False]),
        Credit(128),
        Bye(),
    ],
    ToClient: [
        Welcome(1, 3, "client-3/", 256, 512, 1000, [2], 400, 16, 99.5),
        Submitted(1, [Refusal(0, Failure("RefusedError", "full", 0.5))]),
        Aborted(3, [Finished(0, "abort")]),
        Answer(4, {"a": [1, 2.5]}, None),
        Answer(5, None, Failure("ConfigError", "not available")),
        Outputs(BATCH),
        Fault("not a message"),
        Dead("it died", "Traceback ..."),
        Probe(),
    ],
    ToControl: [Ping(TOKEN), Shutdown(TOKEN, 5.0), Shutdown(TOKEN)],
    FromControl: [Health("ready", 0.25, 1000, 64, 2), Fault("the token is not that of this core")],
    Envelope: [Envelope([None, Place(64, 4096, 7)], [5, 6])],
}


def frames_of(messages: Iterable[msgspec.Struct]) -> list[bytes]:
    """Each of them as the one frame that it is."""
    encoder = Encoder()
    return [encoder.encode(message) for message in messages]

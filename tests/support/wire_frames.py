"""One of every message of the wire, their recorded bytes, and bytes that are none."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec

from engine.messages.adapters import AdapterSource
from engine.messages.media import (
    DevicePixels,
    MediaContent,
    PixelArray,
    SharedArray,
    SharedPixels,
)
from engine.messages.params import SamplingParams
from engine.messages.pooling import PooledColumns, PoolingParams
from engine.messages.requests import (
    AddRequest,
    CoreOutputs,
    Finished,
    MediaItem,
    Started,
    TokenLogprobs,
)
from engine.messages.stats import SchedulerStats
from engine.messages.wire import (
    PROTOCOL_VERSION,
    Abort,
    Answer,
    Bring,
    Bye,
    CacheNews,
    Call,
    Credit,
    Dead,
    Failure,
    Fault,
    Follow,
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

GOLDEN = Path(__file__).parents[1] / "golden" / "wire.txt"
TOKEN = bytes(range(16))
STATS = SchedulerStats(1, 2, 3, 0.5, 4, 5, 6, 7, 8, 9, blocked="x")
REQUEST = AddRequest(
    "a", [1, 2, 300], SamplingParams(temperature=0.5, max_tokens=4, stop=["x"]), 7, 1.5, 4, [2]
)
FULL_REQUEST = AddRequest(
    "b",
    [1],
    SamplingParams(logit_bias={5: 1.0}, logprobs=2, allowed_token_ids=[1]),
    7,
    1.5,
    16,
    priority=-1,
    user="u",
    deadline=2.0,
    cache_salt="s",
    bad_words_ids=[[1, 2]],
    hints={"k": [None, True, "v"]},
    adapter="l",
    media=[MediaItem(0, 1, "h")],
    queue_deadline=3.0,
    end_deadline=4.0,
    tbt=0.5,
    adapter_source=AdapterSource("/adapters/l", 3, True),
    pooling=PoolingParams(task="embed", dimensions=2),
)
BATCH = CoreOutputs(
    ["a", "b"],
    [70_000, 5, 6],
    [1, 2],
    2.5,
    started=[Started(0, 16, 2.0, 1, {"seats": 0.25}, [("queued", 1.0), ("scheduled", 2.0)])],
    finished=[
        Finished(1, "stop", 6, waits={"seats": 0.5}, events=[("queued", 1.0)]),
        Finished(0, "error", None, "it fell over", code="request_failed"),
    ],
    logprobs={0: [TokenLogprobs([1, 2], [-0.5, -1.0], 1)]},
    pooled=PooledColumns([1], [2], [2], b"\x00\x00\x80?\x00\x00\x00\xc0"),
)
PLACES = {"pixel_values": SharedArray("<f4", [1, 1], 64)}
SHARED = SharedPixels("boot pid:[1] user:0", 10, 5, 77, 128, PLACES)
RETURNS = SharedPixels("boot pid:[1] user:0", 10, 6, 78, 64, {})
ON_DEVICE = DevicePixels("GPU-1", b"handle", 1024, True, PLACES, 3, 9, RETURNS)
TO_CORE: dict[str, Any] = {
    "hello": Hello(PROTOCOL_VERSION, TOKEN, "me"),
    "submit": Submit(0, [REQUEST]),
    "submit, all fields": Submit(1, [FULL_REQUEST]),
    "bring": Bring(["a"], MediaContent("h", {"pixel_values": PixelArray("<f4", [1, 1], b"1234")})),
    "bring, no content": Bring(["a"], MediaContent("h", error="it is damaged")),
    "bring, handles": Bring(["a"], MediaContent("h", shared=SHARED, device=ON_DEVICE)),
    "abort": Abort(["a", "b"]),
    "call": Call(3, "pause", ["new"]),
    "credit": Credit(128),
    "follow": Follow(),
    "bye": Bye(),
}
TOO_LONG = Failure("RequestError", "no", None, "prompt", "context_length_exceeded")
TO_CLIENT: dict[str, Any] = {
    "welcome": Welcome(PROTOCOL_VERSION, 0, "", 256, 2048, 1000, [2], 400, 16, 1.5, "/models/tiny"),
    "submitted": Submitted(0, 1.5),
    "submitted, one refused": Submitted(1, 1.5, [Refusal(0, Failure("RefusedError", "full", 0.5))]),
    "submitted, one too long": Submitted(2, 1.5, [Refusal(0, TOO_LONG)]),
    "answer": Answer(3, True),
    "answer, statistics": Answer(4, msgspec.to_builtins(STATS)),
    "answer, failed": Answer(3, None, Failure("ConfigError", "no")),
    "outputs": Outputs(BATCH),
    "outputs, one token each": Outputs(CoreOutputs(["a"], [5], None, 2.5)),
    "fault": Fault("not a message"),
    "dead": Dead("the engine core died", "Traceback"),
    "probe": Probe(),
    "cache, whole": CacheNews(
        0, True, bytes(range(16)), b"", 512, b"key and root", adapters={"sql": "digest"}
    ),
    "cache, changes": CacheNews(1, False, bytes(8), bytes(range(8)), 0),
}
CONTROL: dict[str, Any] = {"ping": Ping(TOKEN), "shutdown": Shutdown(TOKEN, 5.0)}
FROM_CONTROL: dict[str, Any] = {"health": Health("ready", 0.25, 10, 2, 1)}
DIRECTIONS = (
    (TO_CORE, FromClient),
    (TO_CLIENT, ToClient),
    (CONTROL, ToControl),
    (FROM_CONTROL, FromControl),
)


def recorded() -> dict[str, bytes]:
    lines = GOLDEN.read_text(encoding="utf-8").splitlines() if GOLDEN.exists() else []
    return {name: bytes.fromhex(code) for name, _, code in (li.partition(": ") for li in lines)}


HOSTILE = [
    b"",
    b"\xc1",
    b"\xdd\xff\xff\xff\xff",
    b"\x93\xa6submit\x01\xdd\xff\xff\xff\xff",
    b"\x94\xa4call\x01\xa1x" + b"\x91" * 200_000,
    b"\x94\xa4call\x01\xa1x\x91\x81\x81\x01\x02\x03",
    b"\x94\xa4call\x01\xa1x\x91\xdf\xff\xff\xff\xff",
    b"\x94\xa4call\x01\xa1x\x91\xdb\xff\xff\xff\xff",
    b"\x94\xa4call\x01\xa1x\x91\xc6\xff\xff\xff\xff",
    b"\xa5hello",
    b"\x91\xa7unknown",
    b"\x91\xa5hello",
    b"\x80",
    b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    b"PK\x03\x04archive/data.pkl",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    *(b"\x94\xa4call\x01\xa1x\x91\xd4" + bytes([code, 0]) for code in range(128)),
]


def mutated(frame: bytes, dice: random.Random) -> bytes:
    """The frame with a few random changes: bytes, cuts, doubled and swapped parts."""
    data = bytearray(frame)
    for _ in range(dice.randint(1, 6)):
        at, kind = dice.randrange(len(data) + 1), dice.randrange(6)
        if kind == 0 and at < len(data):
            data[at] = dice.randrange(256)
        elif kind == 1:
            del data[at : at + dice.randint(1, 8)]
        elif kind == 2:
            data[at:at] = dice.randbytes(dice.randint(1, 8))
        elif kind == 3 and at < len(data):
            data[at] ^= 1 << dice.randrange(8)
        elif kind == 4:
            data[at:at] = data[at : at + dice.randint(1, 30)]
        else:
            lengths = (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9")
            data[at:at] = dice.choice(lengths) + dice.randbytes(4)
    return bytes(data)

"""The bytes on the wire are the recorded ones, and no other bytes do harm."""

from __future__ import annotations

import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from wire_frames import DIRECTIONS, GOLDEN, HOSTILE, REQUEST, mutated, recorded

from engine.errors import WireError
from engine.ipc.codec import Decoder, Encoder
from engine.messages.outputs import CoreOutputs, Finished, Started, TokenLogprobs
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest, MediaItem
from engine.messages.stats import SchedulerStats
from engine.messages.wire import Call, Failure, FromClient, Refusal, Submit, Submitted, ToClient

DOCUMENT = Path(__file__).parents[2] / "docs" / "wire.md"
MESSAGES = [
    pytest.param(name, message, union, id=name)
    for messages, union in DIRECTIONS
    for name, message in messages.items()
]


def test_bytes_are_the_recorded_ones() -> None:
    """Appending fields changes them, and is allowed: METRONOME_UPDATE_GOLDEN=1 records them."""
    encode = Encoder().encode
    frames = {n: encode(m) for messages, _ in DIRECTIONS for n, m in messages.items()}
    if os.environ.get("METRONOME_UPDATE_GOLDEN"):
        text = "".join(f"{name}: {frame.hex(' ')}\n" for name, frame in frames.items())
        GOLDEN.write_text(text, encoding="utf-8")
    assert frames == recorded()


@pytest.mark.parametrize(("name", "message", "union"), MESSAGES)
def test_recorded_bytes_are_read(name: str, message: Any, union: Any) -> None:
    assert Decoder[Any](union).decode([recorded()[name]]) == message


def test_every_message_is_recorded_and_documented() -> None:
    kinds = {kind for _, union in DIRECTIONS for kind in union.__args__}
    assert kinds == {type(m) for messages, _ in DIRECTIONS for m in messages.values()}
    text = DOCUMENT.read_text(encoding="utf-8")
    structs = {*kinds, Failure, Refusal, AddRequest, CoreOutputs, Started, Finished, TokenLogprobs}
    for kind in structs | {SchedulerStats, MediaItem}:
        names = [field.name for field in msgspec.structs.fields(kind)]
        tag = kind.__struct_config__.tag
        first = [f'"{tag}"'] if tag else []
        shown = f"`[{', '.join(first + names)}]`"
        assert shown in text, f"docs/wire.md lacks {shown}"
    for field in msgspec.structs.fields(SamplingParams):
        assert f"`{field.name}`" in text, f"docs/wire.md lacks SamplingParams.{field.name}"


def test_older_and_newer_peers_are_understood() -> None:
    """Fields are appended: what an older one leaves out has its default, what is new is passed."""
    decoder: Decoder[Any] = Decoder(ToClient)
    encode = msgspec.msgpack.encode
    assert decoder.decode([encode(["submitted", 3])]) == Submitted(3)
    assert decoder.decode([encode(["submitted", 3, [], "new", {"more": 1}])]) == Submitted(3)


@pytest.mark.parametrize("frame", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_bytes_are_a_wire_error(frame: bytes) -> None:
    with pytest.raises(WireError):
        Decoder[Any](FromClient).decode([frame])


@pytest.mark.parametrize("count", [0, 2, 5])
def test_a_message_is_one_frame(count: int) -> None:
    with pytest.raises(WireError, match=f"one frame, this one has {count}"):
        Decoder[Any](FromClient).decode([b"\x91\xa3bye"] * count)


@pytest.mark.parametrize(
    "value",
    [object(), 2**64, -(2**63) - 1, 1j, lambda: None],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_travel_is_a_wire_error(value: Any) -> None:
    with pytest.raises(WireError, match="cannot travel to another process"):
        Encoder().encode(Call(1, "echo", [value]))


def test_parameters_out_of_range_are_a_wire_error_that_names_them() -> None:
    frame = Encoder().encode(Submit(0, [REQUEST]))
    wrong = frame.replace(b"temperature\xcb\x3f\xe0", b"temperature\xcb\x7f\xf8")
    assert wrong != frame
    with pytest.raises(WireError, match="temperature is nan, must be in"):
        Decoder[Any](FromClient).decode([wrong])


def fuzz(num_frames: int, seed: int) -> int:
    """Decode so many mutated frames; how many of them were messages all the same."""
    dice, num_read = random.Random(seed), 0
    decoders: list[Decoder[Any]] = [Decoder(union) for _, union in DIRECTIONS]
    seeds = [*recorded().values(), *HOSTILE[:17]]
    for _ in range(num_frames):
        frame = mutated(dice.choice(seeds), dice)
        for decoder in decoders:
            try:
                decoder.decode([frame])
            except WireError:
                continue
            num_read += 1
    return num_read


def test_mutated_frames_are_messages_or_wire_errors(seed: int) -> None:
    tracemalloc.start()
    assert fuzz(20_000, seed) > 0
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20, "a frame of some hundred bytes made the decoder take memory"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_million_mutated_frames(seed: int) -> None:
    fuzz(10_000_000, seed)

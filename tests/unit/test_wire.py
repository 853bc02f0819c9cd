"""The bytes on the wire are the recorded ones, and no other bytes do harm."""

from __future__ import annotations

import os
import random
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.wire_frames import DIRECTIONS, GOLDEN, HOSTILE, REQUEST, mutated, recorded

from engine.errors import WireError
from engine.ipc.codec import MessageDecoder, MessageEncoder
from engine.messages.params import SamplingParams
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
    MAX_CALL_BYTES,
    Call,
    Failure,
    FromClient,
    Refusal,
    Submit,
    Submitted,
    ToClient,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "internals" / "wire.md"
MESSAGES = [
    pytest.param(name, message, union, id=name)
    for messages, union in DIRECTIONS
    for name, message in messages.items()
]


def test_bytes_are_the_recorded_ones() -> None:
    """Appending fields changes them, and is allowed: METRONOME_UPDATE_GOLDEN=1 records them."""
    encode = MessageEncoder().encode
    frames = {n: encode(m) for messages, _ in DIRECTIONS for n, m in messages.items()}
    if os.environ.get("METRONOME_UPDATE_GOLDEN"):
        text = "".join(f"{name}: {frame.hex(' ')}\n" for name, frame in frames.items())
        GOLDEN.write_text(text, encoding="utf-8")
    assert frames == recorded()


@pytest.mark.parametrize(("name", "message", "union"), MESSAGES)
def test_recorded_bytes_are_read(name: str, message: Any, union: Any) -> None:
    assert MessageDecoder[Any](union).decode([recorded()[name]]) == message


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
        assert shown in text, f"{DOCUMENT.name} lacks {shown}"
    for field in msgspec.structs.fields(SamplingParams):
        assert f"`{field.name}`" in text, f"{DOCUMENT.name} lacks SamplingParams.{field.name}"


def test_older_and_newer_peers_are_understood() -> None:
    """Fields are appended: what an older one leaves out has its default, what is new is passed."""
    decoder: MessageDecoder[Any] = MessageDecoder(ToClient)
    encode = msgspec.msgpack.encode
    told = Submitted(3, 1.5)
    assert decoder.decode([encode(["submitted", 3, 1.5])]) == told
    assert decoder.decode([encode(["submitted", 3, 1.5, [], "new", {"more": 1}])]) == told


@pytest.mark.parametrize("frame", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_bytes_are_a_wire_error(frame: bytes) -> None:
    with pytest.raises(WireError):
        MessageDecoder[Any](FromClient).decode([frame])


@pytest.mark.parametrize("count", [0, 2, 5])
def test_a_message_is_one_frame(count: int) -> None:
    with pytest.raises(WireError, match=f"has {count} frames, must have one"):
        MessageDecoder[Any](FromClient).decode([b"\x91\xa3bye"] * count)


@pytest.mark.parametrize(
    "value",
    [object(), 2**64, -(2**63) - 1, 1j, lambda: None],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_travel_is_a_wire_error(value: Any) -> None:
    with pytest.raises(WireError, match="cannot be sent to another process"):
        MessageEncoder().encode(Call(1, "echo", [value]))


def test_parameters_out_of_range_are_a_wire_error_that_names_them() -> None:
    frame = MessageEncoder().encode(Submit(0, [REQUEST]))
    wrong = frame.replace(b"temperature\xcb\x3f\xe0", b"temperature\xcb\x7f\xf8")
    assert wrong != frame
    with pytest.raises(WireError, match="temperature is nan, must be in"):
        MessageDecoder[Any](FromClient).decode([wrong])


def fuzz(num_frames: int, seed: int) -> int:
    """Decode so many mutated frames; how many of them were messages all the same."""
    dice, num_read = random.Random(seed), 0
    decoders: list[MessageDecoder[Any]] = [MessageDecoder(union) for _, union in DIRECTIONS]
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


MAX_NESTED = 10_000  # calls within C, by Python 3.12 and later; earlier ones stop sooner


def bytes_taken(decoder: MessageDecoder[Any], frame: bytes) -> int:
    """At the worst moment of decoding it."""
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    with suppress(WireError):
        decoder.decode([frame])
    return tracemalloc.get_traced_memory()[1] - before


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def test_mutated_frames_are_messages_or_wire_errors(seed: int) -> None:
    assert fuzz(20_000, seed) > 0


def test_a_damaged_frame_takes_no_more_memory_than_it_has_bytes(seed: int, traced: None) -> None:
    """Twice its bytes, and 64 KiB: what it says of its lengths counts for nothing. Lists of one
    element take 64 bytes each, and nest as deep as Python lets them."""
    dice, decoder = random.Random(seed), MessageDecoder[Any](FromClient | ToClient)
    seeds = [*recorded().values(), *HOSTILE[:17]]
    for frame in [*HOSTILE, *(mutated(dice.choice(seeds), dice) for _ in range(3000))]:
        nested = 64 * min(frame.count(b"\x91"), MAX_NESTED)
        assert bytes_taken(decoder, frame) <= 2 * len(frame) + (64 << 10) + nested, frame[
            :100
        ].hex()


def test_what_swells_most_when_it_is_read_is_bounded_too(traced: None) -> None:
    """Empty maps: a byte on the wire, 72 in memory. Requests, about as bad, are counted first."""
    decoder = MessageDecoder[Any](FromClient)
    num = MAX_CALL_BYTES - 20
    call = b"\x94\xa4call\x01\xa4echo\x91\xdd" + num.to_bytes(4, "big") + b"\x80" * num
    assert bytes_taken(decoder, call) < 80 * MAX_CALL_BYTES
    request = b"\x97\xa3add\xa1a\x90\x80\x00\x00\x04"
    num = 100_000
    submit = b"\x93\xa6submit\x01\xdd" + num.to_bytes(4, "big") + request * num
    assert bytes_taken(decoder, submit) < 64 << 10


class TooLarge(list[Any]):
    """There is no memory for a look at its entries."""

    def __getitem__(self, index: Any) -> Any:
        raise MemoryError


class TooLargeKind(type):
    @property
    def __name__(cls) -> str:
        raise MemoryError


class TooLargeToTell(metaclass=TooLargeKind):
    """There is no memory for what an error would say of it."""


def test_what_there_is_no_memory_for_is_a_wire_error() -> None:
    with pytest.raises(WireError):
        MessageDecoder[Any](FromClient).decode(TooLarge([b"\x91\xa3bye"]))
    with pytest.raises(WireError):
        MessageEncoder().encode(Call(1, "echo", [TooLargeToTell()]))


def test_an_object_that_cannot_even_be_shown_is_a_wire_error() -> None:
    class Shy:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    with pytest.raises(WireError, match="is a Shy, must be None"):
        MessageEncoder().encode(Call(1, "echo", [Shy()]))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_million_mutated_frames(seed: int) -> None:
    fuzz(10_000_000, seed)

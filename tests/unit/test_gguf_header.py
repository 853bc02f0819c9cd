"""Damaged and hostile GGUF files are refused with the reason."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType

from engine.errors import ModelError
from engine.gguf.config import read_config
from engine.gguf.directory import directory_of
from engine.gguf.header import read_gguf
from engine.models.gguf_weights import GgufCheckpoint
from tools.fuzz_gguf import WEIRD, File, Stored, Type, valid


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write the contents of a file."""

    def run(content: File | bytes, name: str = "x.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return run


Write = Callable[..., Path]


def refused(path: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read_config(read_gguf(path))
    assert str(path.parent) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 4 bytes, the file has only 0 left"),
        (b"GGML" + bytes(100), "does not begin with b'GGUF'"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(100), r"version 1\) that is not supported"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(100), r"big-endian\) that is not supported"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 1), f"states {2**63} tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), f"states {2**40} metadata keys"),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + bytes(100),
            f"a metadata key has {2**63} bytes, more than",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IQ", 8, 2**63),
            f"the value of 'k' has {2**63} bytes, more than",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 2**62),
            f"states {2**62} numbers in the value of 'k'",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, 2**62),
            f"states {2**62} strings in the value of 'k'",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 9, 1),
            "array of arrays",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 77),
            "has the unknown type 77",
        ),
    ],
)
def test_bytes_that_are_no_file(write: Write, content: bytes, message: str) -> None:
    refused(write(content), message)


def test_a_file_may_end_anywhere(write: Write) -> None:
    whole = valid("llama").encode()
    for length in range(0, len(whole), 97):
        refused(write(whole[:length]), "is damaged or truncated|does not begin")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Stored("x", (0, 32)), r"of type F32 has the shape \(0, 32\)"),
        (Stored("x", (2**62, 2**62, 2**62)), "should end at byte"),
        (Stored("x", (2, 33), kind=2), "of type Q4_0 has the shape"),
        (Stored("x", (1,) * 5), "has 5 dimensions, not 1 to 4"),
        (Stored("x", ()), "has 0 dimensions, not 1 to 4"),
        (Stored("x", (2, 32), offset=64), "in another"),
        (Stored("x", (2, 32), offset=2**63), "should end at byte"),
        (Stored("x", (2, 32), offset=3), "in another"),
        (Stored("x", (2, 32), kind=4), "the type 4, which is unknown"),
        (Stored("x" * 2000, (2, 32)), "the name of a tensor has 2000 bytes"),
        (Stored("output_norm.weight", (32,)), "the tensor 'output_norm.weight' is there twice"),
    ],
)
def test_tensors_that_cannot_be(write: Write, change: Stored, message: str) -> None:
    file = valid("llama")
    file.tensors.append(change)
    refused(write(file), message)


@pytest.mark.parametrize("value", [0, 1, 12, 2**31, -8])
def test_an_alignment_that_cannot_be(write: Write, value: int) -> None:
    file = valid("llama")
    file.metadata.append(("general.alignment", (Type.INT64, value)))
    refused(write(file), "general.alignment is")


COUNTS = ("context_length", "embedding_length", "block_count", "feed_forward_length")


@pytest.mark.parametrize("key", [*COUNTS, "attention.head_count", "attention.head_count_kv"])
@pytest.mark.parametrize("value", [each for each in WEIRD if each[0] is not Type.BOOL], ids=str)
def test_counts_of_another_kind(write: Write, key: str, value: tuple[Type, object]) -> None:
    file = valid("llama")
    file.metadata = [(k, value if k == f"llama.{key}" else v) for k, v in file.metadata]
    path = write(file)
    try:
        config = read_config(read_gguf(path))
    except ModelError as error:
        assert key in str(error) or "token_embd.weight has shape" in str(error)
    else:  # a possible number, which the shapes of tensors contradict later
        assert value[1] in (1, 3, 7, 0.5, 2**31 - 1) or value[0] is Type.ARRAY, config


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rope.freq_base", (Type.FLOAT32, float("nan")), "rope.freq_base is nan, must be a finite"),
        ("rope.freq_base", (Type.FLOAT32, -1.0), "is -1.0, must be a number above 0"),
        ("rope.freq_base", (Type.STRING, b"10000"), "is '10000', must be a finite number"),
        ("rope.scaling.type", (Type.STRING, b"new"), "is 'new', must be none, linear, yarn or"),
        ("rope.scaling.type", (Type.UINT32, 2), "is 2, must be a string"),
        ("attention.value_length", (Type.UINT32, 8), "keys of 16 and values of 8 elements"),
        (
            "attention.head_count_kv",
            (Type.ARRAY, (Type.INT32, [1, 2])),
            "is an array of 2 values, must be an array of 1 whole numbers",
        ),
        ("block_count", (Type.UINT32, 2**31 - 1), "is 2147483647, it has tensors of 1 layers"),
        ("context_length", (Type.UINT32, 2**30), "a whole number from 1 to 16777216"),
        ("expert_count", (Type.UINT32, 2**31 - 1), "its layers have 0 experts"),
    ],
)
def test_values_that_cannot_be(
    write: Write, key: str, value: tuple[Type, object], message: str
) -> None:
    file = valid("llama")
    file.metadata = [each for each in file.metadata if each[0] != f"llama.{key}"]
    file.metadata.append((f"llama.{key}", value))
    refused(write(file), message)


def test_an_unknown_architecture_lists_the_known_ones(write: Write) -> None:
    file = valid("llama")
    file.metadata[0] = ("general.architecture", (Type.STRING, b"rwkv7"))
    refused(write(file), "architecture 'rwkv7', which is not supported as GGUF; .*llama, qwen2")
    file.metadata[0] = ("general.architecture", (Type.UINT32, 3))
    refused(write(file), "does not name its general.architecture")


@pytest.mark.parametrize("kind", ["IQ2_XXS", "IQ3_S", "IQ1_M", "TQ1_0", "Q8_K"])
def test_a_type_that_is_not_read_is_named(write: Write, kind: str) -> None:
    file = valid("llama")
    file.tensors.append(Stored("output.weight", (2, 256), kind=GGMLQuantizationType[kind]))
    path = write(file)
    with pytest.raises(ModelError, match=f"tensors of type {kind} .* supported: .*Q4_K"):
        GgufCheckpoint(path)


# Split files


def split(number: object, count: object, tensors: slice, kind: Type = Type.UINT16) -> File:
    file = valid("llama")
    file.tensors = file.tensors[tensors]
    file.metadata += [("split.no", (kind, number)), ("split.count", (kind, count))]
    return file


def test_a_split_file_is_read_through_its_first_part(write: Write) -> None:
    first = write(split(0, 2, slice(0, 4)), "x-00001-of-00002.gguf")
    second = write(split(1, 2, slice(4, None)), "x-00002-of-00002.gguf")
    header = read_gguf(first)
    assert set(header.tensors) == {each.name for each in valid("llama").tensors}
    assert {stored.file for stored in header.tensors.values()} == {first, second}
    refused(second, "is part 2 of 2: give the first part, .*x-00001-of-00002.gguf")


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (None, r"lacks its parts x-00002-of-00002.gguf"),
        (split(0, 2, slice(4, None)), r"part 0 \(from 0\) of 2 by its metadata, and part 1 of 2"),
        (split(1, 3, slice(4, None)), "part 1 .* of 3 by its metadata"),
        (split(1, 2, slice(0, None)), "the tensor .* is in .*x-00001-of-00002.gguf, too"),
        (split([1], 2, slice(4, None), Type.UINT16), "its split.no is no whole number"),
    ],
)
def test_parts_that_do_not_belong_together(write: Write, second: File | None, message: str) -> None:
    first = write(split(0, 2, slice(0, 4)), "x-00001-of-00002.gguf")
    if second is not None:
        key, (_, value) = second.metadata[-2]
        if isinstance(value, list):
            second.metadata[-2] = key, (Type.ARRAY, (Type.UINT32, value))
        write(second, "x-00002-of-00002.gguf")
    refused(first, message)


def test_a_million_parts_are_not_looked_for(write: Write) -> None:
    refused(write(valid("llama"), "x-00001-of-99999.gguf"), "one of 99999 parts by its name")


# Paths


def test_a_path_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'.*/no.gguf' does not exist"):
        directory_of(str(tmp_path / "no.gguf"))
    (tmp_path / "dir.gguf").mkdir()
    with pytest.raises(ModelError, match=r"dir.gguf' is no regular file"):
        directory_of(str(tmp_path / "dir.gguf"))

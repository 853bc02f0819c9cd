"""Decodes the blocks of quantised GGUF tensors to matrices of integers, scales and offsets.

A block is a run of bytes that holds 32 or 256 adjacent elements of a row: their integers, and one
or several scales (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import IQ4_NL, MXFP4
from numpy.typing import NDArray

from kernels.quantized import Quantized

Kind = GGMLQuantizationType
Bytes = NDArray[np.uint8]
Parts = dict[str, NDArray[Any]]
"""Tensors of a matrix by their names in ``Quantized``, with one row for each block."""

PIECE_ELEMENTS = 1 << 17  # decoded at once, so that all steps work in a core's cache
NIBBLES = (0, 4)
PAIRS = (0, 2, 4, 6)
BITS = tuple(range(8))


class Form(NamedTuple):
    """How a type of tensors stores its elements."""

    bits: int
    group_size: int
    decode: Callable[[Bytes], Parts]
    """Takes blocks [B, bytes of a block]. Returns values [B, elements of a block], scales and
    offsets [B, groups of a block], outer scales and outer offsets [B, 1]."""
    codebook: tuple[int, ...] | None = None


def decode(kind: Kind, rows: torch.Tensor) -> Quantized:
    """Decode the bytes of rows, [N, bytes of a row] uint8, of a type in ``FORMS``.

    Dequantised in float32, the result has the same bits as the gguf package gives."""
    form = FORMS[kind]
    size, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = rows.numpy().reshape(-1, num_bytes)
    tensors: dict[str, Any] = {}
    at_once = PIECE_ELEMENTS // size
    for first in range(0, len(blocks), at_once):
        piece = slice(first, first + at_once)
        for name, part in form.decode(blocks[piece]).items():
            if name not in tensors:
                tensors[name] = torch.empty((len(blocks), part.shape[1]), dtype=DTYPES[part.dtype])
            tensors[name].numpy()[piece] = part
    tensors = {name: tensor.view(len(rows), -1) for name, tensor in tensors.items()}
    if kind is Kind.MXFP4:
        tensors["scales"] = tensors["scales"].bfloat16()  # holds powers of two exactly
    return Quantized(
        bits=form.bits,
        group_size=form.group_size,
        codebook=None if form.codebook is None else torch.tensor(form.codebook, dtype=torch.int16),
        outer_size=size if "outer_scales" in tensors else 0,
        **tensors,
    )


DTYPES = {
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int8): torch.int8,
    np.dtype(np.float16): torch.float16,
    np.dtype(np.float32): torch.float32,
}


def half(blocks: Bytes, first: int) -> NDArray[np.float16]:
    """The float16 number at byte ``first`` of each block, [B, 1]."""
    return np.ascontiguousarray(blocks[:, first : first + 2]).view("<f2")


def wide(blocks: Bytes, first: int) -> NDArray[np.float32]:
    """The float16 number at byte ``first`` of each block as float32, [B, 1]."""
    return half(blocks, first).astype(np.float32)


def unpacked(packed: Bytes, width: int, shifts: tuple[int, ...], mask: int) -> Bytes:
    """Take values out of packed bytes [B, n]. Each run of ``width`` bytes gives a run of ``width``
    values for each shift. Returns [B, n * number of shifts]."""
    runs = packed.reshape(len(packed), -1, 1, width)
    values = runs >> np.array(shifts, dtype=np.uint8)[:, None]
    values &= np.uint8(mask)
    return values.reshape(len(packed), -1)


def high_bits(packed: Bytes) -> Bytes:
    """The fifth bit of 32 values from 4 bytes a block: [B, 4] -> [B, 32], each 0 or 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def q4_0(blocks: Bytes) -> Parts:
    return {"values": unpacked(blocks[:, 2:], 16, NIBBLES, 15), "scales": half(blocks, 0)}


def q4_1(blocks: Bytes) -> Parts:
    values = unpacked(blocks[:, 4:], 16, NIBBLES, 15)
    return {"values": values, "scales": half(blocks, 0), "offsets": half(blocks, 2)}


def q5_0(blocks: Bytes) -> Parts:
    values = unpacked(blocks[:, 6:], 16, NIBBLES, 15) | high_bits(blocks[:, 2:6])
    return {"values": values, "scales": half(blocks, 0)}


def q5_1(blocks: Bytes) -> Parts:
    values = unpacked(blocks[:, 8:], 16, NIBBLES, 15) | high_bits(blocks[:, 4:8])
    return {"values": values, "scales": half(blocks, 0), "offsets": half(blocks, 2)}


def q8_0(blocks: Bytes) -> Parts:
    return {"values": blocks[:, 2:] ^ np.uint8(128), "scales": half(blocks, 0)}


def q2_k(blocks: Bytes) -> Parts:
    return {
        "values": unpacked(blocks[:, 16:80], 32, PAIRS, 3),
        "scales": (blocks[:, :16] & np.uint8(15)).view(np.int8),
        "offsets": (blocks[:, :16] >> np.uint8(4)).view(np.int8),
        "outer_scales": wide(blocks, 80),
        "outer_offsets": -wide(blocks, 82),
    }


def q3_k(blocks: Bytes) -> Parts:
    values = unpacked(blocks[:, 32:96], 32, PAIRS, 3)
    values |= unpacked(blocks[:, :32], 32, BITS, 1) << np.uint8(2)
    low = unpacked(blocks[:, 96:104], 8, NIBBLES, 15)
    high = unpacked(blocks[:, 104:108], 4, PAIRS, 3)
    scales = (low | high << np.uint8(4)).view(np.int8) - np.int8(32)
    return {"values": values, "scales": scales, "outer_scales": wide(blocks, 108)}


def scales_of_k(blocks: Bytes) -> Parts:
    """Unpack the scales and offsets of Q4_K and Q5_K, 8 each of 6 bits."""
    first, second, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    six, two = np.uint8(63), np.uint8(48)
    scales = first & six, last & np.uint8(15) | first >> np.uint8(2) & two
    offsets = second & six, last >> np.uint8(4) | second >> np.uint8(2) & two
    return {
        "scales": np.concatenate(scales, axis=1).view(np.int8),
        "offsets": np.concatenate(offsets, axis=1).view(np.int8),
        "outer_scales": wide(blocks, 0),
        "outer_offsets": -wide(blocks, 2),
    }


def q4_k(blocks: Bytes) -> Parts:
    return {"values": unpacked(blocks[:, 16:], 32, NIBBLES, 15), **scales_of_k(blocks)}


def q5_k(blocks: Bytes) -> Parts:
    values = unpacked(blocks[:, 48:], 32, NIBBLES, 15)
    values |= unpacked(blocks[:, 16:48], 32, BITS, 1) << np.uint8(4)
    return {"values": values, **scales_of_k(blocks)}


def q6_k(blocks: Bytes) -> Parts:
    values = unpacked(blocks[:, :128], 64, NIBBLES, 15)
    values |= unpacked(blocks[:, 128:192], 32, PAIRS, 3) << np.uint8(4)
    return {
        "values": values,
        "scales": blocks[:, 192:208].view(np.int8),
        "outer_scales": wide(blocks, 208),
    }


def iq4_xs(blocks: Bytes) -> Parts:
    high = unpacked(blocks[:, 2:4], 1, PAIRS, 3)
    scales = unpacked(blocks[:, 4:8], 1, NIBBLES, 15) | high << np.uint8(4)
    return {
        "values": unpacked(blocks[:, 8:], 16, NIBBLES, 15),
        "scales": scales.view(np.int8) - np.int8(32),
        "outer_scales": wide(blocks, 0),
    }


def mxfp4(blocks: Bytes) -> Parts:
    return {
        "values": unpacked(blocks[:, 1:], 16, NIBBLES, 15),
        "scales": MXFP4.e8m0_to_fp32_half(blocks[:, :1]),
    }


FORMS = {
    Kind.Q4_0: Form(4, 32, q4_0),
    Kind.Q4_1: Form(4, 32, q4_1),
    Kind.Q5_0: Form(5, 32, q5_0),
    Kind.Q5_1: Form(5, 32, q5_1),
    Kind.Q8_0: Form(8, 32, q8_0),
    Kind.Q2_K: Form(2, 16, q2_k),
    Kind.Q3_K: Form(3, 16, q3_k),
    Kind.Q4_K: Form(4, 32, q4_k),
    Kind.Q5_K: Form(5, 32, q5_k),
    Kind.Q6_K: Form(6, 16, q6_k),
    Kind.IQ4_NL: Form(4, 32, q4_0, IQ4_NL.kvalues),
    Kind.IQ4_XS: Form(4, 32, iq4_xs, IQ4_NL.kvalues),
    Kind.MXFP4: Form(4, 32, mxfp4, MXFP4.kvalues),
}
"""The types of tensors that can stay packed."""

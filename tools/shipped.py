"""The kernel launches that ship, by name, for the compile gate; no device is needed.

A launch is built as in a step, from tensors that are never read.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import torch

from kernels.meta import AttentionMeta
from kernels.reference import AttentionOptions, HeadNorm, Rope
from kernels.triton.attention_decode import decode_kernel, decode_launches
from kernels.triton.attention_prefill import prefill_launches
from kernels.triton.kv_write import write_launch
from kernels.triton.launch import Launch
from kernels.triton.merge import merge_launch, spans_launch
from kernels.triton.shares import SharesPlan
from kernels.tuning import Shares

KV_HEADS = 8
FP8 = torch.float8_e4m3fn
# Queries, then cache.
DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32),
    "bf16 over fp8": (torch.bfloat16, FP8),
    "fp16 over fp8": (torch.float16, FP8),
}
HEAD_DIMS = (32, 64, 80, 96, 128, 256)
# Query tokens and query heads a key head: packed rows from 16 to 128 in both kernels.
DECODES = {"decode": (1, 4), "drafts 32": (4, 8), "drafts 64": (8, 8), "decode 71": (1, 71)}
PREFILLS = {"chunk 16": (9, 1), "chunk 32": (9, 3), "chunk 64": (12, 4), "prefill": (4096, 4)}
FORMS = (*DECODES, *PREFILLS)
# Chunks whose keys are split, in tiles of their own.
SPLITS = {"split": (64, 4), "split 7": (32, 7)}
# Tensors of a KV group after the first begin anywhere in those of all groups.
LATER = "later group"
SWITCHES = (("window", "sinks", LATER), ("window", "softcap"), ("alibi",))
BOTH_WAYS = (("both ways",), ("both ways", "window"))
NORMS = ("none", "head", "width")
ROPES = ("none", "halves", "neighbours", "partial")

OTHERS = (
    "activation",
    "bitmask",
    "causal_conv",
    "copies",
    "delta_chunks",
    "delta_rule",
    "gemv",
    "index",
    "invariant",
    "logprobs",
    "low_rank",
    "moe",
    "layer_norms",
    "norm",
    "penalties",
    "quant",
    "sampling",
    "sampling_parts",
    "scan_chunks",
    "selective_scan",
    "states",
)


class Shipped(NamedTuple):
    """A launch by name; ``dtype`` is a key of ``DTYPES``."""

    name: str
    build: Callable[[], Launch]
    dtype: str


def attention(dtype: str, head_dim: int, page: int, form: str, switches: frozenset[str]) -> Shipped:
    query_len, group = {**DECODES, **PREFILLS, **SPLITS}[form]

    def build() -> Launch:
        q_dtype, kv_dtype = DTYPES[dtype]
        meta = _meta(4, query_len, page, is_aligned=LATER not in switches)
        q = torch.empty(4 * query_len, KV_HEADS * group, head_dim, dtype=q_dtype)
        kv = torch.empty(2, 2, KV_HEADS, page, head_dim, dtype=kv_dtype)
        variant = _variant(switches, KV_HEADS * group, kv_dtype is FP8)
        if form in DECODES:
            launches = decode_launches(q, kv, meta, variant, 4, torch.empty_like(q))
            return next(one for one in launches if one.kernel is decode_kernel)
        return prefill_launches(q, kv, meta, variant, torch.empty_like(q))[0]

    name = f"{form}, {dtype}, head {head_dim}, page {page}, {' + '.join(sorted(switches))}"
    return Shipped(name, build, dtype)


def write(
    dtype: str, head_dim: int, norm: str, rope: str, num_tokens: int, *, is_later: bool = False
) -> Shipped:
    """is_later: in a KV group after the first."""

    def build() -> Launch:
        q_dtype, kv_dtype = DTYPES[dtype]
        qkv = torch.empty(num_tokens, 6 * KV_HEADS * head_dim, dtype=q_dtype)
        kv = torch.empty(2, 2, KV_HEADS, 64, head_dim, dtype=kv_dtype)
        scales = torch.empty(2, KV_HEADS) if kv_dtype is FP8 else None
        heads = (4 * KV_HEADS, KV_HEADS, head_dim)
        variant = (_rope(rope, head_dim), _norm(norm, q_dtype, head_dim), scales)
        out = torch.empty(num_tokens, 4 * KV_HEADS, head_dim, dtype=q_dtype)
        meta = _meta(4, num_tokens // 4, 64, is_aligned=not is_later)
        return write_launch(qkv, kv, meta, heads, variant, out)

    name = f"write of {num_tokens}, {dtype}, head {head_dim}, norm {norm}, rope {rope}"
    return Shipped(name + f", {LATER}" * is_later, build, dtype)


def merge(num_parts: int, head_dim: int) -> Shipped:
    def build() -> Launch:
        parts = torch.empty(num_parts, 4, 32, head_dim)
        out = torch.empty(4, 32, head_dim, dtype=torch.bfloat16)
        return merge_launch(parts, torch.empty(num_parts, 4, 32), out)

    return Shipped(f"merge of {num_parts}, head {head_dim}", build, "bf16")


def spans(head_dim: int, num_heads: int) -> Shipped:
    def build() -> Launch:
        parts, meta = torch.empty(66, 1, num_heads, head_dim), _meta(4, 1, 64)
        out = torch.empty(4, num_heads, head_dim, dtype=torch.bfloat16)
        table = torch.empty(4, 2, dtype=torch.int32)
        return spans_launch(parts, torch.empty(66, 1, num_heads), table, meta.query_start, out)

    return Shipped(f"merge of spans, head {head_dim}, {num_heads} heads", build, "bf16")


def plan(shares: Shares, window: int) -> Shipped:
    def build() -> Launch:
        (launch,) = SharesPlan.of(_meta(4, 1, 64), shares, (4, 1), 64, window)[1]
        return launch

    return Shipped(f"plan of {shares.num}, window {window}", build, "bf16")


def shipped() -> Iterator[Shipped]:
    yield from around_the_cache()
    yield from around_encoders()
    yield from around_later_groups()
    yield from around_parts()
    for name in OTHERS:
        # The package has functions with the names of some of its modules.
        module = importlib.import_module(f"kernels.triton.{name}")
        yield from map(other_than_attention, module.configurations())


def around_the_cache() -> Iterator[Shipped]:
    """Attention with every entry of its table, plain and with switches, and writes of KV.

    fp16 differs from bf16 in the instruction alone, a head of 32 or 96 from 64 or 128 in a mask, a
    block of 32 from 16 or 64 in nothing: they are held by fewer launches.
    """
    for dtype, dim, page, form in product(DTYPES, (64, 80, 128, 256), (16, 64), FORMS):
        if not dtype.startswith("fp16"):
            yield attention(dtype, dim, page, form, frozenset(("plain",)))
    for dtype, dim, form in product(("fp16", "fp16 over fp8"), (32, 96), FORMS):
        yield attention(dtype, dim, 32, form, frozenset(("plain",)))
    for dtype, dim, form in product(("bf16", "bf16 over fp8"), (64, 128, 256), FORMS):
        for switches in SWITCHES:
            yield attention(dtype, dim, 16, form, frozenset(switches))
    for dtype, dim, page, form in product(("bf16", "fp16"), (80, 128), (16, 64), SPLITS):
        yield attention(dtype, dim, page, form, frozenset(("plain",)))
    for page in (16, 64):
        yield attention("bf16", 128, page, "split", frozenset(("sinks",)))
    for dtype, norm, rope in product(DTYPES, NORMS, ROPES):
        yield write(dtype, 128, norm, rope, 4096)
    for dtype, dim, norm in product(("bf16", "bf16 over fp8"), HEAD_DIMS, NORMS):
        yield write(dtype, dim, norm, "halves", 16)


def around_encoders() -> Iterator[Shipped]:
    """Attention whose tokens see later tokens."""
    for form, switches in product(FORMS, BOTH_WAYS):
        yield attention("bf16", 64, 16, form, frozenset(switches))
    yield attention("bf16", 64, 16, "chunk 64", frozenset(("both ways", "distances")))


def around_later_groups() -> Iterator[Shipped]:
    """Attention and writes of layers in a later KV group, with other head sizes than the first."""
    for dtype, dim, num_tokens in product(("bf16", "bf16 over fp8"), (64, 192), (16, 4096)):
        yield write(dtype, dim, "none", "halves", num_tokens, is_later=True)
    for dtype, form in product(("bf16", "bf16 over fp8"), FORMS):
        yield attention(dtype, 192, 64, form, frozenset(("window", "sinks", LATER)))


def around_parts() -> Iterator[Shipped]:
    """Merges of partial attention, and plans of which program reads which keys."""
    for parts, dim in product((2, 32), HEAD_DIMS):
        yield merge(parts, dim)
    for dim, heads in product(HEAD_DIMS, (32, 71)):
        yield spans(dim, heads)
    for window in (0, 4096):
        yield plan(Shares(16, 128), window)


def other_than_attention(launch: Launch) -> Shipped:
    """A launch outside attention, whose settings are the same for all GPUs."""
    tensors = [arg for arg in launch.args.values() if isinstance(arg, torch.Tensor)]
    dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.int32)
    name = launch.kernel.fn.__name__.removesuffix("_kernel")
    needs = "bf16 over fp8" if any(t.dtype is FP8 for t in tensors) else "bf16"
    return Shipped(f"{name}, {str(dtype).removeprefix('torch.')}", lambda: launch, needs)


def _meta(num_seqs: int, query_len: int, page: int, *, is_aligned: bool = True) -> AttentionMeta:
    """is_aligned: block tables and slots begin at a multiple of 16 bytes, as the first group's."""

    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def of_group(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        rest = ints(math.prod(shape) + 1, dtype=dtype)
        return rest[:-1].view(shape) if is_aligned else rest[1:].view(shape)

    num_tokens = num_seqs * query_len
    return AttentionMeta(
        query_start=torch.arange(num_seqs + 1, dtype=torch.int32) * query_len,
        seq_lens=ints(num_seqs) + 8192,
        block_tables=of_group(num_seqs, 256),
        positions=ints(num_tokens, dtype=torch.int64),
        slots=of_group(num_tokens, dtype=torch.int64),
        block_size=page,
        num_decodes=num_seqs if query_len == 1 else 0,
        max_query_len=query_len,
        max_seq_len=8192,
    )


def _variant(switches: frozenset[str], num_heads: int, is_fp8: bool) -> AttentionOptions:
    return AttentionOptions(
        scale=0.0883,
        window=4096 if "window" in switches else 0,
        softcap=50.0 if "softcap" in switches else 0.0,
        sinks=torch.empty(num_heads) if "sinks" in switches else None,
        alibi=torch.empty(num_heads) if "alibi" in switches else None,
        kv_scales=torch.empty(2, KV_HEADS) if is_fp8 else None,
        causal="both ways" not in switches,
        distances=torch.empty(num_heads, 1055) if "distances" in switches else None,
    )


def _rope(rope: str, head_dim: int) -> Rope:
    rot = head_dim // 2 if rope == "partial" else head_dim
    return Rope(None if rope == "none" else torch.empty(8192, rot), rope == "neighbours")


def _norm(norm: str, dtype: torch.dtype, head_dim: int) -> HeadNorm:
    if norm == "none":
        return HeadNorm(None, None, 1e-6, False)
    q_heads, k_heads = (1, 1) if norm == "head" else (4 * KV_HEADS, KV_HEADS)
    q, k = (torch.empty(n * head_dim, dtype=dtype) for n in (q_heads, k_heads))
    return HeadNorm(q, k, 1e-6, False)

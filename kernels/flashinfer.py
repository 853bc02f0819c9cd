"""FlashInfer's attention over this cache, where ``attention_backend`` names it.

    load     attention_for: the package is imported, or what it does not serve is said
    step     the first layer of each form plans it: which blocks, which tokens (`Form`)
    layer    run

Its layout "HND" of one tensor with keys and values is that of `AttentionMeta`, so nothing is
copied. ``plan`` works on the host, from numbers the host has (`HostLens`); steps are therefore not
recorded. Written from the documentation of its Python interface, docs.flashinfer.ai (0.2 to 0.7),
and held to that by tests/contract/test_flashinfer.py; no device has run it yet.
"""

from __future__ import annotations

import importlib
from collections import deque
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.bodies import AttentionNeeds, Refusal
from kernels.meta import AttentionMeta, HostLens
from kernels.reference import Variant

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
SWITCHES = {"window", "softcap"}
LEAST_ARCHITECTURE = (8, 0)
# For parts of split keys. It recommends 128 MiB, which long prompts of many heads overflow.
WORKSPACE_BYTES = 400 << 20
# Decodes of at most so many query heads a key head read as fast without tensor cores. Not every
# larger group has a kernel that does without.
MAX_GROUP_OF_CORES = 2
# ``plan`` fills pinned memory that the device copies from when it gets there: the next plan of the
# same form takes the other one.
NUM_IN_TURN = 2

TRITON = 'use attention_backend="triton", which is the default'


def attention_for(needs: AttentionNeeds) -> FlashInferAttention | Refusal:
    """The body for such a model, or why there is none."""
    refusal = why_not(needs)
    if refusal is not None:
        return refusal
    try:
        package = importlib.import_module("flashinfer")
    except ImportError as error:
        return Refusal(
            f"the package flashinfer cannot be imported ({error})",
            f"pip install flashinfer-python, or {TRITON}",
        )
    return FlashInferAttention(package, needs.device)


def why_not(needs: AttentionNeeds) -> Refusal | None:
    """What of these FlashInfer does not serve, whether it is installed or not."""
    found = needs.architecture
    if found is None or found < LEAST_ARCHITECTURE:
        what = "another maker's" if found is None else "of compute capability {}.{}".format(*found)
        return Refusal(f"which is for NVIDIA GPUs from 8.0 on, and this one is {what}", TRITON)
    if needs.dtype not in DTYPES:
        return Refusal(
            f"which computes in bfloat16 and float16, and this model in {_name(needs.dtype)}",
            f'use dtype="bfloat16", or {TRITON}',
        )
    if needs.cache_dtype is not needs.dtype:
        return Refusal(
            f"which here reads a cache of the type computed in, {_name(needs.dtype)}, and not of "
            f"{_name(needs.cache_dtype)}",
            f'use kv_cache_dtype="auto", or {TRITON}',
        )
    if needs.head_dim not in HEAD_DIMS:
        listed = ", ".join(map(str, HEAD_DIMS))
        return Refusal(
            f"which serves heads of size {listed}, and this model's are of {needs.head_dim}", TRITON
        )
    others = sorted(needs.switches - SWITCHES)
    if others:
        return Refusal(
            f"which here does not serve {' and '.join(others)}", f"leave it out, or {TRITON}"
        )
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Form(NamedTuple):
    """What a plan is made for. Layers of one form share a step's plan."""

    is_decode: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    window: int
    softcap: float


class Pages(NamedTuple):
    """A step's blocks as FlashInfer takes them. Host tensors are pinned where there is a GPU."""

    query_start: torch.Tensor  # [S + 1] int32 on the host
    starts: torch.Tensor  # [S + 1] int32 on the host: where each sequence's blocks begin
    blocks: torch.Tensor  # [starts[S]] int32 on the device
    last_lens: torch.Tensor  # [S] int32 on the host: tokens in the last block, 1..block_size
    num_tokens: int


class Turn:
    """A wrapper, and when the device has copied what was planned in it."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self._copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def planned(self, device: torch.device) -> None:
        if device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()


class FlashInferAttention:
    """See ``kernels.bodies.AttentionBody``. Of one model; one step is computed at a time."""

    can_be_recorded = False
    plans_on_host = True

    def __init__(
        self, package: ModuleType, device: torch.device, *, workspace_bytes: int = WORKSPACE_BYTES
    ) -> None:
        self.device = device
        self._package = package
        # Zeros, as some of its kernels count in there. Read and written in the order of launches.
        self._workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=device)
        self._turns: dict[Form, deque[Turn]] = {}

    def paged_attention(
        self, q: torch.Tensor, kv_layer: torch.Tensor, meta: AttentionMeta, variant: Variant
    ) -> torch.Tensor:
        assert variant.sinks is variant.alibi is variant.kv_scales is None, "refused at load"
        pages = self._pages(meta)
        form = Form(
            len(meta.seq_lens) == meta.num_decodes,
            *(q.shape[1], kv_layer.shape[2], q.shape[2], q.dtype),
            *(variant.scale, variant.window, variant.softcap),
        )
        wrapper = meta.scratch.get(form)
        if wrapper is None:
            wrapper = meta.scratch[form] = self._plan(form, pages, meta.block_size)
        num = pages.num_tokens
        out = q.new_empty(q.shape) if num == len(q) else q.new_zeros(q.shape)
        wrapper.run(q[:num].contiguous(), kv_layer, out=out[:num])
        return out.flatten(1)

    def _pages(self, meta: AttentionMeta) -> Pages:
        found = meta.scratch.get(Pages)
        if found is None:
            assert meta.host_lens is not None, "a step that is recorded, or that the device makes"
            found = meta.scratch[Pages] = pages_of(meta, meta.host_lens)
        return found

    def _plan(self, form: Form, pages: Pages, block_size: int) -> Any:
        """A wrapper that is ready to run layers of this form."""
        turns = self._turns.setdefault(form, deque())
        turn = turns.popleft() if len(turns) == NUM_IN_TURN else Turn(self._wrapper(form))
        turn.wait()
        turns.append(turn)
        kv = (pages.starts, pages.blocks, pages.last_lens)
        heads = (form.num_heads, form.num_kv_heads, form.head_dim, block_size)
        options = {
            "sm_scale": form.scale,
            "window_left": form.window - 1,  # keys before the query's own; -1: all
            "logits_soft_cap": form.softcap,
            "q_data_type": form.dtype,
            "kv_data_type": form.dtype,
        }
        if form.is_decode:
            turn.wrapper.plan(*kv, *heads, **options)
        else:
            turn.wrapper.plan(pages.query_start, *kv, *heads, causal=True, **options)
        turn.planned(self.device)
        return turn.wrapper

    def _wrapper(self, form: Form) -> Any:
        if not form.is_decode:
            return self._package.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
        is_wide = form.num_heads // form.num_kv_heads > MAX_GROUP_OF_CORES
        make = self._package.BatchDecodeWithPagedKVCacheWrapper
        return make(self._workspace, "HND", use_tensor_cores=is_wide)


def pages_of(meta: AttentionMeta, lens: HostLens) -> Pages:
    """The blocks that hold each sequence's keys, one sequence behind the other."""
    device, width = meta.block_tables.device, meta.block_tables.shape[1]
    counts = -(-lens.seq_lens // meta.block_size)
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    # Of each block its place in the flat table, found without asking the device.
    rows = np.arange(len(counts), dtype=np.int32) * width - starts[:-1]
    places = np.repeat(rows, counts) + np.arange(starts[-1], dtype=np.int32)
    flat = meta.block_tables.reshape(-1)
    return Pages(
        query_start=_held(lens.query_start, device),
        starts=_held(starts, device),
        blocks=flat[_held(places, device).to(device, non_blocking=True)],
        last_lens=_held((lens.seq_lens - 1) % meta.block_size + 1, device),
        num_tokens=int(lens.query_start[-1]),
    )


def _held(values: NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """A copy in memory that the device copies from by itself."""
    tensor = torch.from_numpy(values.astype(np.int32))
    return tensor.pin_memory() if device.type == "cuda" else tensor

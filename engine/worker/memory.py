"""Measures free memory, chooses the KV cache's dtype and allocates the cache."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from engine.config.gpu_memory import GIB, shortage
from engine.errors import ConfigError
from engine.ipc.host_memory import free_host_bytes
from engine.kv.layout import KVLayout, LayerCache, PagedKV, SharedKV
from engine.layers.linear import is_cpu
from engine.models.decoder import NativeDecoder
from engine.models.model import LayerCaches, Model
from engine.worker.platform import Platform
from kernels.bodies import triton_for
from kernels.pages import own_pages
from kernels.reference.kv_rows import scale_bytes
from kernels.reference.quant import FP8

LARGE = 1 << 20  # bytes from which a tensor gets its own pages
PREFAULT_BYTES = 256 << 20  # of the KV pool
PREFAULT_STATE_BYTES = 1 << 30  # of recurrent states: a step of many requests writes them all
CHUNK_BYTES = 2 << 20
LEAST_URGENT = 19  # niceness of a thread whose work must not delay steps
MADV_POPULATE_WRITE = 23  # Linux 5.14 and later; Python's mmap has no name for it

# Parameters of glibc's mallopt: how much freed memory at the end of the heap is kept, and from
# which size on an allocation gets its own mapping, which is returned to the system when freed.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT, MAPPED = 64 << 20, 32 << 20

# Values of ``kv_cache_dtype``, named as in vLLM, and a short form.
FP8_NAMES, INT8_NAMES = ("fp8", "fp8_e4m3"), ("int8_per_token_head", "int8")
logger = logging.getLogger("engine.worker")

Zeros = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


def choose_kv_dtype(
    requested: str, computed_in: torch.dtype, device: torch.device | str
) -> torch.dtype:
    """The dtype of keys and values for ``kv_cache_dtype`` = ``requested``. Raises ``ConfigError``
    if no kernel combines it with activations of type ``computed_in``."""
    if requested == "auto":
        return computed_in
    device = torch.device(device)
    if requested in FP8_NAMES + INT8_NAMES and is_cpu(device):
        return FP8 if requested in FP8_NAMES else torch.int8
    if requested in INT8_NAMES:
        raise ConfigError(
            f"kv_cache_dtype is {requested!r}, which needs device='cpu', got {device.type!r}: GPU "
            'kernels read no 8-bit integers. Use "fp8", which takes as much memory, or "auto"'
        )
    if requested in FP8_NAMES:
        _check_fp8(requested, computed_in, device)
        return FP8
    is_read = computed_in is torch.bfloat16 or (computed_in is torch.float32 and is_cpu(device))
    if not is_read:
        raise ConfigError(
            f"kv_cache_dtype is {requested!r}, but the model is computed in {_name(computed_in)} "
            f"on {device.type!r}, where the cache must have the same type: use "
            'kv_cache_dtype="auto" or dtype="bfloat16"'
        )
    return torch.bfloat16


def _check_fp8(requested: str, computed_in: torch.dtype, device: torch.device) -> None:
    what = f"kv_cache_dtype is {requested!r}"
    if computed_in not in (torch.bfloat16, torch.float16):
        raise ConfigError(
            f"{what}, which needs a model computed in bfloat16 or float16, got "
            f'{_name(computed_in)}: use dtype="bfloat16" or kv_cache_dtype="auto"'
        )
    tensor = torch.empty(0, device=device)
    body = triton_for(tensor)
    if body is None or not body.reads_fp8(tensor):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        raise ConfigError(
            f"{what}, but attention has no kernels for 8-bit floats on {name}: they need NVIDIA "
            'compute capability 9.0 or 10.0. Use kv_cache_dtype="auto"'
        )


def apply_kv_dtype(model: Model, requested: str, device: torch.device) -> torch.dtype:
    """Set up a loaded model for the requested dtype of keys and values, and return the dtype. 8-bit
    floats get scales. Raises ``ConfigError`` as ``choose_kv_dtype`` does."""
    dtype = choose_kv_dtype(requested, model.dtype, device)
    if dtype is FP8:
        num_layers = len(model.cache_spec)
        num_scaled = model.scale_cache(device) if isinstance(model, NativeDecoder) else 0
        logger.info(
            "keys and values are stored as float8_e4m3fn: %d of %d layers have scales in the "
            "checkpoint, the others use 1.0; values above 448 are clamped to 448",
            *(num_scaled, num_layers),
        )
    return dtype


def stored_as(layers: Sequence[LayerCache], dtype: torch.dtype) -> list[LayerCache]:
    """The caches of a model's layers if keys and values are stored in ``dtype``; int8 with a scale
    for each token and head."""
    size, scale = dtype.itemsize, scale_bytes(dtype)
    return [
        replace(layer, dtype_bytes=size, scale_bytes=scale) if isinstance(layer, PagedKV) else layer
        for layer in layers
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def make_kv_cache(
    layers: Sequence[LayerCache],
    layout: KVLayout,
    num_blocks: int,
    block_size: int,
    *,
    dtype: torch.dtype,
    zeros: Zeros,
) -> list[torch.Tensor]:
    """Allocate a zeroed KV pool and return each layer's view of it: [blocks of the layer's group,
    2, num_kv_heads, block_size, head_dim], empty for a layer without a KV cache; the last axis of
    int8 caches includes a row's scale. Layers with the same ``layout.parts`` share memory.

    Attention multiplies masked values too, so they must not be NaN. Raises ``ConfigError`` with the
    sizes if there is not enough memory."""
    num_elements = num_blocks * layout.block_bytes // dtype.itemsize
    try:
        if layout.is_interleaved:
            tensors = [zeros((num_elements,), dtype)]
        else:
            owners = {
                part: layer
                for part, layer in zip(layout.parts, layers, strict=True)
                if isinstance(layer, PagedKV)
            }
            tensors = [
                zeros(_shape(owners[part], num_blocks, block_size), dtype)
                for part in range(layout.num_tensors)
            ]
    except (RuntimeError, MemoryError, OSError, OverflowError) as error:
        gib = num_blocks * layout.block_bytes / (1 << 30)
        raise ConfigError(
            f"not enough memory for {num_blocks} KV blocks of {block_size} tokens ({gib:.2f} GiB); "
            "lower num_kv_blocks, kv_cache_memory_bytes or memory_utilization"
        ) from error
    views = []
    for layer, group, part in zip(layers, layout.group_of, layout.parts, strict=True):
        owner = layers[layer.source] if isinstance(layer, SharedKV) else layer
        if not isinstance(owner, PagedKV):
            views.append(torch.empty(0, dtype=dtype, device=tensors[0].device))
        elif layout.is_interleaved:
            num = num_blocks * layout.scales[group] - part
            shape = _shape(owner, num, block_size)
            begin = part * math.prod(shape[1:])
            views.append(tensors[0][begin : begin + math.prod(shape)].view(shape))
        else:
            views.append(tensors[part].view(_shape(owner, num_blocks, block_size)))
    return views


def _shape(layer: LayerCache, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """Shape of a layer's keys and values."""
    assert isinstance(layer, PagedKV)
    return num_blocks, 2, layer.num_kv_heads, block_size, layer.row_bytes // layer.dtype_bytes


def tensors_of(caches: LayerCaches) -> list[torch.Tensor]:
    """The tensors of keys and values, without those of recurrent states."""
    return [one for one in caches if isinstance(one, torch.Tensor)]


def pool_bytes(kv: Sequence[torch.Tensor], num_blocks: int) -> Iterator[torch.Tensor]:
    """The memory of the KV pool, as tensors [blocks, bytes of a block] uint8. ``kv``: the tensors
    of the layers, some of which share memory."""
    by_memory: dict[int, list[torch.Tensor]] = {}
    for one in kv:
        if one.numel():
            by_memory.setdefault(one.untyped_storage().data_ptr(), []).append(one)
    for views in by_memory.values():
        begins = [one.storage_offset() * one.itemsize for one in views]
        end = max(begin + one.nbytes for begin, one in zip(begins, views, strict=True))
        begin, storage = min(begins), views[0].untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=views[0].device)
        yield whole.set_(storage, begin, (end - begin,), (1,)).view(num_blocks, -1)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeroed host memory whose pages are allocated only when they are written."""
    num_bytes = dtype.itemsize * math.prod(shape)
    if num_bytes < LARGE:
        return torch.zeros(shape, dtype=dtype)
    # torch.zeros would write every page.
    return own_pages(num_bytes).view(dtype).view(shape)


def keep_freed_memory() -> None:
    """Let the allocator keep freed memory for the tensors of the next step. Returning pages to the
    system and faulting them in again costs 2 % of a prefill."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, KEPT)
        mallopt(M_MMAP_THRESHOLD, MAPPED)


class PagePrefault:
    """Faults in the first pages of KV caches and recurrent states, in a thread, before requests use
    them.

    The first write to a page costs a page fault, and on a virtual machine also the host's time to
    find memory: tenths of a second for the blocks or states of a few requests. Contents do not
    change.
    """

    def __init__(self, *parts: tuple[Sequence[torch.Tensor], int]) -> None:
        """parts: tensors made by ``lazy_zeros``, and how many bytes of them to fault in, the same
        share of each tensor."""
        self._shares = [share for tensors, most in parts for share in _shares(tensors, most)]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._provide, name="kv-pages", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> None:
        """Block until the thread has finished or was stopped."""
        if self._thread.ident is not None:
            self._thread.join()

    def stop(self) -> None:
        """Stop the thread; after this, the tensors may be freed."""
        self._stopped.set()
        self.wait()

    def _provide(self) -> None:
        if sys.platform == "linux":  # where a thread has a niceness of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_URGENT)
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        longest = max((num_bytes for _, num_bytes in self._shares), default=0)
        for begin in range(0, longest, CHUNK_BYTES):
            for tensor, num_bytes in self._shares:
                if self._stopped.is_set():
                    return
                size = min(CHUNK_BYTES, num_bytes - begin)
                if size <= 0:
                    continue
                address = ctypes.c_void_p(tensor.data_ptr() + begin)
                if madvise(address, ctypes.c_size_t(size), MADV_POPULATE_WRITE):
                    return  # an older kernel: pages are faulted in when they are written


def _shares(tensors: Sequence[torch.Tensor], most: int) -> list[tuple[torch.Tensor, int]]:
    """How many bytes of each tensor with pages of its own to fault in, ``most`` in all."""
    largest = sorted(tensors, key=torch.Tensor.data_ptr, reverse=True)  # views of one pool overlap
    by_memory = {one.untyped_storage().data_ptr(): one for one in largest if one.nbytes >= LARGE}
    total = sum(one.nbytes for one in by_memory.values())
    part = min(most, total) / max(total, 1)
    return [(one, int(one.nbytes * part)) for one in by_memory.values()]


# Parts of the messages of torch's allocators, the driver and its libraries.
OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "Failed to allocate")
OUT_OF_HOST_MEMORY = ("can't allocate memory", "Cannot allocate memory")


@contextmanager
def explain_shortage(platform: Platform, doing: str) -> Iterator[None]:
    """Raise ``ConfigError``, which names ``doing``, where the calls inside run out of memory."""
    try:
        yield
    except MemoryError as error:
        raise ConfigError(host_shortage(doing)) from error
    except RuntimeError as error:
        message = str(error)
        if any(sign in message for sign in OUT_OF_HOST_MEMORY):
            raise ConfigError(host_shortage(doing)) from error
        if platform.shares_memory or not any(sign in message for sign in OUT_OF_MEMORY):
            raise
        free, total = platform.free_and_total()
        raise ConfigError(shortage(doing, free=free, total=total)) from error


def host_shortage(doing: str) -> str:
    """The error message for exhausted memory of the host, or of what this process may use of it.
    doing: what failed, as for ``engine.config.gpu_memory.shortage``."""
    return (
        f"out of memory while {doing}: this process may allocate {free_host_bytes() / GIB:.2f} GiB "
        "more. Raise its limit (ulimit, or the memory of its control group), end other processes, "
        "take a smaller model, dtype or quantization, divide the model among processes "
        "(tensor_parallel_size), or lower max_num_batched_tokens, max_num_seqs, max_model_len, "
        "or num_kv_blocks"
    )

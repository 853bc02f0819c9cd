"""Loads or compiles the kernels that a model needs before a request waits for them.

Usually the kernels are in the disk cache. At the first start on a type of processor they are
compiled by two processes, since Numba compiles one function at a time per process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.cpu import isa, layer_norms, logits, pointwise, rope, sampling, slots
from kernels.cpu.attention import chunk_kernel, single_kernel
from kernels.cpu.attention.plan import SINGLE_ITEMS
from kernels.cpu.disk_cache import has_place
from kernels.cpu.matmul import bfloat16, block_product, block_rows, dequantized, float32
from kernels.cpu.matmul.outputs import LARGEST
from kernels.cpu.matmul.rows import GATHER
from kernels.cpu.native import Kernel, prepare_launches
from kernels.cpu.threads import num_threads

_MAX_SECONDS = 300
_POLL_SECONDS = 0.05


class AttentionKind(NamedTuple):
    """The parameters for which attention kernels are compiled."""

    head_dim: int
    group: int  # query heads per KV head
    sizes: tuple[int, int]  # bytes of a query element and of a cache element


def prepare(
    dtype: torch.dtype = torch.float32,
    kind: AttentionKind | None = None,
    tell: Callable[[str], None] | None = None,
    *,
    has_blocks: bool = False,
    is_encoder: bool = False,
) -> None:
    """Load or compile the kernels of a model whose weights have this dtype. Run it in a thread
    while the weights are read, since it takes almost a second even if nothing must be compiled.

    kind: parameters of attention, if known. tell: called with a message before compilation.
    has_blocks: all matrices are packed in blocks, and inputs are quantised.
    """
    size = 2 if dtype is torch.bfloat16 else 4
    first, *others = _products(dtype, has_blocks=has_blocks)
    written = rope.QKV[(size, size) if kind is None else kind.sizes]
    if is_encoder:
        others += [layer_norms.NORM[size], written]
    else:
        others += [pointwise.NORM[size], written, sampling.CHOOSE]
    if not has_blocks and not is_encoder:  # otherwise products apply activations
        others.append(pointwise.ACT_MUL[size])
    helper = None if first.is_kept else _start_helper(kind, tell)
    prepare_launches()
    prepare_all([first, *others])
    if helper is not None:
        _wait_for(helper)
    if not _is_ending():
        prepare_rest(kind)


def _products(dtype: torch.dtype, *, has_blocks: bool) -> list[Kernel]:
    if has_blocks:
        return [block_product.PRODUCT, block_rows.QUANTIZE, dequantized.ROWS[dtype.itemsize]]
    return list(bfloat16.PRODUCTS) if dtype.itemsize == 2 else [float32.PACKED[dtype.itemsize]]


def prepare_rest(kind: AttentionKind | None) -> None:
    """Load or compile the kernels of the helper process: attention, operations on slots and edits
    of logits."""
    prepare_all(_rest(kind))
    logits.prepare()


def prepare_all(kernels: Sequence[Kernel]) -> None:
    """Load or compile these kernels; those last that another process compiles, so that processes
    that start together share the work. Stops if the program ends, which waits for this thread."""
    late = [kernel for kernel in kernels if _is_ending() or not kernel.prepare(waits=False)]
    for kernel in late:
        if not _is_ending():
            kernel.prepare()


def _is_ending() -> bool:
    return not threading.main_thread().is_alive()


def help_with(kind: AttentionKind | None) -> None:
    """Main function of the helper process: run ``prepare_rest``; exit when the parent does."""

    def watch() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    prepare_rest(kind)


def _rest(kind: AttentionKind | None) -> list[Kernel]:
    attention = [] if kind is None else [chunk_kernel(*kind), single_kernel(*kind)]
    return [slots.GROW, slots.PREPARE, slots.ADVANCE, SINGLE_ITEMS, GATHER, LARGEST, *attention]


def _start_helper(
    kind: AttentionKind | None, tell: Callable[[str], None] | None
) -> subprocess.Popen[bytes] | None:
    """Start the helper process, which compiles half of the kernels. ``None`` if it cannot start,
    could not save compiled kernels, or if this process has only one thread."""
    if tell is not None:
        tell(f"first start with {isa.LEVEL} kernels: compiling them takes about 20 seconds")
    is_python = Path(sys.executable or "").name.startswith("python") and not hasattr(sys, "frozen")
    if not (is_python and has_place()) or num_threads() == 1:
        return None
    # It must import this package, not one of the same name in its working directory.
    places = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
    code = (
        f"import sys; sys.path[:] = {places}; "
        f"from kernels.cpu.prepare import AttentionKind, help_with; help_with({kind})"
    )
    try:
        helper = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,  # closed when this process ends
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,  # an interrupt at the terminal must only reach this process
        )
    except OSError:
        return None
    for kernel in _rest(kind):
        kernel.compile_after(partial(_wait_for, helper, kernel))
    return helper


def _wait_for(helper: subprocess.Popen[bytes], kernel: Kernel | None = None) -> None:
    """Wait until the helper process has compiled this kernel; if ``None``, until it has ended. The
    helper is killed if it takes too long or if this program ends."""
    until = time.monotonic() + _MAX_SECONDS
    while helper.poll() is None and not (kernel and kernel.is_kept):
        if time.monotonic() > until or _is_ending():
            helper.kill()
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":  # before the first start, for example when an image is built
    for dtype in (torch.float32, torch.bfloat16):
        prepare(dtype, tell=print)

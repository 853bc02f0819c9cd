"""Kernels that every decoder needs, loaded or compiled before a request waits for them.

They are found on disk, but for the first start on a kind of processor: then a second process
compiles one half of them and this one the other. Numba compiles one at a time in a process,
whatever the threads.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.cpu import isa, logits, pointwise, rope, sampling, slots
from kernels.cpu.attention import chunk_kernel, single_kernel
from kernels.cpu.disk_cache import has_place
from kernels.cpu.matmul import bfloat16, float32
from kernels.cpu.native import Kernel, prepare_launches
from kernels.cpu.threads import num_threads

_MAX_SECONDS = 300
_GLANCE = 0.05  # seconds


class AttentionKind(NamedTuple):
    """What attention is compiled for."""

    head_dim: int
    group: int  # query heads per key head
    sizes: tuple[int, int]  # bytes of an element of the queries, and of the cache


def prepare(
    dtype: torch.dtype = torch.float32,
    kind: AttentionKind | None = None,
    tell: Callable[[str], None] | None = None,
) -> None:
    """Load what every decoder with weights of this dtype needs; for a thread, while they are read.

    The first operation of a process would pay for it otherwise: most of a second, Numba's own.
    kind: that of the attention, if it is known. tell: called with a line before something takes
    long.
    """
    size = 2 if dtype is torch.bfloat16 else 4
    first, *others = bfloat16.PRODUCTS if size == 2 else (float32.PACKED[dtype.itemsize],)
    others += [pointwise.NORM[size], rope.QKV[size, size], pointwise.ACT_MUL[size], sampling.CHOOSE]
    helper = None if first.is_kept else _start_helper(kind, tell)
    for load in (first.prepare, prepare_launches, *(kernel.prepare for kernel in others)):
        if not threading.main_thread().is_alive():  # the program ends, and waits for this thread
            break
        load()
    if helper is not None:
        _wait_for(helper)
    if threading.main_thread().is_alive():
        prepare_rest(kind)


def prepare_rest(kind: AttentionKind | None) -> None:
    """Load the other half of it: attention, what is kept of requests, edits of logits."""
    for kernel in _rest(kind):
        kernel.prepare()
    logits.prepare()


def help_with(kind: AttentionKind | None) -> None:
    """``prepare_rest`` in the second process, which ends with the first one."""

    def watch() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    prepare_rest(kind)


def _rest(kind: AttentionKind | None) -> list[Kernel]:
    attention = [] if kind is None else [chunk_kernel(*kind), single_kernel(*kind)]
    return [slots.GROW, slots.PREPARE, slots.ADVANCE, *attention]


def _start_helper(
    kind: AttentionKind | None, tell: Callable[[str], None] | None
) -> subprocess.Popen[bytes] | None:
    """The second process; ``None`` for one thread alone, or where it would be of no use."""
    if tell is not None:
        tell(f"first start with {isa.LEVEL} kernels: compiling them, which takes some 20 seconds")
    is_python = Path(sys.executable or "").name.startswith("python") and not hasattr(sys, "frozen")
    if not (is_python and has_place()) or num_threads() == 1:
        return None
    # Of all packages of this name it must find this one, not one in the directory it starts in.
    places = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
    code = (
        f"import sys; sys.path[:] = {places}; "
        f"from kernels.cpu.prepare import AttentionKind, help_with; help_with({kind})"
    )
    try:
        helper = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,  # nothing is written to it; its end is that of this process
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,  # an interrupt at the terminal is for this process alone
        )
    except OSError:
        return None
    for kernel in _rest(kind):
        kernel.compile_after(partial(_wait_for, helper, kernel))
    return helper


def _wait_for(helper: subprocess.Popen[bytes], kernel: Kernel | None = None) -> None:
    """Until it has compiled the kernel, or all. If it fails, this process compiles what is missing.
    It ends with the program."""
    until = time.monotonic() + _MAX_SECONDS
    while helper.poll() is None and not (kernel and kernel.is_kept):
        if time.monotonic() > until or not threading.main_thread().is_alive():
            helper.kill()
        time.sleep(_GLANCE)


if __name__ == "__main__":  # ahead of the first start, as when an image is built
    for dtype in (torch.float32, torch.bfloat16):
        prepare(dtype, tell=print)

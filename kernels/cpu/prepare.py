"""Kernels that every decoder needs, loaded or compiled before a request waits for them.

They are found on disk, but for the first start on a kind of processor: then a second process
compiles what comes behind the forward pass, which is needed last and takes longest, while this one
compiles the rest. Numba compiles one at a time in a process, whatever the threads.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kernels.cpu import isa, logits, pointwise, rope, sampling, slots
from kernels.cpu.disk_cache import is_kept
from kernels.cpu.matmul import bfloat16, float32
from kernels.cpu.threads import num_threads

_MAX_SECONDS = 300
_GLANCE = 0.05  # seconds


def prepare(dtype: torch.dtype = torch.float32, tell: Callable[[str], None] | None = None) -> None:
    """Load what every decoder with weights of this dtype needs; for a thread, while they are read.

    The first operation of a process would pay for it otherwise: most of a second, Numba's own.
    tell: called with a line before something takes long.
    """
    size = 2 if dtype is torch.bfloat16 else 4
    first, *products = bfloat16.PRODUCTS if size == 2 else (float32.PACKED[dtype.itemsize],)
    first.prepare()
    helper = None if first.was_kept else _start_helper(tell)
    for kernel in (
        *(*products, pointwise.NORM[size], rope.QKV[size, size], pointwise.ACT_MUL[size]),
        *(slots.PREPARE, slots.ADVANCE, slots.GROW),
    ):
        if not threading.main_thread().is_alive():  # the program ends, and waits for this thread
            break
        kernel.prepare()
    if helper is not None:
        _wait_for(helper)
    if threading.main_thread().is_alive():
        prepare_draws()


def prepare_draws() -> None:
    """Load what comes behind the forward pass."""
    sampling.CHOOSE.prepare()
    logits.prepare()


def _start_helper(tell: Callable[[str], None] | None) -> subprocess.Popen[bytes] | None:
    """The second process; ``None`` for one thread alone, or where it would be of no use."""
    if tell is not None:
        tell(f"first start with {isa.LEVEL} kernels: compiling them, which takes some 20 seconds")
    is_python = Path(sys.executable or "").name.startswith("python") and not hasattr(sys, "frozen")
    if not (is_python and is_kept()) or num_threads() == 1:
        return None
    # Of all packages of this name it must find this one, not one in the directory it starts in.
    places = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
    code = (
        f"import sys; sys.path[:] = {places}; "
        "from kernels.cpu.prepare import prepare_draws; prepare_draws()"
    )
    try:
        helper = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return None
    sampling.CHOOSE.compile_after(lambda: _wait_for(helper))
    return helper


def _wait_for(helper: subprocess.Popen[bytes]) -> None:
    """If it fails, this process compiles itself what is missing. It ends with the program."""
    until = time.monotonic() + _MAX_SECONDS
    while helper.poll() is None:
        if time.monotonic() > until or not threading.main_thread().is_alive():
            helper.kill()
        time.sleep(_GLANCE)

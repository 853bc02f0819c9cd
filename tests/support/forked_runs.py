"""Runs a function in a forked process that need not import anything, where a test needs a process
but not a fresh one: its standard streams, limits or death are its own."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from support.patience import WAIT_SECONDS
from support.served import IMPORTED


def run_forked(
    target: Callable[..., object], *args: object, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Call ``target``, a function of a module, with these environment variables. Returns the exit
    status, which is that of ``sys.exit`` if the function calls it, and what it has written."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    with tempfile.TemporaryDirectory() as directory:
        files = Path(directory, "out"), Path(directory, "err")
        process = context.Process(target=_run, args=(files, variables, target, args))
        process.start()
        process.join(WAIT_SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise TimeoutError(f"{target.__name__} has not ended within {WAIT_SECONDS} s")
        out, err = (file.read_text() for file in files)
        return subprocess.CompletedProcess((target.__name__,), process.exitcode, out, err)


def _run(
    files: tuple[Path, Path],
    variables: dict[str, str],
    target: Callable[..., object],
    args: tuple[object, ...],
) -> None:
    os.environ.update(variables)
    for file, stream in zip(files, (sys.stdout, sys.stderr), strict=True):
        with file.open("w") as written:
            os.dup2(written.fileno(), stream.fileno())
    target(*args)

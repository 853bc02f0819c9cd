"""Checks, before a model is loaded, whether Triton can launch kernels on this machine.

Triton compiles and caches a C module at its first use, which needs a C compiler and Python's
headers.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

COMPILERS = ("gcc", "clang")
BUILD_SECONDS = 60.0
SOURCE = "#include <Python.h>\nint nothing;\n"


def why_triton_cannot_start() -> str | None:
    """Returns what is missing for Triton and how to get it; ``None`` if Triton can launch kernels
    here."""
    try:
        triton = importlib.import_module("triton")
    except Exception as error:  # its libraries may not fit the system
        reason = f"{type(error).__name__}: {error}"
        return f"Triton cannot be imported ({reason}); pip install 'triton>=3.6,<3.8'"
    try:
        triton.runtime.driver.active.get_current_target()
    except Exception as error:
        found = None if triton.knobs.build.impl else missing_for_build(triton.knobs.build.cc)
        reason = f"{type(error).__name__}: {error}"
        return found or f"Triton {triton.__version__} finds no supported device ({reason})"
    return None


def missing_for_build(compiler: str | None) -> str | None:
    """Returns what is missing to build a C extension module; ``None`` if one can be built.
    compiler: the value of ``CC``; ``None``: search ``PATH``."""
    command = compiler or next(filter(shutil.which, COMPILERS), None)
    if command is None or shutil.which(command) is None:
        fault = f"CC is {compiler!r}, which does not exist" if compiler else "none is in PATH"
        return (
            f"Triton builds its launcher with a C compiler, and {fault}: apt install gcc "
            "python3-dev, or set CC"
        )
    include = _include()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "module.c"
        source.write_text(SOURCE)
        made = [str(source), "-shared", "-fPIC", f"-I{include}", "-o", f"{folder}/module.so"]
        reason = _failure([command, *made])
    if reason is None:
        return None
    if "Python.h" in reason:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return (
            f"Triton builds its launcher with {command}, which finds no Python.h in {include}: "
            f"apt install python3-dev (python{version}-dev)"
        )
    return f"Triton builds its launcher with {command}, which fails: {reason:.500}"


def _failure(command: list[str]) -> str | None:
    try:
        done: Any = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",  # compiler messages may be localised
            timeout=BUILD_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else str(done.stderr).strip()


def _include() -> str:
    """The directory in which Triton searches for Python's headers."""
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    return sysconfig.get_paths(scheme=scheme)["include"]

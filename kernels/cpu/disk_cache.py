"""Where compiled functions are kept between processes.

Imports :mod:`kernels.cpu.isa` before anything is compiled: whoever hands a function to Numba comes
by here.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from numba import config
from numba.core import caching
from numba.core.registry import cpu_target

from kernels.cpu import isa

_TURN = threading.RLock()


@cache
def _cache_directory() -> str | None:
    """Where compiled bodies are kept: beside the sources, else in the user's cache, if writable.

    Named after the text of all sources: Numba looks only at the file a body stands in, and would
    miss a change in what the body calls.
    """
    here = Path(__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(here.rglob("*.py")))
    name = f"numba-{isa.LEVEL}-{hashlib.sha256(text).hexdigest()[:16]}"
    for parent in (here / "__pycache__", Path.home() / ".cache" / "metronome"):
        try:
            (parent / name).mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(parent / name, os.W_OK):
            return str(parent / name)
    return None


def _place() -> str | None:
    """What Numba was told, else ours."""
    return config.CACHE_DIR or _cache_directory()


class OneSaverAtATime(caching.IndexDataCacheFile):  # type: ignore[misc]
    """The compiled variants of one function, to which several processes may add.

    A variant gets a file that the index does not name yet. Two processes that look at the same time
    choose the same one, and the index may then name it for the variant that is not in it, for good.
    """

    def save(self, key: Any, data: Any) -> None:
        with open(f"{self._index_path}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
            super().save(key, data)


@contextmanager
def cache_of_these_sources() -> Iterator[bool]:
    """Functions handed to Numba meanwhile are kept there; says whether there is such a place.

    Numba chooses place and class when a function is handed over, not when it is compiled. Both are
    the process's: threads take turns.
    """
    with _TURN:
        chosen = _place()
        before, config.CACHE_DIR = config.CACHE_DIR, chosen or ""
        file, caching.IndexDataCacheFile = caching.IndexDataCacheFile, OneSaverAtATime
        try:
            yield chosen is not None
        finally:
            config.CACHE_DIR, caching.IndexDataCacheFile = before, file


def is_kept(body: Callable[..., Any], signature: Any) -> bool:
    """Whether what is compiled from this function is there, so that it need not be compiled."""
    with cache_of_these_sources() as is_writable:
        if not is_writable:
            return False
        kept = caching.FunctionCache(body)
        key = kept._index_key(signature, cpu_target.target_context.codegen())
        file = kept._cache_file
        data = file._load_index().get(key)
        return data is not None and os.path.exists(file._data_path(data))


def kept_file(name: str) -> Path | None:
    """Where something else that depends on the machine is kept, if there is such a place."""
    place = _place()
    return Path(place) / name if place else None


def has_place() -> bool:
    """Whether there is a place where compiled functions are kept."""
    return _place() is not None

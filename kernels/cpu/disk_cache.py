"""Where compiled functions are kept between processes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from numba import config


@cache
def _cache_directory() -> str | None:
    """Where compiled bodies are kept: beside the sources, else in the user's cache, if writable.

    Named after the text of all sources: Numba looks only at the file a body stands in, and would
    miss a change in what the body calls.
    """
    here = Path(__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(here.glob("*.py")))
    name = "numba-" + hashlib.sha256(text).hexdigest()[:16]
    for parent in (here / "__pycache__", Path.home() / ".cache" / "metronome"):
        try:
            (parent / name).mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(parent / name, os.W_OK):
            return str(parent / name)
    return None


@contextmanager
def cache_of_these_sources() -> Iterator[bool]:
    """Functions handed to Numba meanwhile are kept there; says whether there is such a place.

    Numba reads its cache directory when a function is handed over, not when it is compiled.
    """
    chosen = config.CACHE_DIR or _cache_directory()
    before, config.CACHE_DIR = config.CACHE_DIR, chosen or ""
    try:
        yield chosen is not None
    finally:
        config.CACHE_DIR = before

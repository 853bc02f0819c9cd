"""Random numbers of a run, with a separate stream for each purpose.

Changing one option leaves the other streams unchanged, so runs with the same seed differ only in
what was changed."""

from __future__ import annotations

from zlib import crc32

import numpy as np

from engine.errors import ConfigError

CHUNK = 4096  # numbers drawn in one call


class RandomDraws:
    """Random streams by name; the same seed and name always give the same numbers."""

    def __init__(self, seed: int) -> None:
        if seed < 0:
            raise ConfigError(f"seed is {seed}, must be 0 or more")
        self._seed = seed

    def stream(self, name: str) -> np.random.Generator:
        """A new stream with this name."""
        return np.random.Generator(np.random.PCG64([self._seed, crc32(name.encode())]))

"""Random numbers of a run: a stream for each thing that is drawn.

Another option, or another number of requests, leaves the draws of all other things as they were:
so two runs of the same seed differ by what was meant to differ.
"""

from __future__ import annotations

from zlib import crc32

import numpy as np

from engine.errors import ConfigError

CHUNK = 4096  # numbers that are drawn at once


class RandomDraws:
    """Streams of random numbers by name. The same seed and name give the same numbers."""

    def __init__(self, seed: int) -> None:
        if seed < 0:
            raise ConfigError(f"seed is {seed}, must be 0 or more")
        self._seed = seed

    def stream(self, name: str) -> np.random.Generator:
        """The stream of this name, from its beginning."""
        return np.random.Generator(np.random.PCG64([self._seed, crc32(name.encode())]))

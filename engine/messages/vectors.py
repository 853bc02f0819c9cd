"""Results of pooled requests as arrays, in a process that computes or reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]


class PooledPart(msgspec.Struct, array_like=True):
    """Results of pooled requests in a step.

    Row ``rows[i]`` of the plan has ``sizes[i]`` numbers, in vectors of ``widths[i]``."""

    rows: NDArray[np.int32]  # ascending
    sizes: NDArray[np.int32]
    widths: NDArray[np.int32]
    values: Vectors  # of all rows, concatenated

    @classmethod
    def of(cls, results: Sequence[tuple[int, Vectors]]) -> PooledPart:
        """Join the results of some rows, [width] or [vectors, width] each."""
        rows, vectors = [row for row, _ in results], [each for _, each in results]
        values = np.concatenate([each.reshape(-1) for each in vectors])
        sizes, widths = [each.size for each in vectors], [each.shape[-1] for each in vectors]
        places, counts, lengths = (
            np.array(column, dtype=np.int32) for column in (rows, sizes, widths)
        )
        return cls(places, counts, lengths, values.astype(np.float32, copy=False))

    @classmethod
    def without_values(cls, rows: NDArray[np.int32]) -> PooledPart:
        """Results of these rows that have no numbers, as in replays and simulations."""
        nothing = np.zeros(len(rows), dtype=np.int32)
        return cls(rows, nothing, nothing, np.empty(0, dtype=np.float32))

    def entries(self) -> Iterator[tuple[int, int, Vectors]]:
        """For each result: its row, the numbers in a vector, and its values."""
        begin = 0
        columns = (column.tolist() for column in (self.rows, self.sizes, self.widths))
        for row, size, width in zip(*columns, strict=True):
            yield row, width, self.values[begin : begin + size]
            begin += size


def as_vectors(values: bytes, width: int, *, by_token: bool) -> Vectors:
    """The numbers of a result: [width], or [tokens, width] for a task by token."""
    vectors: Vectors = np.frombuffer(values, "<f4").astype(np.float32)
    return vectors.reshape(-1, width) if by_token else vectors

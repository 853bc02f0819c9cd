"""Orders that several policies use, computed with arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.sched.columns import Columns
from engine.sched.table import Array


def newcomers_by(
    key: Callable[[Columns], Array], columns: Columns, now: float, max_wait: float
) -> tuple[Array, Array]:
    """Return ranks as two arrays (group, key). Group 0: requests that run or were preempted; 1: new
    requests that waited ``max_wait`` seconds; 2: other new requests, by ascending ``key``."""
    is_new = columns.is_waiting & (columns.num_preempted == 0)
    is_young = is_new & (now - columns.arrival_time < max_wait)
    keys = np.zeros(len(columns))
    if is_young.any():
        young = columns if is_young.all() else columns[is_young]
        keys[is_young] = key(young)
    return is_new.astype(np.int64) + is_young, keys

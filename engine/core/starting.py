"""What a core does and logs while it starts."""

from __future__ import annotations

import gc
import logging
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.config.decide import GIB, Decided, ModelFacts
from engine.config.kv_groups import FULL, max_concurrency, request_blocks, sized

logger = logging.getLogger("engine.core")


@contextmanager
def not_collecting() -> Iterator[None]:
    """Disable garbage collection while modules are imported, and exempt their objects from later
    collections. Saves a tenth of the import time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def log_pool(decided: Decided, facts: ModelFacts) -> None:
    """Log the size of the KV cache, how many tokens and requests fit into it, and what a request
    holds in each group of layers.

    In layers with windows a request holds fewer blocks while it decodes than while it computes its
    prompt."""
    num_usable, block_size = decided.num_kv_blocks - 1, decided.block_size
    longest, groups = decided.max_model_len, decided.kv_groups
    decoding = sized(groups, 1, block_size)
    num_decoding = max_concurrency(num_usable, decoding, block_size, longest)
    num_all = max_concurrency(num_usable, groups, block_size, longest)
    logger.info(
        "KV cache: %d blocks of %d tokens, %.2f GiB, enough for %d tokens: %.2f requests of %d "
        "tokens%s",
        *(num_usable, block_size, decided.num_kv_blocks * facts.block_bytes / GIB),
        *(num_decoding * longest, num_decoding, longest),
        "" if groups == (FULL,) else f" while they decode, {num_all:.2f} while all prefill",
    )
    if groups == (FULL,):
        return
    for (group, after), count in Counter(zip(groups, decoding, strict=True)).items():
        entries = request_blocks([group], block_size, longest)
        logger.info(
            "KV groups with %s: %d; such a request holds %d blocks in each%s",
            *(group.kind, count, request_blocks([after], block_size, longest)),
            f" while it decodes, {entries} at most" if group.window else "",
        )


def read_ahead(path: Path) -> None:
    """Start reading the weight files in ``path`` from disk while Python still imports."""
    for file in path.glob("*.safetensors"):
        # Files that cannot be opened are reported later by the loader.
        with suppress(OSError), file.open("rb") as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

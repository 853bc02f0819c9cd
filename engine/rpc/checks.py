"""Checks of outputs from a core, which may run other code than its client."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import WireError
from engine.messages.requests import CoreOutputs


def check_places(places: Sequence[int], among: Sequence[object]) -> None:
    """Raise ``WireError`` if a message from the core contains an index that is not in ``among``."""
    for place in places:
        if not 0 <= place < len(among):
            raise WireError(
                f"invalid index {place} in a message from the core ({len(among)} entries)"
            )


def check_counts(batch: CoreOutputs) -> None:
    """Raise ``WireError`` if a batch's numbers of requests and of tokens contradict its counts."""
    num_rows, counts = len(batch.request_ids), batch.counts
    if counts is None:
        is_right = len(batch.token_ids) == num_rows
    else:
        total = sum(counts)
        is_right = (
            len(counts) == num_rows
            and total == len(batch.token_ids)
            and min(counts, default=0) >= 0
        )
    if not is_right:
        raise WireError(
            f"invalid counts in a message from the core: {num_rows} requests, "
            f"{len(batch.token_ids)} tokens"
        )

"""Functions on the rows of a batch of outputs: pick some, add ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from msgspec.structs import replace

from engine.messages.outputs import CoreOutputs, Finished


def pick_rows(batch: CoreOutputs, rows: Sequence[int]) -> CoreOutputs:
    """These rows with all that belongs to them, in this order; ``batch`` itself stays as it is."""
    place_of = {row: place for place, row in enumerate(rows)}
    counts, tokens = batch.counts, batch.token_ids
    if counts is None:
        picked_tokens = [tokens[row] for row in rows]
    else:
        begins = list(accumulate(counts, initial=0))
        picked_tokens = [token for row in rows for token in tokens[begins[row] : begins[row + 1]]]
    return replace(
        batch,
        request_ids=[batch.request_ids[row] for row in rows],
        token_ids=picked_tokens,
        counts=None if counts is None else [counts[row] for row in rows],
        started=[
            replace(each, index=place_of[each.index])
            for each in batch.started
            if each.index in place_of
        ],
        finished=[
            replace(end, index=place_of[end.index])
            for end in batch.finished
            if end.index in place_of
        ],
        logprobs={place_of[row]: each for row, each in batch.logprobs.items() if row in place_of},
        prompt_logprobs={
            place_of[row]: each for row, each in batch.prompt_logprobs.items() if row in place_of
        },
    )


def with_ends(batch: CoreOutputs, ends: Iterable[tuple[str, Finished]]) -> CoreOutputs:
    """The batch and, behind it, a row without tokens for each of these ends."""
    first, added = len(batch.request_ids), list(ends)
    counts = [1] * first if batch.counts is None else batch.counts
    return replace(
        batch,
        request_ids=[*batch.request_ids, *(name for name, _ in added)],
        counts=[*counts, *(0 for _ in added)],
        finished=[
            *batch.finished,
            *(replace(end, index=first + place) for place, (_, end) in enumerate(added)),
        ],
    )

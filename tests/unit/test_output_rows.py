"""Rows of a batch: what belongs to one goes with it, and nothing else."""

from __future__ import annotations

import random
from itertools import accumulate

import msgspec
import pytest

from engine.messages.requests import (
    CoreOutputs,
    Finished,
    Started,
    TokenLogprobs,
    pick_rows,
    with_ends,
)


def story_of(batch: CoreOutputs) -> dict[str, object]:
    """What a batch says of each request."""
    counts = batch.counts or [1] * len(batch.request_ids)
    begins = list(accumulate(counts, initial=0))
    return {
        name: (
            batch.token_ids[begins[row] : begins[row + 1]],
            [(s.num_cached_tokens, s.scheduled_time) for s in batch.started if s.index == row],
            [(end.reason, end.message) for end in batch.finished if end.index == row],
            batch.logprobs.get(row),
            batch.prompt_logprobs.get(row),
        )
        for row, name in enumerate(batch.request_ids)
    }


def drawn(dice: random.Random) -> CoreOutputs:
    num = dice.randint(1, 8)
    counts = None if dice.random() < 0.3 else [dice.randint(0, 3) for _ in range(num)]
    rows = range(num)
    return CoreOutputs(
        [f"r{row}" for row in rows],
        [dice.randrange(1000) for _ in range(num if counts is None else sum(counts))],
        counts,
        1.5,
        started=[Started(row, row, 2.0 * row) for row in rows if dice.random() < 0.4],
        finished=[Finished(row, "stop", message=str(row)) for row in rows if dice.random() < 0.4],
        logprobs={row: [TokenLogprobs([row], [-1.0], 1)] for row in rows if dice.random() < 0.4},
        prompt_logprobs={
            row: [TokenLogprobs([row], [-2.0], 2)] for row in rows if dice.random() < 0.2
        },
    )


@pytest.mark.parametrize("turn", range(50))
def test_what_is_left_says_what_it_said(turn: int, seed: int) -> None:
    dice = random.Random(seed + turn)
    batch = drawn(dice)
    before = msgspec.msgpack.encode(batch)
    rows = dice.sample(range(len(batch.request_ids)), dice.randint(0, len(batch.request_ids)))
    picked, names = pick_rows(batch, rows), [batch.request_ids[row] for row in rows]
    assert picked.request_ids == names
    assert story_of(picked) == {name: story_of(batch)[name] for name in names}
    longer = with_ends(picked, [("x", Finished(9, "abort")), ("y", Finished(9, "error"))])
    ends = {
        "x": ([], [], [("abort", "")], None, None),
        "y": ([], [], [("error", "")], None, None),
    }
    assert story_of(longer) == story_of(picked) | ends
    assert msgspec.msgpack.encode(batch) == before

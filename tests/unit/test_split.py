"""Outputs that cannot travel: who fails, and who gets theirs all the same."""

from __future__ import annotations

from typing import Any

from engine.ipc.codec import MessageEncoder
from engine.messages.requests import CoreOutputs, Finished, TokenLogprobs
from engine.rpc.sessions import Piece, pieces_of

LARGE = [TokenLogprobs(list(range(300)), [-1.0] * 300, 1)]


def batch(*names: str, **details: Any) -> CoreOutputs:
    return CoreOutputs(list(names), [1] * len(names), None, 0.0, **details)


def pieces(made: CoreOutputs) -> list[Piece]:
    return pieces_of(made, MessageEncoder(max_bytes=6000).encode)


def told(made: list[Piece]) -> dict[str, str]:
    """Request -> reason of its end, "" if it goes on."""
    return {
        name: next((end.reason for end in piece.batch.finished if end.index == row), "")
        for piece in made
        for row, name in enumerate(piece.batch.request_ids)
    }


def test_a_wrong_end_beside_scores_that_are_too_large_together() -> None:
    wrong = Finished(0, "stop", kv_transfer_params={"handle": object()})
    names = ("bad", "large", "also large", "small")
    made = pieces(batch(*names, finished=[wrong], logprobs={1: LARGE, 2: LARGE}))
    assert told(made) == {"bad": "error", "large": "", "also large": "", "small": ""}
    assert [name for piece in made if piece.fault for name in piece.batch.request_ids] == ["bad"]
    assert sum(len(piece.batch.token_ids) for piece in made) == 3
    assert [row for piece in made for row in piece.batch.logprobs] == [0, 0]

"""Whose fault it is that outputs cannot travel, when there are several candidates."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.mend import mended
from engine.ipc.codec import Encoder
from engine.messages.outputs import CoreOutputs, Finished, TokenLogprobs


def batch(*names: str, **details: Any) -> CoreOutputs:
    return CoreOutputs(list(names), [1] * len(names), None, 0.0, **details)


def test_statistics_that_cannot_travel_harm_nobody() -> None:
    """A scheduler of the user's own makes them."""
    scores = TokenLogprobs([1], [-1.0], 1)
    stats: Any = object()
    sent, failed = mended(
        batch("x", "y", stats=stats, logprobs={1: [scores]}), Encoder().encode, "an object"
    )
    assert sent.logprobs == {1: [scores]} and sent.stats is None
    assert not sent.finished and not failed


def test_a_wrong_end_beside_scores_that_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.ipc.codec.MAX_MESSAGE_BYTES", 6000)
    scores = [TokenLogprobs(list(range(300)), [-1.0] * 300, 1)]
    wrong = Finished(0, "stop", kv_transfer_params={"handle": object()})
    names = ("bad", "large", "also large", "small")
    sent, failed = mended(
        batch(*names, finished=[wrong], logprobs={1: scores, 2: scores}), Encoder().encode, "why"
    )
    assert sent.request_ids == ["small", "bad", "large", "also large"] and sent.token_ids == [1]
    assert [end.reason for end in sent.finished] == ["error"] * 3
    assert failed == ["bad", "large", "also large"]

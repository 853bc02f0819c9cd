"""Drafts that are always wrong: what does having them cost a user who gains nothing by them?

    python benchmarks/compare.py MODEL_DIR --beside 'resources=["wrong_drafts.WrongDrafts"]'

Four guesses for every request, whenever it is asked. Whether they are verified is decided as with
any method of `speculative_config`.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine import Request
from engine.spec.decide import Drafts
from engine.spec.payoff import Payoff
from engine.spec.worth import Worth

NUM_DRAFTS = 4


class Wrong:
    """Says again, and again, what stood two tokens before."""

    def propose(self, req: Request, num_tokens: int) -> Sequence[int]:
        return [(int(req.tokens[-2]) + 1) % 1000] * num_tokens

    def release(self, req: Request) -> None:
        """Nothing is kept."""


class WrongDrafts(Drafts):
    """To be named in ``resources``."""

    def __init__(self) -> None:
        super().__init__(NUM_DRAFTS, Wrong(), worth=Worth(NUM_DRAFTS), payoff=Payoff())

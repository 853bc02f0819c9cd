"""What a step loses by having drafts at all, and whether what they may bring is worth that.

What a draft costs at the margin is in the cost model; what drafting costs as such is not. A step
with drafts waits for the one before it, may not be recorded, is put together by more of the host:
between 0 and 20 ms, which no line through sizes of steps tells. So it is measured on the engine's
own clock, from the end of a step to the end of the next, for numbers of running requests apart;
what was not measured yet is taken to be as for the nearest number that was.

Drafts with a lower expectation are still verified within a small budget (one token of each request
plus 1 % of all tokens), so that a change in acceptance is noticed. All requests that want to try do
so in the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import NamedTuple

WINDOW = 16  # steps of each kind that count
ENOUGH = 4  # steps with drafts, before there is a cost
FIRST_LOOK, LOOK = 8, 256  # steps with drafts in a row, then a few without; nothing known, or known
FEW = 3  # the first of them cannot overlap with the one before it, so it says too little
SHARE = 0.01  # of the tokens that may be lost by trying
UNKNOWN_COST = 1.0  # before any was measured
MOST_CREDIT = 3.0  # steps; whatever a cost was measured to be, so much buys a try
MOST_WAIT = 16  # steps in which no drafts are requested, after drafts that were not worth it


class DraftStepKind(NamedTuple):
    """What a step had to do with drafts."""

    has_drafts: bool  # some were verified, or made by the worker
    num_wished: int = 0  # made after a row by the worker, at most


def usual(seconds: Sequence[float]) -> float:
    """The median; of few the least, as the first steps of a kind may compile something."""
    return median(seconds) if len(seconds) >= WINDOW // 2 else min(seconds)


@dataclass
class TrialCredit:
    """What may be lost by trying, of all loads together."""

    tokens: float = MOST_CREDIT


class DraftLoad:
    """What steps with about this many requests running take, with drafts and without.

    ``others``: loads of other numbers of requests, the nearest first.
    """

    def __init__(self, credit: TrialCredit, others: Callable[[], Iterable[DraftLoad]]) -> None:
        self._drafting: deque[float] = deque(maxlen=WINDOW)  # seconds
        self._plain: deque[float] = deque(maxlen=WINDOW)
        self._wished: deque[int] = deque(maxlen=WINDOW)  # drafts that the worker made for a row
        self._in_a_row = 0  # steps with drafts
        self._looks = 0  # steps without that are still to be made
        self._wait, self._waited = 0, 0
        self._credit = credit
        self._others = others
        self.num_seqs = 1  # just now

    def asks(self) -> bool:
        """May this step have drafts? To be called once a step."""
        if self._looks:
            self._looks -= 1
            return False
        if self._wait:
            self._wait -= 1
            return False
        return True

    def tries(self) -> bool:
        """May it have drafts of which nothing is known?"""
        return self._credit.tokens >= min(self.cost(), MOST_CREDIT) * self.num_seqs

    def takes(self, expected: float, num_steps: int = 1) -> bool:
        """Are drafts that bring this many tokens worth it? num_steps: that cost more, if only these
        few are tried."""
        lost = self.cost() - expected / self.num_seqs
        if lost <= 0:
            self._waited = 0
            return True
        if self.tries():
            steps = min(lost + (num_steps - 1) * self.cost(), MOST_CREDIT)
            self._credit.tokens -= steps * self.num_seqs
            return True
        self._wait = self._waited = min(2 * self._waited + 1, MOST_WAIT)
        return False

    @property
    def is_measured(self) -> bool:
        return len(self._drafting) >= ENOUGH and len(self._plain) >= FEW

    def cost(self) -> float:
        """Cost of drafts in a step, as a share of a step without."""
        if not self.is_measured:
            known = (other for other in self._others() if other.is_measured)
            nearest = next(known, None)
            return UNKNOWN_COST if nearest is None else nearest.cost()
        plain = usual(self._plain)
        return max(0.0, usual(self._drafting) / plain - 1.0) if plain > 0 else 0.0

    def price(self) -> float:
        """Price of one draft more that the worker makes, by the same measure."""
        if not self._wished or not self.is_measured:
            return 0.0
        return self.cost() * len(self._wished) / sum(self._wished)

    def lend(self, tokens: float) -> None:
        """This many more may be lost by trying."""
        most = MOST_CREDIT * self.num_seqs
        self._credit.tokens = min(self._credit.tokens + tokens, most)

    def add(self, seconds: float, kind: DraftStepKind) -> None:
        """A step has taken so long."""
        self.lend(SHARE * self.num_seqs)
        has_drafts = kind.has_drafts
        if kind.num_wished:
            self._wished.append(kind.num_wished)
        (self._drafting if has_drafts else self._plain).append(seconds)
        self._in_a_row = self._in_a_row + 1 if has_drafts else 0
        if self._in_a_row == (LOOK if len(self._plain) >= FEW else FIRST_LOOK):
            self._in_a_row, self._looks = 0, FEW


class Payoff:
    """The loads of an engine, and its clock."""

    def __init__(self) -> None:
        self._loads: dict[
            int, DraftLoad
        ] = {}  # by the power of two that holds the running requests
        self._credit = TrialCredit()
        self._last: float | None = None  # when a step had ended and others were on their way

    def load(self, num_running: int) -> DraftLoad:
        """The load of this many requests."""
        size = num_running.bit_length()
        if size not in self._loads:
            self._loads[size] = DraftLoad(self._credit, partial(self._others, size))
        load = self._loads[size]
        load.num_seqs = max(1, num_running)
        return load

    def settled(self, num_seqs: int, now: float, kind: DraftStepKind, *, is_busy: bool) -> None:
        """A step of decodes has ended. is_busy: another one follows it."""
        if self._last is not None:
            self.load(num_seqs).add(now - self._last, kind)
        self._last = now if is_busy else None

    def interrupted(self, now: float, *, is_busy: bool) -> None:
        """A step that tells nothing, as it computed prompts, has ended."""
        self._last = now if is_busy else None

    # -- helpers

    def _others(self, size: int) -> list[DraftLoad]:
        """The loads of other sizes, the nearest first."""
        sizes = sorted(self._loads, key=lambda other: abs(other - size))
        return [self._loads[other] for other in sizes if other != size]

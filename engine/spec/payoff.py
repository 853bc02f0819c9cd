"""Payoff: measures the fixed cost of drafts in a step, and decides whether a step has drafts.

A step with drafts waits for the step before it, may not use a recorded graph, and takes more work
on the host: 0 to 20 ms that the cost model, which is linear in the size of a step, does not
include. This cost is measured, from the end of a step to the end of the next. Numbers of running
requests are grouped by powers of two; a group without measurements uses those of the nearest one.

Drafts that are not worth their cost are still tried within a small budget (one token per request
plus 1 % of all tokens), to notice when acceptance changes. All requests do so in the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import NamedTuple

WINDOW = 16  # number of latest steps of each kind from which the cost is computed
ENOUGH = 4  # steps with drafts before a cost is computed
FIRST_LOOK, LOOK = 8, 256  # consecutive steps with drafts before some without are measured
FEW = 3  # such steps without drafts; the first cannot overlap, so one is not enough
SHARE = 0.01  # share of all tokens that may be lost by trying drafts
UNKNOWN_COST = 1.0  # the cost before any was measured, as a share of a step
MOST_CREDIT = 3.0  # in steps: this credit is enough for a try, whatever the measured cost
MOST_WAIT = 16  # most steps without drafts after drafts that were not worth it


class DraftStepKind(NamedTuple):
    """Whether a step had drafts, and how many the worker proposed per row."""

    has_drafts: bool  # drafts were verified, or proposed by the worker
    num_wished: int = 0  # most drafts that the worker proposed for a row


def usual(seconds: Sequence[float]) -> float:
    """The median of these durations; if they are few, the minimum, since the first may include
    compiling."""
    return median(seconds) if len(seconds) >= WINDOW // 2 else min(seconds)


@dataclass
class TrialCredit:
    """How many tokens an engine may still lose by trying drafts."""

    tokens: float = MOST_CREDIT


class DraftLoad:
    """Measures steps with and without drafts, for about the same number of running requests.

    ``others``: returns the ``DraftLoad`` objects of other numbers of requests, the nearest first.
    """

    def __init__(self, credit: TrialCredit, others: Callable[[], Iterable[DraftLoad]]) -> None:
        self._drafting: deque[float] = deque(maxlen=WINDOW)  # seconds of steps with drafts
        self._plain: deque[float] = deque(maxlen=WINDOW)
        self._wished: deque[int] = deque(maxlen=WINDOW)  # drafts per row that the worker proposed
        self._in_a_row = 0  # consecutive steps with drafts
        self._looks = 0  # steps without drafts that are still to be measured
        self._wait, self._waited = 0, 0
        self._credit = credit
        self._others = others
        self.num_seqs = 1  # number of running requests now

    def may_draft(self) -> bool:
        """Whether the next step may have drafts. Call this once per step. False while steps without
        drafts are measured, and for some steps after drafts that were not worth their cost."""
        if self._looks:
            self._looks -= 1
            return False
        if self._wait:
            self._wait -= 1
            return False
        return True

    def may_try(self) -> bool:
        """Whether the credit allows to try drafts that were not worth their cost before."""
        return self._credit.tokens >= min(self.cost(), MOST_CREDIT) * self.num_seqs

    def is_worth(self, expected: float, num_steps: int = 1) -> bool:
        """Whether to use drafts that are expected to yield ``expected`` tokens: True if that is
        worth their cost, or if the credit can pay for the loss of a try. num_steps: steps that a
        try slows down."""
        lost = self.cost() - expected / self.num_seqs
        if lost <= 0:
            self._waited = 0
            return True
        if self.may_try():
            steps = min(lost + (num_steps - 1) * self.cost(), MOST_CREDIT)
            self._credit.tokens -= steps * self.num_seqs
            return True
        self._wait = self._waited = min(2 * self._waited + 1, MOST_WAIT)
        return False

    @property
    def is_measured(self) -> bool:
        return len(self._drafting) >= ENOUGH and len(self._plain) >= FEW

    def cost(self) -> float:
        """The fixed extra time of a step with drafts, divided by the time of a step without."""
        if not self.is_measured:
            known = (other for other in self._others() if other.is_measured)
            nearest = next(known, None)
            return UNKNOWN_COST if nearest is None else nearest.cost()
        plain = usual(self._plain)
        return max(0.0, usual(self._drafting) / plain - 1.0) if plain > 0 else 0.0

    def price(self) -> float:
        """The fixed cost per draft that the worker proposes, divided by the duration of a step."""
        if not self._wished or not self.is_measured:
            return 0.0
        return self.cost() * len(self._wished) / sum(self._wished)

    def add_credit(self, tokens: float) -> None:
        """Add tokens to the credit for trying drafts, up to a maximum."""
        most = MOST_CREDIT * self.num_seqs
        self._credit.tokens = min(self._credit.tokens + tokens, most)

    def add(self, seconds: float, kind: DraftStepKind) -> None:
        """Add the duration of a step."""
        self.add_credit(SHARE * self.num_seqs)
        has_drafts = kind.has_drafts
        if kind.num_wished:
            self._wished.append(kind.num_wished)
        (self._drafting if has_drafts else self._plain).append(seconds)
        self._in_a_row = self._in_a_row + 1 if has_drafts else 0
        if self._in_a_row == (LOOK if len(self._plain) >= FEW else FIRST_LOOK):
            self._in_a_row, self._looks = 0, FEW


class Payoff:
    """Measures steps with and without drafts, by the number of running requests."""

    def __init__(self) -> None:
        # By number of running requests, rounded up to a power of two.
        self._loads: dict[int, DraftLoad] = {}
        self._credit = TrialCredit()
        self._last: float | None = None  # end of the last step, if another one followed at once

    def load(self, num_running: int) -> DraftLoad:
        """The ``DraftLoad`` for this number of running requests, created at its first use."""
        size = num_running.bit_length()
        if size not in self._loads:
            self._loads[size] = DraftLoad(self._credit, partial(self._others, size))
        load = self._loads[size]
        load.num_seqs = max(1, num_running)
        return load

    def settled(self, num_seqs: int, now: float, kind: DraftStepKind, *, is_busy: bool) -> None:
        """Record the duration of a decode step. now: its end, in s; is_busy: a step follows."""
        if self._last is not None:
            self.load(num_seqs).add(now - self._last, kind)
        self._last = now if is_busy else None

    def interrupted(self, now: float, *, is_busy: bool) -> None:
        """Record the end of a step that is not measured because it computed prompts or failed.
        is_busy: a step follows."""
        self._last = now if is_busy else None

    # -- helpers

    def _others(self, size: int) -> list[DraftLoad]:
        """The ``DraftLoad`` objects of other sizes than ``size``, the nearest first."""
        sizes = sorted(self._loads, key=lambda other: abs(other - size))
        return [self._loads[other] for other in sizes if other != size]

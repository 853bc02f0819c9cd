"""A policy that does whatever is legal: it reaches what no sensible one asks of the mechanism."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from engine.sched.policy import Admission, Defer, Limits, Policy, Refuse, SchedView, Verdict
from engine.sched.request import Request


class Wild(Policy):
    """Every hook throws the engine's dice; ``rate`` (0 to 1) is how often it does something odd.

    It evicts nobody twice of its own accord, so that everybody comes to an end.
    """

    dynamic = True
    waiting_may_preempt = True
    uses_ledger = True

    def __init__(self, rate: float = 0.2) -> None:
        self.rate = rate

    def odd(self, view: SchedView) -> bool:
        """Throw the dice."""
        return view.rng.random() < self.rate

    def rank(self, req: Request, view: SchedView) -> tuple[int, int]:
        return (view.rng.randrange(3) if self.odd(view) else 1, req.arrival)

    def limits(self, view: SchedView) -> Limits:
        if not self.odd(view):
            return Limits()
        rng = view.rng
        return Limits(rng.choice((None, 0, 1, 7)), rng.choice((None, 0, 1, 3)), rng.random() < 0.5)

    def evict(self, view: SchedView) -> Iterable[Request]:
        return [req for req in view.running if not req.num_preempted and self.odd(view)]

    def order(self, view: SchedView) -> Iterator[Request]:
        named = [req for req in (*view.running, *view.waiting) if not self.odd(view)]
        if self.odd(view):
            view.rng.shuffle(named)
        yield from named

    def admit(self, req: Request, view: SchedView) -> Admission:
        if self.odd(view):
            return view.rng.choice((Admission.SKIP, Admission.CLOSE, Admission.YES))
        return super().admit(req, view)

    def chunk(self, req: Request, num_tokens: int, view: SchedView) -> int:
        return view.rng.randint(1, num_tokens) if self.odd(view) else num_tokens

    def victim(
        self, candidates: Sequence[Request], req: Request, view: SchedView
    ) -> Request | None:
        return view.rng.choice((*candidates, None)) if self.odd(view) else candidates[-1]

    def on_add(self, req: Request, view: SchedView) -> Verdict:
        if not self.odd(view):
            return None
        return view.rng.choice((Refuse("a whim"), Defer(view.now + view.rng.randrange(64) / 64)))

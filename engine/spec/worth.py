"""How many drafts are worth verifying: what they bring against what a step with them costs.

A draft at place j brings a token if it and all before it are right: with probability
P_j = p_1 ... p_j. Verifying one more takes c seconds longer, in which a step of N sequences and T
seconds would bring N c / T tokens. So drafts are verified up to the last with P_j > N c / T (the
goodput of Liu et al. 2024, arXiv 2406.14066, at the margin). T and c come from the cost model that
is fitted to the engine's own steps; p_i from how often a request's drafts at place i were right,
drawn to how often those of all requests were while it has few (the mean of a Beta posterior).

A request whose drafts are not worth it rests: it has no drafts for 2, 4, ... 64 tokens, and
then with a few drafts. What a step with drafts costs as such is up to `payoff`.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.sched.request import Request

FIRST = 0.6  # of right drafts, before any was verified
PRIOR = 1.0  # drafts that what is known of all requests counts as
MOST_EVIDENCE = 4.0  # the same of what a request's drafts at all places tell of one of them
TRIED = 0.25  # tokens that drafts may cost which only tell whether a text repeats itself by now
KEEP = 0.9  # of what a request's earlier drafts count for, at each step with drafts
KEEP_ALL = 0.99  # the same of all requests' together
MOST_REST = 64  # tokens


class Rates:
    """How often drafts were right by place, given that those before them were; older ones weigh
    less."""

    def __init__(
        self, num_places: int, keep: float, tried: float = 0.0, right: float = 0.0
    ) -> None:
        self._keep = keep
        self.tried = [tried] * num_places
        self.right = [right] * num_places

    def add(self, num_verified: int, num_right: int) -> None:
        """One step: drafts after the first wrong one say nothing."""
        tried, right, keep = self.tried, self.right, self._keep
        for place in range(min(num_verified, num_right + 1)):
            tried[place] = tried[place] * keep + 1.0
            right[place] = right[place] * keep + (place < num_right)


class Worth:
    """Chooses the number of drafts of each request."""

    def __init__(self, num_places: int, first: float = FIRST) -> None:
        """first: how many drafts are taken to be right before any was verified."""
        self._num_places = num_places
        self._all = Rates(num_places, KEEP_ALL, PRIOR, PRIOR * first)
        self._own: dict[int, Rates] = {}  # by number of the request
        self._rest: dict[int, tuple[int, int]] = {}  # tokens at which it is called again; last rest

    def rests(self, req: Request) -> bool:
        """Is it too early to ask for drafts again?"""
        until = self._rest.get(req.arrival)
        return until is not None and req.num_tokens < until[0]

    def has_rested(self, req: Request) -> bool:
        """Were its drafts not worth it when it was last called?"""
        return req.arrival in self._rest

    def num_worth(self, req: Request, drafts: Sequence[int], price: float) -> int:
        """How many of these drafts to verify. price: tokens that one draft more must bring."""
        num = self.expect(req, len(drafts), price)[0]
        if num or not drafts:
            return num
        # A few drafts tell whether its text has begun to repeat itself, if that could ever pay.
        has_rested = self.has_rested(req)
        self._let_rest(req)
        if not has_rested or price >= 1.0:
            return 0
        return min(len(drafts), self._num_places, max(1, int(TRIED / max(price, 1e-3))))

    def expect(self, req: Request, most: int, price: float = -1.0) -> tuple[int, float]:
        """How many of this many drafts bring more than the price, and tokens they bring
        together."""
        own, every = self._own.get(req.arrival), self._all
        weight, known = PRIOR, 0.0
        if own is not None:  # what its drafts at other places were says something of this one
            evidence = min(sum(own.tried), MOST_EVIDENCE)
            weight, known = PRIOR + evidence, evidence * sum(own.right) / max(sum(own.tried), 1e-9)
        chance, num, together = 1.0, 0, 0.0
        for place in range(min(most, self._num_places)):
            rate = every.right[place] / every.tried[place]
            if own is not None:
                rate = (own.right[place] + PRIOR * rate + known) / (own.tried[place] + weight)
            chance *= rate
            if chance <= price:
                break
            num += 1
            together += chance
        return num, together

    def count(self, req: Request, num_verified: int, num_right: int) -> None:
        """Drafts of the request were verified."""
        own = self._own.get(req.arrival)
        if own is None:
            own = self._own[req.arrival] = Rates(self._num_places, KEEP)
        own.add(num_verified, num_right)
        self._all.add(num_verified, num_right)
        if num_right:
            self._rest.pop(req.arrival, None)

    def release(self, req: Request) -> None:
        """The request has ended."""
        self._own.pop(req.arrival, None)
        self._rest.pop(req.arrival, None)

    def _let_rest(self, req: Request) -> None:
        _, last = self._rest.get(req.arrival, (0, 1))
        rest = min(2 * last, MOST_REST)
        self._rest[req.arrival] = (req.num_tokens + rest, rest)

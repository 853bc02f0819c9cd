"""Worth: decides how many drafts of a request to verify.

The draft at position j yields a token if it and all drafts before it are right: with probability
P_j = p_1 ... p_j. Verifying one more draft takes c seconds, in which steps of N sequences and T
seconds would yield N c / T tokens. So drafts are verified up to the last one with P_j > N c / T
(the marginal goodput of Liu et al. 2024, arXiv 2406.14066). T and c come from the cost model, which
is fitted to the engine's steps. p_i is the share of right drafts at position i of this request; as
long as these are few, the share of all requests counts too (the mean of a Beta posterior).

A request whose drafts are not worth verifying rests: it gets no drafts for 2, 4, ... 64 tokens, and
then a few as a try. The fixed cost of a step with drafts is considered in `payoff`."""

from __future__ import annotations

from collections.abc import Sequence

from engine.sched.request import Request

FIRST = 0.6  # assumed share of right drafts before any was verified
PRIOR = 1.0  # weight of the share over all requests, in drafts
MOST_EVIDENCE = 4.0  # most weight of a request's share over all positions, in drafts
TRIED = 0.25  # most tokens that a try may cost, made to see whether a text repeats itself now
KEEP = 0.9  # factor on the weight of a request's earlier drafts, per step with drafts
KEEP_ALL = 0.99  # the same factor for the drafts of all requests
MOST_REST = 64  # longest rest, in tokens


class Rates:
    """For each position in the drafts of a step: how many drafts were verified there because all
    before them were right, and how many of these were right. Older drafts weigh less."""

    def __init__(
        self, num_places: int, keep: float, tried: float = 0.0, right: float = 0.0
    ) -> None:
        self._keep = keep
        self.tried = [tried] * num_places
        self.right = [right] * num_places

    def add(self, num_verified: int, num_right: int) -> None:
        """Count a step's drafts: the right ones, and the first wrong one after them."""
        tried, right, keep = self.tried, self.right, self._keep
        for place in range(min(num_verified, num_right + 1)):
            tried[place] = tried[place] * keep + 1.0
            right[place] = right[place] * keep + (place < num_right)


class Worth:
    """Chooses how many drafts to verify for each request."""

    def __init__(self, num_places: int, first: float = FIRST) -> None:
        """num_places: most drafts per step; first: share of right drafts assumed at the start."""
        self._num_places = num_places
        self._all = Rates(num_places, KEEP_ALL, PRIOR, PRIOR * first)
        self._own: dict[int, Rates] = {}  # by arrival number of the request
        self._rest: dict[int, tuple[int, int]] = {}  # token count when the rest ends; its length

    def is_resting(self, req: Request) -> bool:
        """Whether the request gets no drafts now because earlier ones were not worth it."""
        until = self._rest.get(req.arrival)
        return until is not None and req.num_tokens < until[0]

    def has_rested(self, req: Request) -> bool:
        """True if the last drafts of the request were not worth verifying."""
        return req.arrival in self._rest

    def num_to_verify(self, req: Request, drafts: Sequence[int], price: float) -> int:
        """How many leading drafts to verify. price: tokens that each further draft must yield."""
        num = self.expect(req, len(drafts), price)[0]
        if num or not drafts:
            return num
        # A few drafts show whether the text repeats itself now, if drafts could pay at all.
        has_rested = self.has_rested(req)
        self._let_rest(req)
        if not has_rested or price >= 1.0:
            return 0
        return min(len(drafts), self._num_places, max(1, int(TRIED / max(price, 1e-3))))

    def expect(self, req: Request, most: int, price: float = -1.0) -> tuple[int, float]:
        """Return how many of at most ``most`` drafts are expected to yield more than ``price``
        tokens each, and the number of tokens that these drafts are expected to yield together."""
        own, every = self._own.get(req.arrival), self._all
        weight, known = PRIOR, 0.0
        if own is not None:  # drafts at other positions are evidence, too
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
        """Count drafts of the request that were verified, and how many of them were right."""
        own = self._own.get(req.arrival)
        if own is None:
            own = self._own[req.arrival] = Rates(self._num_places, KEEP)
        own.add(num_verified, num_right)
        self._all.add(num_verified, num_right)
        if num_right:
            self._rest.pop(req.arrival, None)

    def release(self, req: Request) -> None:
        """Drop the state of a request that has ended."""
        self._own.pop(req.arrival, None)
        self._rest.pop(req.arrival, None)

    def _let_rest(self, req: Request) -> None:
        _, last = self._rest.get(req.arrival, (0, 1))
        rest = min(2 * last, MOST_REST)
        self._rest[req.arrival] = (req.num_tokens + rest, rest)

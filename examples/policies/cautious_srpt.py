"""Shortest remainder first, by what is likely rather than by a guess at one number."""

import numpy as np

from engine.sched import Policy, require_positive, require_share


class CautiousSRPT(Policy):
    """Requests go by an upper quantile of what is left of them; one that waits evicts another only
    if that is sure to be longer: its lower quantile is above the newcomer's upper one.

    Lengths are those seen so far, given what a request has generated already. ``high``, ``low``:
    the quantiles. ``max_wait``: seconds after which a request goes first.
    """

    dynamic = True
    waiting_may_preempt = True

    def __init__(self, high: float = 0.8, low: float = 0.2, max_wait: float = 30.0) -> None:
        require_share(high=high, low=low)
        require_positive(max_wait=max_wait)
        self.high, self.low, self.max_wait = high, low, max_wait

    def left(self, columns, q, view):
        """Output tokens to come, by this quantile; the most that may come where nothing is known.

        Many requests have as many tokens as others, so there are few questions.
        """
        done, places = np.unique(columns.num_output, return_inverse=True)
        known = [view.lengths.quantile(q, above=n) for n in done.tolist()]
        likely = np.array([np.inf if length is None else length for length in known])[places]
        return np.minimum(likely, columns.max_total - columns.num_prompt) - columns.num_output

    def ranks(self, reqs, view):
        columns = view.columns(reqs)
        view.own("least").put(columns, self.left(columns, self.low, view))
        self.least = view.own("least")
        is_old = view.now - columns.arrival_time >= self.max_wait
        most = np.where(is_old, 0.0, self.left(columns, self.high, view))
        return ~is_old, most

    def outranks(self, req, other):
        if not other.rank[0] or not other.num_output or other.num_preempted:
            return False
        return not req.rank[0] or req.rank[1] < self.least[other]

    def takes_blocks(self, req, other):
        return self.precedes(req, other)

    def on_preempt(self, req, view):
        view.count("preempted by length")

"""Queues by what each user was served lately: a multi-level feedback queue over users."""

import numpy as np

from engine.sched import Policy, require_positive


class LevelFair(Policy):
    """Users sink a level each time they have used a quantum up, each quantum twice the one before;
    within a level the longest cached prefix goes first. Every ``period`` seconds all rise again.

    ``quantum``: tokens at the first level, prompt and output alike.
    """

    dynamic = True
    waiting_may_preempt = True

    def __init__(self, quantum: float = 2000.0, period: float = 10.0) -> None:
        require_positive(quantum=quantum, period=period)
        self.quantum, self.period = quantum, period
        self.served = {}  # tokens by user since all rose
        self.risen = 0.0

    def on_add(self, req, view):
        if view.now - self.risen >= self.period:
            self.served, self.risen = {}, view.now

    def on_grant(self, req, num_tokens, view):
        self.served[req.user] = self.served.get(req.user, 0) + num_tokens

    def level(self, user):
        return int(np.log2(1.0 + self.served.get(user, 0) / self.quantum))

    def ranks(self, reqs, view):
        columns = view.columns(reqs)
        if view.now - self.risen >= self.period:
            self.served, self.risen = {}, view.now
        levels = np.zeros(int(columns.user.max()) + 1)
        for number, head in columns.heads().items():
            levels[number] = self.level(head.user)
        started = ~columns.is_waiting | (columns.num_preempted > 0)
        return levels[columns.user], np.where(started, -np.inf, -columns.cached_prefix)

    def outranks(self, req, other):
        """By choice only a user two levels above evicts, and only who has got something done."""
        return req.rank[0] + 1 < other.rank[0] and other.num_output > 0

    def takes_blocks(self, req, other):
        """But somebody has to make room for a running request."""
        return self.precedes(req, other)

    def on_preempt(self, req, view):
        view.count("lost tokens", req.num_computed)

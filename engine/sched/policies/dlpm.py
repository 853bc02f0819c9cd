"""Longest prefix match among users with credit (DLPM: Cao et al., 2025)."""

from __future__ import annotations

import numpy as np

from engine.sched import Policy, Request, SchedView, require_positive


class DLPM(Policy):
    """Starts the request with the longest cached prefix, among users who have credit left.

    Users pay for tokens with credit; cached tokens are free. When no waiting user has credit left,
    each gets ``quantum`` more. So users who always have waiting requests are served almost equally.

    ``quantum``: credit, in the unit of the prices. ``input_price``, ``output_price``: prices of a
    token. ``max_wait``: seconds after which the oldest request of a user with credit goes next.
    """

    uses_ledger = True

    def __init__(
        self,
        quantum: float = 4000.0,
        input_price: float = 1.0,
        output_price: float = 2.0,
        max_wait: float = 30.0,
    ) -> None:
        prices = {"input_price": input_price, "output_price": output_price}
        require_positive(*prices, quantum=quantum, max_wait=max_wait, **prices)
        self.quantum = quantum
        self.prices = (input_price, output_price)
        self.max_wait = max_wait
        self.given: dict[str, float] = {}

    def rank(self, req: Request, view: SchedView) -> tuple[int]:
        return (req.arrival,)

    def credit(self, user: str, view: SchedView) -> float:
        service = view.ledger.service(user, *self.prices)
        return self.given.setdefault(user, service + self.quantum) - service

    def next_waiting(self, view: SchedView) -> Request | None:
        waiting = view.unoffered_columns
        if not len(waiting):
            return None
        users = {number: head.user for number, head in waiting.heads().items()}
        credit = {user: self.credit(user, view) for user in users.values()}
        lacking = max(0.0, -max(credit.values()))
        refill = 0.0 if max(credit.values()) > 0 else self.quantum * (lacking // self.quantum + 1)
        for user in credit:
            self.given[user] += refill
        able = [number for number, user in users.items() if credit[user] + refill > 0]
        if len(able) < len(users):
            waiting = waiting[np.isin(waiting.user, able)]
        if view.now - waiting.arrival_time[0] >= self.max_wait:
            return waiting.request(0)
        return waiting.request(int(waiting.cached_prefix.argmax()))

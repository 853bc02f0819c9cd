"""Fair shares by token counters (VTC: Sheng et al., OSDI 2024)."""

from __future__ import annotations

from collections import defaultdict

from engine.sched import Policy, Request, SchedView, require_positive


class VTC(Policy):
    """Starts a request of the user who has received the least service (fair shares).

    A user's service is the price of the user's tokens divided by the user's weight
    (``user_weights``). Between users who always have waiting requests, service differs by at most
    ``2 * max(input_price * longest prompt, output_price * tokens of a full batch)``. A user who was
    idle starts with the least service of the waiting users.

    ``input_price``, ``output_price``: price of a prompt token and of an output token."""

    uses_ledger = True

    def __init__(self, input_price: float = 1.0, output_price: float = 2.0) -> None:
        prices = {"input_price": input_price, "output_price": output_price}
        require_positive(*prices, **prices)
        self.input_price = input_price
        self.output_price = output_price
        self.lifts: defaultdict[str, float] = defaultdict(float)
        self.last_user: str | None = None  # user of the request that ended last

    def counter(self, user: str, view: SchedView) -> float:
        service = view.ledger.service(user, self.input_price, self.output_price)
        return service + self.lifts[user]

    def rank(self, req: Request, view: SchedView) -> tuple[int]:
        return (req.arrival,)

    def next_waiting(self, view: SchedView) -> Request | None:
        heads = view.unoffered_columns.heads().values()
        return min(heads, key=lambda req: (self.counter(req.user, view), req.arrival), default=None)

    def on_add(self, req: Request, view: SchedView) -> None:
        waiting = {other.user for other in view.columns(view.waiting).heads().values()}
        if req.user in waiting:
            return
        level = [self.counter(user, view) for user in waiting]
        if not level and self.last_user is not None:
            level = [self.counter(self.last_user, view)]
        lift = min(level, default=0.0) - self.counter(req.user, view)
        self.lifts[req.user] += max(0.0, lift)

    def on_finish(self, req: Request, view: SchedView) -> None:
        self.last_user = req.user

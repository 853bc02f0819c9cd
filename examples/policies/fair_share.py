"""Equal service for every user, however much one of them asks.

metronome generate --scheduling-policy examples.policies.fair_share.FairShare ...
"""

from collections import defaultdict

from engine.sched import Policy


class FairShare(Policy):
    """Whoever was served least goes first. Service is tokens, output ones at `output_price`.

    A user who comes back starts level with the least served of those who are here, so that nobody
    saves up service by being away (virtual token counter, Sheng et al., OSDI 2024).
    """

    dynamic = True

    def __init__(self, output_price: float = 2.0) -> None:
        self.output_price = output_price
        self.served = defaultdict(float)
        self.num_here = defaultdict(int)

    def rank(self, req, view):
        return (self.served[req.user], req.arrival)

    def on_add(self, req, view):
        here = [self.served[user] for user, count in self.num_here.items() if count]
        if here and not self.num_here[req.user]:
            self.served[req.user] = max(self.served[req.user], min(here))
        self.num_here[req.user] += 1

    def on_grant(self, req, num_tokens, view):
        self.served[req.user] += num_tokens * (self.output_price if req.num_output else 1.0)

    def on_finish(self, req, view):
        self.num_here[req.user] -= 1

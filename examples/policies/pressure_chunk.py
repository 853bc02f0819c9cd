"""A controller: prompts get what keeps the gap between tokens near a target."""

from engine.sched import Admission, Limits, Policy, require_positive, require_share


class PressureChunk(Policy):
    """The budget of a step shrinks by a tenth when a reader waited longer than ``target`` seconds
    for a token, or than a shorter ``tbt`` of the request, and grows by a twentieth otherwise.
    The door closes when ``close_at`` of the blocks are taken, and opens again at ``open_at``.

    ``least``: tokens of a step at least.
    """

    def __init__(
        self,
        target: float = 0.05,
        least: int = 32,
        close_at: float = 0.95,
        open_at: float = 0.85,
    ) -> None:
        require_positive(target=target, least=least)
        require_share(close_at=close_at, open_at=open_at)
        self.target, self.least = target, least
        self.close_at, self.open_at = close_at, open_at
        self.budget, self.is_closed = 1e9, False

    def rank(self, req, view):
        return (req.arrival,)

    def on_tokens(self, reqs, view):
        columns, last = view.columns(reqs), view.own("last token")
        before = columns.own("last token")
        gap = (columns.last_token_time - before)[before > 0.0]
        last.put(columns, columns.last_token_time)
        if not len(gap):
            return
        over = float((gap / columns.tbt[before > 0.0].clip(max=self.target)).max())
        view.count("slow steps", int(over > 1.0))
        most = view.config.max_num_batched_tokens
        self.budget = max(self.least, min(most, self.budget * (0.9 if over > 1.0 else 1.05)))

    def limits(self, view):
        usage = view.kv.usage
        self.is_closed = usage >= (self.open_at if self.is_closed else self.close_at)
        return Limits(max_tokens=len(view.running) + int(self.budget))

    def admit(self, req, view):
        if self.is_closed and view.running:
            return Admission.CLOSE
        return super().admit(req, view)

"""Decodes only when they are due (SLAI: Bari et al., 2025)."""

from __future__ import annotations

from collections.abc import Iterator

from engine.sched import Policy, Refuse, Request, SchedView, require_positive, wrong_hints


class SLAI(Policy):
    """While prompts can run, a decode pauses until its next token is nearly due.

    The tokens saved go to prompts, shortest first. Once no prompt can run, all decodes do.

    ``tbt``: seconds between tokens, overridden by ``hints["tbt"]``; ``guard``: seconds before that
    at which a decode becomes due, at least as long as a step takes. ``max_wait``: seconds after
    which a prompt waits no longer for shorter ones.
    """

    dynamic = True

    def __init__(self, tbt: float = 0.1, guard: float = 0.03, max_wait: float = 30.0) -> None:
        require_positive(tbt=tbt, guard=guard, max_wait=max_wait)
        self.tbt, self.guard, self.max_wait = tbt, guard, max_wait
        self.granted: dict[Request, float] = {}  # when it last got tokens

    def on_add(self, req: Request, view: SchedView) -> Refuse | None:
        return wrong_hints(req, "tbt")

    def on_grant(self, req: Request, num_tokens: int, view: SchedView) -> None:
        self.granted[req] = view.now

    def on_finish(self, req: Request, view: SchedView) -> None:
        self.granted.pop(req, None)

    def rank(self, req: Request, view: SchedView) -> tuple[int, ...]:
        if not req.is_waiting or req.num_preempted:
            return (0, req.arrival)
        if view.now - req.arrival_time >= self.max_wait:
            return (1, req.arrival)
        return (2, req.num_tokens - view.kv.cached_prefix(req), req.arrival)

    def is_due(self, req: Request, now: float) -> bool:
        return bool(now >= self.granted[req] + req.hints.get("tbt", self.tbt) - self.guard)

    def order(self, view: SchedView) -> Iterator[Request]:
        running = list(view.running)
        decodes = [req for req in running if req.num_uncomputed <= 1]
        yield from (req for req in decodes if self.is_due(req, view.now))
        tokens_left = view.step.tokens_left
        yield from (req for req in running if req.num_uncomputed > 1)
        while (req := self.next_waiting(view)) is not None:
            yield req
        if view.step.tokens_left == tokens_left:
            yield from (req for req in decodes if not self.is_due(req, view.now))

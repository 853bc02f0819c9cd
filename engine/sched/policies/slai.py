"""Decodes run only when they are due (SLAI: Bari et al., 2025)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.sched import (
    Policy,
    Ranks,
    Refuse,
    Request,
    SchedView,
    keep_hints,
    newcomers_by,
    require_positive,
)


class SLAI(Policy):
    """While prompts can run, a decode pauses until shortly before its next token is due.

    Prompts use the time that this saves, shortest first. If no prompt can run, all decodes run.

    ``tbt``: seconds between tokens, overridden by ``hints["tbt"]`` and by a request's ``tbt``.
    ``guard``: seconds before the due time at which a decode runs; at least the time of a step.
    ``max_wait``: seconds after which a prompt goes before shorter ones.
    """

    dynamic = True

    def __init__(self, tbt: float = 0.1, guard: float = 0.03, max_wait: float = 30.0) -> None:
        require_positive(tbt=tbt, guard=guard, max_wait=max_wait)
        self.tbt, self.guard, self.max_wait = tbt, guard, max_wait

    def on_add(self, req: Request, view: SchedView) -> Refuse | None:
        return keep_hints(req, view, tbt=self.tbt)

    def on_grant(self, req: Request, num_tokens: int, view: SchedView) -> None:
        view.own("granted")[req] = view.now

    def ranks(self, reqs: Sequence[Request], view: SchedView) -> Ranks:
        columns = view.columns(reqs)
        return newcomers_by(
            lambda new: new.num_tokens - new.cached_prefix, columns, view.now, self.max_wait
        )

    def order(self, view: SchedView) -> Iterator[Request]:
        running = view.columns(view.running)
        decodes = running.num_uncomputed <= 1
        due = view.now >= running.own("granted") + running.own("tbt") - self.guard
        yield from running[decodes & due].requests
        tokens_left = view.step.tokens_left
        yield from running[~decodes].requests
        while (req := self.next_waiting(view)) is not None:
            yield req
        if view.step.tokens_left == tokens_left:
            yield from running[decodes & ~due].requests

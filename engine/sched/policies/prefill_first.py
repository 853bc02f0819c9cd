"""Prompts before decodes, as in Orca (Yu et al., OSDI 2022) and in the first version of vLLM."""

from __future__ import annotations

from collections.abc import Iterator

from engine.sched import Policy, Request, SchedView


class PrefillFirst(Policy):
    """While a prompt can run, only prompts run; decodes pause and keep their KV.

    The time to first token is short but the time between tokens long: the baseline that chunked
    prefill improves upon. Order of arrival. Decodes pause at most until seats or KV run out.
    """

    def rank(self, req: Request, view: SchedView) -> tuple[int]:
        return (req.arrival,)

    def order(self, view: SchedView) -> Iterator[Request]:
        running = list(view.running)
        yield from (req for req in running if req.num_uncomputed > 1)
        while (req := self.next_waiting(view)) is not None:
            yield req
        if not view.step.has_grants:
            yield from (req for req in running if req.num_uncomputed <= 1)

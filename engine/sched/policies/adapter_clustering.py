"""Requests of loaded adapters first (adapter clustering, S-LoRA: Sheng et al., MLSys 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from engine.sched import (
    Admission,
    Policy,
    Ranks,
    Request,
    SchedView,
    newcomers_by,
    require_positive,
)


class AdapterClustering(Policy):
    """Starts requests whose LoRA adapter is loaded, or loads fastest, so that few are loaded.

    A request that has waited ``max_wait`` seconds goes before those of loaded adapters. If it finds
    all slots in use, the adapter with the fewest running requests gets no more, so that its slot
    becomes free.

    ``max_wait``: seconds that a request waits for its adapter while loaded ones are preferred.
    """

    dynamic = True

    def __init__(self, max_wait: float = 10.0) -> None:
        require_positive(max_wait=max_wait)
        self.max_wait = max_wait

    def ranks(self, reqs: Sequence[Request], view: SchedView) -> Ranks:
        columns = view.columns(reqs)
        return newcomers_by(lambda new: new.load_seconds, columns, view.now, self.max_wait)

    def admit(self, req: Request, view: SchedView) -> Admission:
        in_use, num_running = view.adapters.in_use, view.adapters.num_running
        is_full = 0 < view.adapters.num_slots <= len(in_use)
        if is_full and req.adapter == min(in_use, key=num_running):
            for other in takewhile(lambda other: self.precedes(other, req), view.waiting):
                if other.adapter is not None and other.adapter not in in_use:
                    return Admission.SKIP
        return super().admit(req, view)

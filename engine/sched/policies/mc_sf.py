"""Memory-constrained shortest first (MC-SF: Jaillet et al., 2025)."""

from __future__ import annotations

from collections.abc import Sequence

from engine.sched import (
    Admission,
    Policy,
    Ranks,
    Request,
    SchedView,
    newcomers_by,
    require_positive,
)


class MCSF(Policy):
    """Starts the shortest predicted output, if memory will suffice until all running requests end.

    With an exact predictor (``oracle``) the mean latency is near the optimum: a reference for other
    policies. No running request is preempted for a waiting one.

    ``max_wait``: seconds after which a request goes before shorter ones.
    """

    dynamic = True

    def __init__(self, max_wait: float = 60.0) -> None:
        require_positive(max_wait=max_wait)
        self.max_wait = max_wait

    def ranks(self, reqs: Sequence[Request], view: SchedView) -> Ranks:
        return newcomers_by(lambda new: new.predicted, view.columns(reqs), view.now, self.max_wait)

    def admit(self, req: Request, view: SchedView) -> Admission:
        def remaining(other: Request) -> int:
            return view.predict(other) - other.num_output

        fits = view.kv.peak([*view.running, req], remaining) <= view.kv.num_usable
        return Admission.YES if fits or not view.running else Admission.CLOSE

"""Longest cached prefix first (SGLang: Zheng et al., NeurIPS 2024)."""

from __future__ import annotations

from collections.abc import Sequence

from engine.sched import Policy, Ranks, Request, SchedView, newcomers_by, require_positive


class LPM(Policy):
    """Starts the request with the longest cached prefix, before that prefix is evicted.

    ``max_wait``: seconds after which a request goes before those with longer prefixes.
    """

    dynamic = True

    def __init__(self, max_wait: float = 30.0) -> None:
        require_positive(max_wait=max_wait)
        self.max_wait = max_wait

    def ranks(self, reqs: Sequence[Request], view: SchedView) -> Ranks:
        return newcomers_by(
            lambda new: -new.cached_prefix, view.columns(reqs), view.now, self.max_wait
        )

"""Least remaining work first, by the longest a request may become."""

from engine.sched import Policy


class ShortestFirst(Policy):
    """Lowers the mean latency; long requests wait at most `patience` seconds for it."""

    dynamic = True

    def __init__(self, patience: float = 30.0) -> None:
        self.patience = patience

    def rank(self, req, view):
        is_patient = view.now - req.arrival_time < self.patience
        return (is_patient, req.max_total - req.num_computed if is_patient else req.arrival)

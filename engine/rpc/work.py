"""Work: the tokens that unfinished requests have yet to compute."""

from __future__ import annotations

from engine.messages.requests import AddRequest

MOST_OUTPUT = 128  # tokens of an output that count as work: few requests use all of ``max_tokens``


def output_work(request: AddRequest) -> int:
    """Tokens of a request's output that count as work."""
    return min(request.max_tokens, MOST_OUTPUT)


class Work:
    """The work of one client's requests at a core. ``load``: tokens to compute, at most."""

    def __init__(self) -> None:
        self.load = 0
        self._by_id: dict[str, tuple[int, int]] = {}  # tokens of prompt and output

    def add(self, request: AddRequest, num_cached: int = 0) -> None:
        """Add a request, of whose prompt ``num_cached`` tokens need not be computed."""
        each = (max(1, len(request.prompt_token_ids) - num_cached), output_work(request))
        self._by_id[request.request_id] = each
        self.load += sum(each)

    def start(self, request_id: str) -> None:
        """Record that the prompt of a request has been computed; unknown ids are ignored."""
        if (each := self._by_id.get(request_id)) is not None:
            self._by_id[request_id] = (0, each[1])
            self.load -= each[0]

    def end(self, request_id: str) -> None:
        """Remove a request; unknown ids are ignored."""
        self.load -= sum(self._by_id.pop(request_id, ()))

    def clear(self) -> None:
        """Remove all requests."""
        self._by_id.clear()
        self.load = 0

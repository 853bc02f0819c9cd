"""Why a request ends: end of text, a stop token, its length."""

from __future__ import annotations

from engine.messages.outputs import FinishReason
from engine.sched.request import Request


def stopped_by(req: Request) -> tuple[FinishReason, int | None] | None:
    """Reason and stop reason if the last known token ends the request, else ``None``.

    End of text has no stop reason; a stop token of the user's own is its own reason. Stop tokens
    before ``min_tokens`` outputs cannot be sampled, so only a forced one could be seen here.
    """
    token = req.tokens[-1]
    if token in req.stop_ids and req.num_output >= req.params.min_tokens:
        return "stop", None if token in req.add.eos_token_ids else token
    if req.num_tokens >= req.max_total:
        return "length", None
    return None

"""Early rejection (Mooncake: Qin et al., FAST 2025)."""

from __future__ import annotations

from engine.sched import Policy, Refuse, Request, SchedView, require_positive, wrong_hints


class EarlyRejection(Policy):
    """Serves in order of arrival, but refuses requests whose first token is expected too late.

    The cost model predicts the wait from the prompts that are computed before. If seats or memory
    are short, output lengths of ended requests are used too.

    ``ttft``: acceptable seconds to the first token; ``hints["ttft"]`` overrides it."""

    def __init__(self, ttft: float = 5.0) -> None:
        require_positive(ttft=ttft)
        self.ttft = ttft

    def rank(self, req: Request, view: SchedView) -> tuple[int]:
        return (req.arrival,)

    def on_add(self, req: Request, view: SchedView) -> Refuse | None:
        if (wrong := wrong_hints(req, "ttft")) is not None:
            return wrong
        wanted = req.hints.get("ttft", self.ttft)
        expected = self.predicted_ttft(req, view)
        if expected <= wanted:
            return None
        return Refuse(f"the first token would take {expected:.2f} s, the limit is {wanted:.2f} s")

    def predicted_ttft(self, req: Request, view: SchedView) -> float:
        """Predicted seconds until all prompts up to this request's are computed, and until enough
        requests have ended to give it a seat and memory."""
        running, waiting = view.columns(view.running), view.columns(view.waiting)
        num_decodes = int((running.num_uncomputed <= 1).sum())
        new = int((waiting.num_tokens - waiting.cached_prefix).sum())
        new += req.num_tokens - view.kv.cached_prefix(req)
        ahead = int(running.num_uncomputed.sum()) - num_decodes + new
        context = int(running.num_computed.sum())
        room = max(1, view.config.max_num_batched_tokens - num_decodes)
        num_full, rest = divmod(max(0, ahead), room)

        def seconds(num_prompt: int) -> float:
            num_tokens = num_decodes + num_prompt
            return view.cost.step_seconds(num_decodes + 1, num_tokens, context, context)

        prompts = num_full * seconds(room) + (seconds(rest) if rest else 0.0)
        num_running, mean = len(running), view.lengths.mean()
        if mean is None or not num_running:
            return prompts
        lacking = new - view.kv.num_free * view.kv.block_size
        ends = max(
            len(waiting) + 1 + num_running - view.config.max_num_seqs,
            lacking * num_running / max(1, context),  # an ended request frees a mean context
        )
        return max(prompts, ends * mean / num_running * seconds(0))

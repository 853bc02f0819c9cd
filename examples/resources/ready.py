"""Resources that belong to no feature: what pipelines, data parallel groups and layers ask for."""

from __future__ import annotations

from engine.errors import ConfigError
from engine.messages.step import StepPlan
from engine.sched.request import Request
from engine.sched.resource import AttachedScheduler, Fit, OnRefuse, Resource
from engine.sched.step_state import Step


class PipelineCadence(Resource):
    """Nobody goes on before the last token is known: for pipelines whose first stage cannot read
    what the last one has sampled. Pieces of one prompt may follow each other.
    """

    name = "pipeline cadence"

    def serializes(self, req: Request) -> bool:
        return True


class PrefillGate(Resource):
    """While ``throttled``, prompts wait as long as somebody decodes.

    Whoever keeps the steps of several engines alike sets ``throttled`` between steps, so that all
    compute prompts in the same ones. It is ignored while the last open step left requests waiting:
    then every step is needed.
    """

    name = "prefill gate"
    on_refuse = OnRefuse.CLOSE

    def __init__(self) -> None:
        self.throttled = False
        self._is_closed = False  # in the step being planned
        self._is_behind = False  # the last open step left requests waiting
        self._running: dict[int, Request] = {}  # by row

    def attach(self, scheduler: AttachedScheduler) -> None:
        self._scheduler = scheduler

    def watches(self, req: Request) -> bool:
        """Decodes pass it."""
        return False

    def begin_step(self, step: Step) -> None:
        self._is_closed = (
            self.throttled
            and not self._is_behind
            and any(req.num_uncomputed == 1 for req in self._running.values())
        )

    def fit(self, req: Request, num_tokens: int, step: Step) -> Fit:
        if not self._is_closed:
            return Fit(num_tokens)
        upto = req.num_tokens + req.num_pending
        is_decode = upto - self._scheduler.view.start_of(req) == 1
        return Fit(num_tokens if is_decode else 0)

    def take(self, req: Request, num_tokens: int, step: Step) -> None:
        self._running[req.row] = req

    def release(self, req: Request) -> None:
        self._running.pop(req.row, None)

    def describe(self, plan: StepPlan) -> None:
        """Adds nothing; looks at what the step has left."""
        if not self._is_closed:
            self._is_behind = self._scheduler.get_request_counts().waiting > 0


class BlockAlignment(Resource):
    """A prompt is computed in pieces that end at multiples of ``num_tokens``, but for the last.

    For layers whose state can be kept only there.
    """

    name = "block alignment"
    on_refuse = OnRefuse.CLOSE

    def __init__(self, num_tokens: int) -> None:
        if num_tokens < 1:
            raise ConfigError(f"chunks cannot be aligned to {num_tokens} tokens; at least 1")
        self.num_tokens = num_tokens

    def attach(self, scheduler: AttachedScheduler) -> None:
        config = scheduler.config
        self._scheduler = scheduler
        for option in ("max_num_batched_tokens", "long_prefill_token_threshold"):
            value = getattr(config, option)
            if value and value < self.num_tokens:
                raise ConfigError(
                    f"{option} is {value}, but this model's prompts are computed in multiples of "
                    f"{self.num_tokens} tokens; raise it to at least that"
                )

    def watches(self, req: Request) -> bool:
        """A decode is the last piece, and may end anywhere."""
        return False

    def fit(self, req: Request, num_tokens: int, step: Step) -> Fit:
        start = self._scheduler.view.start_of(req)
        upto = start + num_tokens
        if upto >= req.num_tokens:
            return Fit(num_tokens)
        return Fit(max(0, upto - upto % self.num_tokens - start))

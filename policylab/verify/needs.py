"""Simulated resources, such as grammars and an encoder, for random cases.

What a resource decides depends only on the request and the step, so runs can be reproduced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from engine.messages.step import DraftPart, StepPlan
from engine.sched.request import Request
from engine.sched.resource import AttachedScheduler, Fit, OnRefuse, Resource
from engine.sched.scheduler import Scheduler
from engine.sched.step_state import Step
from policylab.verify.fake import mix

Answers = Callable[[str], Sequence[int]]


class Need(Resource):
    """Base class of simulated resources. ``amount``: size of the resource. ``answers`` returns the
    expected answer to a request by id."""

    scheduler: Scheduler

    def __init__(self, amount: int, answers: Answers) -> None:
        self.amount = amount
        self.answers = answers
        self.num_refusals = 0

    def attach(self, scheduler: AttachedScheduler) -> None:
        assert isinstance(scheduler, Scheduler)  # checks access its internals
        self.scheduler = scheduler

    def watches(self, req: Request) -> bool:
        return False

    def tick(self) -> None:
        """Called once per step, for resources that need a clock."""

    def check(self, running: Iterable[Request]) -> None:
        """Check that only running requests hold units of this resource."""

    def refuse(self, num_tokens: int = 0, on_refuse: OnRefuse | None = None) -> Fit:
        """Count a refusal, and return a ``Fit`` that allows only ``num_tokens`` tokens."""
        self.num_refusals += 1
        return Fit(num_tokens, self.name, on_refuse)


class Delayed(Need):
    """Base class of resources for which a request is parked for a number of steps."""

    on_refuse = OnRefuse.PARK

    def __init__(self, amount: int, answers: Answers) -> None:
        super().__init__(amount, answers)
        self.left: dict[Request, int] = {}  # remaining ticks

    def ticks(self, req: Request) -> int | None:
        """For how many steps the request is parked; ``None`` if it is not parked. A negative number
        -n means: parked for n steps, then failed."""
        raise NotImplementedError

    def parked(self, req: Request) -> None:
        ticks = self.ticks(req)
        if ticks is not None:
            self.left.setdefault(req, max(1, abs(ticks)))

    def tick(self) -> None:
        for req, left in list(self.left.items()):
            if req.is_finished:
                del self.left[req]
            elif left:
                self.left[req] = left - 1
                if left == 1:
                    self.scheduler.wake(req.request_id)

    def check(self, running: Iterable[Request]) -> None:
        for req in running:
            ready = self.ticks(req) is None or self.left.get(req) == 0
            assert ready, f"{self.name}: {req} runs, but is not ready"


class Grammars(Delayed):
    """Parks requests until their grammar is compiled. ``AddRequest.grammar`` is the number of steps
    that this takes, as text; a negative number makes the compilation fail."""

    name = "grammars"

    def serializes(self, req: Request) -> bool:
        return req.add.grammar is not None

    def ticks(self, req: Request) -> int | None:
        return None if req.add.grammar is None else int(req.add.grammar)

    def fit(self, req: Request, num_tokens: int, step: Step) -> Fit:
        ticks = self.ticks(req)
        if ticks is None or (ticks >= 0 and self.left.get(req) == 0):
            return Fit(num_tokens)
        ready = self.left.get(req) == 0
        return self.refuse(on_refuse=OnRefuse.FAIL if ready else OnRefuse.PARK)


class NeededEncoder(Need):
    """An encoder that takes at most ``amount`` media tokens per step. A prompt chunk ends before a
    media item that does not fit."""

    name = "encoder"

    def __init__(self, amount: int, answers: Answers) -> None:
        super().__init__(amount, answers)
        self.units = amount

    def watches(self, req: Request) -> bool:
        return bool(req.media)

    def begin_step(self, step: Step) -> None:
        self.units = self.amount

    def fit(self, req: Request, num_tokens: int, step: Step) -> Fit:
        start = self.scheduler.kv.ready(req) if req.is_waiting else req.num_computed
        units = self.units
        for item in req.media:
            if start <= item.offset < start + num_tokens:
                units -= item.length
                if item.length > self.amount:
                    return self.refuse(on_refuse=OnRefuse.FAIL)
                if units < 0:
                    return self.refuse(item.offset - start)
        return Fit(num_tokens)

    def take(self, req: Request, num_tokens: int, step: Step) -> None:
        upto = req.num_computed
        for item in req.media:
            if upto - num_tokens <= item.offset < upto:
                self.units -= item.length
        assert self.units >= 0, f"encoder: {-self.units} tokens too many in a step"


class Moods(Need):
    """For every other request, reduces ``amount`` percent of its token grants at random."""

    name = "moods"

    def watches(self, req: Request) -> bool:
        return req.arrival % 2 == 0

    def fit(self, req: Request, num_tokens: int, step: Step) -> Fit:
        dice = mix(step.index, req.arrival) % 1000
        most = dice % 3
        if dice >= 10 * self.amount or num_tokens <= most:
            return Fit(num_tokens)
        return self.refuse(most, OnRefuse.CLOSE if dice % 2 else OnRefuse.SKIP)


class NeededDrafts(Need):
    """Gives most requests up to ``amount`` draft tokens per step, some of them wrong."""

    name = "drafts"

    def __init__(self, amount: int, answers: Answers) -> None:
        super().__init__(amount, answers)
        self.taken: dict[int, int] = {}  # by row: drafts in this step

    def watches(self, req: Request) -> bool:
        return req.arrival % 4 != 0

    def begin_step(self, step: Step) -> None:
        self.taken.clear()

    def extra(self, req: Request, step: Step) -> int:
        most = min(self.amount, req.max_total) if self.watches(req) else 0
        return mix(step.index, req.arrival) % (most + 1)

    def take(self, req: Request, num_tokens: int, step: Step) -> None:
        num_ahead = req.num_computed - (req.num_tokens + req.num_pending - 1)
        if num_ahead > 0:
            self.taken[req.row] = num_ahead

    def describe(self, plan: StepPlan) -> None:
        if not self.taken:
            return
        rows, by_row = plan.rows.tolist(), self.scheduler.roster.by_row
        counts = [self.taken.get(row, 0) for row in rows]
        tokens: list[int] = []
        for row, count in zip(rows, counts, strict=True):
            req = by_row[row]
            if req is not None and count:
                first = req.num_computed - count - req.num_prompt
                tokens += self._guess(req, first, count, plan.step)
        plan.drafts = DraftPart(np.array(counts, dtype=np.int32), np.array(tokens, dtype=np.int32))

    def _guess(self, req: Request, first: int, count: int, step: int) -> list[int]:
        """Draft ``count`` tokens of the request's answer from index ``first``: right tokens up to a
        random index, then wrong ones."""
        right = list(self.answers(req.request_id)[first : first + count])
        right += [-1] * (count - len(right))
        upto = mix(step, req.arrival + 1) % (count + 2)
        return [token if index < upto else token ^ 1 for index, token in enumerate(right)]


NEEDS: dict[str, type[Need]] = {
    need.name: need for need in (Grammars, NeededEncoder, Moods, NeededDrafts)
}

"""AdapterSlots: limits the LoRA adapters in use, and assigns them to slots of the device."""

from __future__ import annotations

from engine.errors import ConfigError
from engine.messages.step import NO_ADAPTER, AdapterPart, StepPlan
from engine.sched.request import Request
from engine.sched.resource import Fit, Resource
from engine.sched.step_state import Step


class AdapterSlots(Resource):
    """Limits the running requests to at most ``max_loras`` different adapters.

    A waiting request whose adapter would exceed the limit is skipped, and later requests may start.
    Unused adapters stay loaded until their slots are needed, least recently used first.
    """

    name = "adapter"
    needs = ("adapters",)

    def __init__(self, max_loras: int) -> None:
        if max_loras < 1:
            raise ConfigError(f"max_loras is {max_loras}, must be at least 1")
        self.max_loras = max_loras
        self.slot_of: dict[str, int] = {}  # slots of loaded adapters, least recently used first
        self._users: dict[str, set[str]] = {}  # adapter -> ids of running requests that use it
        self._part = AdapterPart()

    def watches(self, req: Request) -> bool:
        """Always False: a running request keeps its adapter, so its steps need no check."""
        return False

    def fit(self, req: Request, num_tokens: int, step: Step) -> Fit:
        adapter = req.adapter
        if adapter is None or adapter in self._users or len(self._users) < self.max_loras:
            return Fit(num_tokens)
        return Fit(0)

    def seated(self, req: Request, step: Step) -> None:
        slot = NO_ADAPTER if req.adapter is None else self._use(req.adapter, req.request_id)
        self._part.used_by[req.slot] = slot

    def release(self, req: Request) -> None:
        if req.adapter is None:
            return
        users = self._users.get(req.adapter, set())
        users.discard(req.request_id)
        if not users:
            self._users.pop(req.adapter, None)

    def describe(self, plan: StepPlan) -> None:
        if self._part.used_by:
            plan.adapters, self._part = self._part, AdapterPart()

    def _use(self, adapter: str, request_id: str) -> int:
        """Record that a request uses an adapter, and return the adapter's slot. If the adapter is
        not loaded, the worker loads it into a free slot before this step."""
        self._users.setdefault(adapter, set()).add(request_id)
        slot = self.slot_of.pop(adapter, NO_ADAPTER)
        if slot == NO_ADAPTER:
            slot = self._free_slot()
            self._part.load[slot] = adapter
        self.slot_of[adapter] = slot
        return slot

    def _free_slot(self) -> int:
        if len(self.slot_of) < self.max_loras:
            return len(self.slot_of)
        idle = next(name for name in self.slot_of if name not in self._users)
        return self.slot_of.pop(idle)

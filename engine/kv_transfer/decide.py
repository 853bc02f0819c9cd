"""RemoteKV: parks requests while a KV source loads their KV asynchronously.

    a KV source offers KV ──> the request is parked, with blocks for all its tokens; the load starts
    all tokens loaded ──────> the request is queued again
    the load failed ────────> "recompute": queued again, computes missing KV; "fail": ends in error
    aborted during a load ──> the blocks are freed when the load ends
    finished ───────────────> the blocks are freed when the KV is sent, if the source sends it

Loads within a step are not handled here: their tokens count as computed."""

from __future__ import annotations

from typing import Literal

from engine.errors import ConfigError
from engine.kv.manager import KVManager
from engine.messages.step import KVReport, Received, StepPlan, StepResult
from engine.sched.request import Request
from engine.sched.resource import AttachedScheduler, Fit, OnRefuse, Resource
from engine.sched.step_state import Step

FailurePolicy = Literal["recompute", "fail"]


class RemoteKV(Resource):
    """Makes requests wait while their KV is loaded from the KV source of the ``KVManager``.

    ``kv_load_failure_policy``: after a failed load, ``"recompute"`` computes the missing KV and
    ``"fail"`` ends the request with an error.
    """

    name = "remote KV"
    needs = ("kv_transfer",)
    on_refuse = OnRefuse.PARK

    def __init__(self, kv_load_failure_policy: FailurePolicy = "recompute") -> None:
        if kv_load_failure_policy not in ("recompute", "fail"):
            raise ConfigError(
                f"kv_load_failure_policy is {kv_load_failure_policy!r}, must be 'recompute' or "
                "'fail'"
            )
        self.kv_load_failure_policy = kv_load_failure_policy
        self._loading: dict[str, Request] = {}
        self._failed: dict[str, str] = {}  # request id -> error of its load

    def attach(self, scheduler: AttachedScheduler) -> None:
        self._scheduler = scheduler
        self._kv: KVManager = scheduler.kv

    def watches(self, req: Request) -> bool:
        return False

    def fit(self, req: Request, num_tokens: int, step: Step) -> Fit:
        if not req.is_waiting:
            return Fit(num_tokens)
        if why := self._kv.load_error(req):  # its load did not start
            self._loading.pop(req.request_id, None)
            self._failed[req.request_id] = why
        if req.request_id in self._failed and self.kv_load_failure_policy == "fail":
            why = self._failed[req.request_id]
            message = f"its KV could not be loaded: {why}"
            return Fit(0, message, OnRefuse.FAIL, code="kv_transfer_failed")
        if not self._wants_load(req):
            return Fit(num_tokens)
        if req.request_id in self._kv.lent:
            # Reports have a request id; if it was reused, those of the earlier request come first.
            return Fit(0, on_refuse=OnRefuse.SKIP)
        return Fit(0, hold=req.num_tokens)

    def parked(self, req: Request) -> None:
        self._loading[req.request_id] = req
        self._kv.start_load(req)

    def received(self, report: Received) -> None:
        """Process the end of a load, successful or not."""
        req = self._loading.pop(report.request_id, None)
        if req is None:  # the request was aborted meanwhile
            self._kv.sent(report.request_id)
            return
        if report.error:
            self._failed[req.request_id] = report.error
        self._kv.loaded(req, self._kv.ready(req) + report.num_tokens)
        self._scheduler.wake(req.request_id)

    def sent(self, request_id: str) -> None:
        """Record that a KV transfer which read an ended request's blocks is complete."""
        self._kv.sent(request_id)

    def release(self, req: Request) -> None:
        if req.is_finished:
            self._loading.pop(req.request_id, None)
            self._failed.pop(req.request_id, None)

    def describe(self, plan: StepPlan) -> None:
        source = self._kv.source
        plan.kv_transfer = None if source is None else source.metadata()

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        report = result.kv_transfer or KVReport()
        for received in report.received:
            self.received(received)
        for request_id in report.sent:
            self.sent(request_id)

    def _wants_load(self, req: Request) -> bool:
        """True if the request has no blocks yet, its KV can be loaded asynchronously, and no such
        load has failed before."""
        if self._kv.held(req) or req.request_id in self._failed:
            return False
        hit = self._kv.lookup(req)
        return hit.asynchronous and hit.num_remote > 0

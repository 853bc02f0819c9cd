"""RemoteKV: parks requests while their KV is loaded, and keeps blocks that transfers still read.

    offered, and KV can be loaded asynchronously ────> parked, with blocks for all its tokens
    parked ──────────────────────────────────────────> the load starts
    received ── all tokens ──────────────────────────> back in the queue, these are ready
             └─ not all ── "recompute" ──────────────> back in the queue, the rest is computed
                        └─ "fail" ───────────────────> ends with an error
    the load cannot start ──> like received with no tokens
    aborted while loading ──> its blocks are kept until received
    finished ───────────────> its blocks are kept until sent, if the source wants that

A load within a step is not handled here: its tokens count as computed.
"""

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
    """Parks requests while their KV is loaded, for a ``KVManager`` with a KV source.

    The end of a transfer is reported by ``received`` and ``sent``, or in a step result.
    ``kv_load_failure_policy``: what happens to a request whose load failed.
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
        """Process the end of the transfers that read blocks of a finished request."""
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
        """True if the request's KV can be loaded asynchronously, it has no blocks yet, and no load
        of it has failed."""
        if self._kv.held(req) or req.request_id in self._failed:
            return False
        hit = self._kv.lookup(req)
        return hit.asynchronous and hit.num_remote > 0

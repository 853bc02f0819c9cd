"""A simulated remote KV source, and the resource that parks requests until their KV has arrived.

A load writes even positions when it starts and odd positions when it ends, so that another write in
between or a read before the end leaves a wrong digest. A load must not start while a step in flight
still writes into one of its blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from engine.kv.connector import Farewell, RemoteMatch
from engine.messages.step import StepPlan
from engine.sched.request import Request
from engine.sched.resource import AttachedScheduler, Fit, OnRefuse
from engine.sched.step_state import Step
from policylab.verify.clients import extras_of
from policylab.verify.fake import EMPTY_DIGEST, mix
from policylab.verify.needs import Answers, Need

Digests = dict[tuple[int, int], int]  # by block and position in it


class RemoteLoad(NamedTuple):
    """A load of remote KV that is in progress."""

    req: Request
    digests: Digests
    num_good: int  # leading tokens that arrive
    num_ticks: int
    contested: set[int]  # its blocks that steps in flight still wrote when it began


class Store:
    """A remote KV source that has the KV of every prompt. A request's ``kv_transfer_params``:
    ``num_tokens`` offered, ``ticks`` (steps that the load takes; 0: none), and the ``share`` of
    tokens that arrive (0: the load cannot start)."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.kv: list[list[int]] = []  # KV of the worker
        self.started: list[RemoteLoad] = []  # loads that ``Remote`` has not seen
        self.orders: list[Digests] = []  # loads within the next step
        self.in_flight: deque[set[int]] = deque()  # blocks that each step in flight writes
        self._starts: dict[int, int] = {}  # first loaded position, by arrival number of the request
        self._refused: set[int] = set()  # arrival numbers of requests whose load could not start

    def match(self, req: Any, num_local_tokens: int) -> RemoteMatch:
        params = req.add.kv_transfer_params or {}
        assert req.arrival not in self._refused, f"{req}: offered again after a failed start"
        self._starts[req.arrival] = num_local_tokens
        num_ahead = max(0, params.get("num_tokens", 0) - num_local_tokens)
        return RemoteMatch(num_ahead, asynchronous=params.get("ticks", 0) > 0)

    def start_load(self, req: Any, blocks: Sequence[int], num_tokens: int) -> None:
        params, digests = req.add.kv_transfer_params or {}, self._digests(req, blocks, num_tokens)
        if not params["share"]:
            self._refused.add(req.arrival)
            raise OSError("the store cannot be reached")
        if not params["ticks"]:
            self.orders.append(digests)
            return
        contested = set(blocks) & set().union(*self.in_flight)
        num_good = int(num_tokens * params["share"])
        load = RemoteLoad(req, digests, num_good, params["ticks"], contested)
        self.write(load, 0)
        self.started.append(load)

    def write(self, load: RemoteLoad, parity: int) -> None:
        """Write the KV of the even (``parity`` 0) or odd (1) positions of a load."""
        for index, ((block, place), digest) in enumerate(load.digests.items()):
            if index % 2 == parity and index < load.num_good:
                self.kv[block][place] = digest

    def carry_out(self, plan: StepPlan) -> None:
        """Write the KV of the loads that take place within this plan's step."""
        if isinstance(plan.kv_transfer, bytes):
            for block, place, digest in msgspec.msgpack.decode(plan.kv_transfer):
                self.kv[block][place] = digest

    def metadata(self) -> bytes | None:
        orders, self.orders = self.orders, []
        cells = [(*cell, digest) for digests in orders for cell, digest in digests.items()]
        return msgspec.msgpack.encode(cells) if cells else None

    def finished(self, req: Any, blocks: Sequence[int]) -> Farewell:
        self._starts.pop(req.arrival, None)
        self._refused.discard(req.arrival)
        return Farewell()

    def shutdown(self) -> None:
        """Nothing to release."""

    def _digests(self, req: Request, blocks: Sequence[int], num_tokens: int) -> Digests:
        digest, digests, start = EMPTY_DIGEST, {}, self._starts[req.arrival]
        extras = extras_of(req.add)
        for position, token in enumerate(req.tokens[: start + num_tokens]):
            digest = mix(digest, token + extras.get(position, 0))
            if position >= start:
                index, place = divmod(position - start, self.block_size)
                digests[blocks[index], place] = digest
        return digests


class Remote(Need):
    """Parks requests while their remote KV is loaded."""

    name = "remote"
    needs = ("kv_transfer",)
    on_refuse = OnRefuse.PARK
    store: Store

    def __init__(self, amount: int, answers: Answers) -> None:
        super().__init__(amount, answers)
        self.loads: dict[int, RemoteLoad] = {}  # in progress, by arrival number of the request
        self.left: dict[int, int] = {}  # remaining ticks, likewise
        self.had: set[int] = set()  # requests whose load ended incomplete

    def attach(self, scheduler: AttachedScheduler) -> None:
        super().attach(scheduler)
        source = scheduler.kv.source
        assert isinstance(source, Store), f"{source} is not the KV source of the simulation"
        self.store = source

    def fit(self, req: Request, num_tokens: int, step: Step) -> Fit:
        kv = self.scheduler.kv
        if not req.is_waiting or kv.held(req) or req.arrival in self.had:
            return Fit(num_tokens)
        hit = kv.lookup(req)
        if not (hit.asynchronous and hit.num_remote):
            return Fit(num_tokens)
        if req.request_id in kv.lent:  # reports refer to ids, so an id must be unique
            return self.refuse(on_refuse=OnRefuse.SKIP)
        return self.refuse()._replace(hold=req.num_tokens)

    def parked(self, req: Request) -> None:
        self.scheduler.kv.start_load(req)

    def tick(self) -> None:
        started, self.store.started = self.store.started, []
        for load in started:
            assert not load.contested, (
                f"{load.req}: its load began while steps in flight write blocks {load.contested}"
            )
            self.loads[load.req.arrival] = load
            self.left[load.req.arrival] = load.num_ticks
        for arrival in list(self.loads):
            self.left[arrival] -= 1
            if not self.left[arrival]:
                del self.left[arrival]
                self._end(self.loads.pop(arrival))

    def describe(self, plan: StepPlan) -> None:
        plan.kv_transfer = self.store.metadata()

    def release(self, req: Request) -> None:
        if req.is_finished:
            self.had.discard(req.arrival)

    def check(self, running: Iterable[Request]) -> None:
        for req in running:
            assert not self.scheduler.kv.is_loading(req), f"{req} runs while its KV is loaded"

    def _end(self, load: RemoteLoad) -> None:
        req, kv = load.req, self.scheduler.kv
        self.store.write(load, 1)
        if req.is_finished:
            assert kv.sent(req.request_id), f"{req}: its blocks were not kept until the load ended"
            return
        if load.num_good < len(load.digests):
            self.had.add(req.arrival)
        kv.loaded(req, kv.ready(req) + load.num_good)
        self.scheduler.wake(req.request_id)

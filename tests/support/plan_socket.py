"""A worker behind a socket: plans go there and results come back as bytes, nothing else is shared.

``serve`` is the process with the worker, ``SocketWorker`` stands in for it beside a scheduler.
"""

from __future__ import annotations

import hashlib
import multiprocessing
from contextlib import suppress
from typing import Any

import msgspec
import zmq

from engine.ipc import plans
from engine.messages.kv_orders import Loaded
from engine.messages.step import PARTS, Masks, StepPlan, StepResult
from policylab.verify.fake import FakeExecutor, mix
from policylab.verify.tiers import FakeCopies
from support.data_plane import FeatureWorker, guess, use_stores
from support.patience import WAIT_SECONDS

TIMEOUT_MS = 60_000


class Setup(msgspec.Struct):
    """What the worker is made of."""

    num_blocks: int
    block_size: int
    windows: list[int]
    num_drafts: int
    cache_size: int
    stores: list[str]
    snapshot_blocks: int


def make_worker(setup: Setup) -> tuple[FeatureWorker, FakeCopies]:
    """The worker and its stores. Its guesses depend on tokens alone, and some are right."""

    def propose(tokens: list[int]) -> list[int]:
        dice = mix(len(tokens), tokens[-1])
        num_drafts = dice % (setup.num_drafts + 1)
        return guess(tokens, dice // 8 % (num_drafts + 1), num_drafts)

    worker = FeatureWorker(
        setup.num_blocks,
        setup.block_size,
        windows=setup.windows,
        propose=propose if setup.num_drafts else None,
        cache_size=setup.cache_size,
    )
    if setup.snapshot_blocks:
        worker.keep_states(setup.num_drafts)
    stores = FakeCopies(setup.stores, 20, setup.num_blocks)
    use_stores(worker, stores)
    return worker, stores


def content_of(worker: FeatureWorker) -> str:
    """A digest of all that lies in the KV cache."""
    return hashlib.blake2b(repr(worker.kv).encode(), digest_size=16).hexdigest()


def serve(address: str) -> None:
    """Answer until there are no more questions. An error is answered, too."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as line:
        line.connect(address)
        worker, stores, ticket = None, None, None
        while True:
            kind, data = line.recv_multipart()
            if kind == b"end":
                return
            try:
                if kind == b"make":
                    worker, stores = make_worker(msgspec.msgpack.decode(data, type=Setup))
                    answer = b""
                elif kind == b"launch":
                    ticket = worker.launch(plans.decode(data, StepPlan))
                    answer = plans.encode(ticket)
                elif kind == b"sample":
                    worker.sample(ticket, plans.decode(data, Masks))
                    answer = plans.encode(ticket)
                elif kind == b"tick":
                    stores.tick()
                    answer = msgspec.msgpack.encode(stores.take_reports())
                elif kind == b"find":
                    found = stores.find(msgspec.msgpack.decode(data, type=list[bytes]))
                    answer = msgspec.msgpack.encode(found)
                else:
                    answer = content_of(worker).encode()
                line.send_multipart([b"ok", answer])
            except Exception as error:
                line.send_multipart([b"error", f"{type(error).__name__}: {error}".encode()])


class WorkerProcess:
    """The process with the worker, and the line to it."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._line = self._context.socket(zmq.PAIR)
        self._line.linger = 1000
        self._line.rcvtimeo = self._line.sndtimeo = TIMEOUT_MS
        port = self._line.bind_to_random_port("tcp://127.0.0.1")
        spawn = multiprocessing.get_context("spawn")
        self._process = spawn.Process(target=serve, args=(f"tcp://127.0.0.1:{port}",), daemon=True)
        self._process.start()
        self.num_bytes = 0

    def ask(self, kind: str, data: bytes = b"") -> bytes:
        self._line.send_multipart([kind.encode(), data])
        state, answer = self._line.recv_multipart()
        assert state == b"ok", answer.decode()
        self.num_bytes += len(data) + len(answer)
        return answer

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(zmq.ZMQError):
            self._line.send_multipart([b"end", b""])
        self._process.join(WAIT_SECONDS)
        self._process.kill()
        self._process.join()
        self._process.close()
        self._context.destroy(linger=0)


class SocketWorker(FakeExecutor):
    """An executor whose worker is in the process, with its stores."""

    capabilities = frozenset(PARTS)

    def __init__(self, process: WorkerProcess, setup: Setup) -> None:
        self._process = process
        process.ask("make", msgspec.msgpack.encode(setup))
        self.names = tuple(setup.stores)
        self._reports: list[Loaded] = []

    def launch(self, plan: StepPlan) -> StepResult:
        return plans.decode(self._process.ask("launch", plans.encode(plan)), StepResult)

    def sample(self, ticket: StepResult, masks: Masks | None) -> None:
        assert masks is not None
        result = plans.decode(self._process.ask("sample", plans.encode(masks)), StepResult)
        for name in result.__struct_fields__:
            setattr(ticket, name, getattr(result, name))

    def collect(self, ticket: Any) -> StepResult:
        return ticket

    def tick(self) -> None:
        self._reports += msgspec.msgpack.decode(self._process.ask("tick"), type=list[Loaded])

    def take_reports(self) -> list[Loaded]:
        reports, self._reports = self._reports, []
        return reports

    def find(self, keys: list[bytes]) -> list[int]:
        found = self._process.ask("find", msgspec.msgpack.encode(keys))
        return msgspec.msgpack.decode(found, type=list[int])

    def counts(self) -> dict[str, int]:
        return {}

    def content(self) -> str:
        return self._process.ask("content").decode()

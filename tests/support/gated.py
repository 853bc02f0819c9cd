"""A core whose steps a test lets through one by one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from engine.messages.step import StepResult
from policylab.verify.fake import DigestWorker
from support.core_clients import WAIT_SECONDS, HostedCore
from support.live_core import BLOCK_SIZE, VOCAB_SIZE, SizedBuild
from support.spawned import fake_config

NUM_BLOCKS = 400


class Gate:
    """Steps wait here: ``let`` one through, or ``open`` it for all."""

    def __init__(self) -> None:
        self._steps = threading.Semaphore(0)
        self._in_step = threading.Semaphore(0)

    def let(self) -> None:
        """One step ends, and the core is in the middle of the next one when this returns."""
        self.wait_until_in_step()
        self._steps.release()
        self.wait_until_in_step()
        self._in_step.release()

    def wait_until_in_step(self) -> None:
        assert self._in_step.acquire(timeout=WAIT_SECONDS), "the core computes nothing"

    def open(self) -> None:
        self._steps.release(1_000_000)

    def worker(self) -> DigestWorker:
        return GatedWorker(self)

    def pass_through(self) -> None:
        self._in_step.release()
        self._steps.acquire()


class GatedWorker(DigestWorker):
    """Each step takes as long as the test says."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_SIZE, vocab_size=VOCAB_SIZE)
        self._gate = gate

    def collect(self, result: StepResult) -> StepResult:
        self._gate.pass_through()
        return super().collect(result)


@contextmanager
def gated_core() -> Iterator[tuple[HostedCore, Gate]]:
    """A core behind sockets in a thread, and the gate of its steps."""
    gate = Gate()
    core = HostedCore(SizedBuild(worker=gate.worker), config=fake_config())
    try:
        yield core, gate
    finally:
        gate.open()
        core.close()

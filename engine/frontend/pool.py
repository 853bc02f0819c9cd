"""Tokenizer and detokenizer processes, as many of each as asked for.

    any thread ── encode, render ─> Future ──┐                      ┌─> tokenizer process
    session    ── read           ─> Future ──┴─> thread ── socket ──┴─> detokenizer process

One thread owns sockets and processes. It sleeps until something arrives, a process ends or hangs.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from engine.config.model import ModelConfig
from engine.errors import EngineDeadError, RefusedError, WireError
from engine.frontend.pool_child import Asked, TextProcess
from engine.frontend.pool_process import pack_ids, unpack_ids
from engine.frontend.pool_slot import MAX_FAILED_STARTS, START_SECONDS, Slot
from engine.frontend.pool_tasks import Task
from engine.ipc.channel import Delivery
from engine.ipc.sockets import Socket, Waker
from engine.messages.text import (
    Encode,
    Encoded,
    Read,
    Render,
    Rendered,
    Rendering,
    Reply,
    Role,
    TextDelta,
    TextRow,
    Texts,
)

logger = logging.getLogger(__name__)

ARENA_BYTES = 32 << 20  # in each direction of each process; memory is taken when first used
HANG_SECONDS = 30.0


class Seat(NamedTuple):
    """A task and its process; ``slot`` None is the tokenizer with the least work."""

    task: Task
    slot: int | None


class TextPool:
    """``size`` tokenizer and ``size`` detokenizer processes. May be used from any thread.

    Futures raise ``RequestError`` for an input that cannot be done, ``RefusedError`` while a
    process cannot be started, and ``EngineDeadError`` once the pool is closed.
    """

    def __init__(
        self,
        model: ModelConfig,
        size: int,
        *,
        arena_bytes: int = ARENA_BYTES,
        hang_seconds: float = HANG_SECONDS,
    ) -> None:
        asked = Asked(
            _wherever_we_go(model.model),
            None if model.tokenizer is None else _wherever_we_go(model.tokenizer),
            model.trust_remote_code,
            arena_bytes,
            hang_seconds,
        )
        self.size = size
        self._loop = PoolLoop(asked, size)
        self._numbers = count()
        self.close: Callable[[], None] = weakref.finalize(self, self._loop.close)
        """End the processes; harmless when repeated."""

    def wait_until_ready(self) -> None:
        """Raises ``EngineDeadError`` naming a process that could not be started."""
        for slot in self._loop.slots:
            slot.started.result(START_SECONDS * (MAX_FAILED_STARTS + 1))  # it gives up before

    @property
    def pids(self) -> dict[str, int]:
        """Of the processes that run, by name."""
        running = [(slot.name, slot.process) for slot in self._loop.slots]
        return {name: process.program.pid for name, process in running if process is not None}

    def encode(self, text: str, add_special_tokens: bool = True) -> Future[list[int]]:
        """``Tokenizer.encode`` of a text that can be written as UTF-8."""
        job = Encode(next(self._numbers), add_special_tokens)
        return self._ask(Task(job, [str.encode(text)], _ids_of, what=text))

    def render(self, template: str, values: dict[str, Any]) -> Future[Rendering]:
        """Fill in the source of a chat template with plain data. Raises ``WireError`` for values
        that cannot travel, through the future."""
        job = Render(next(self._numbers), values)
        what = values.get("messages")
        return self._ask(Task(job, [template.encode()], _rendering_of, what=what))

    def read(
        self, detokenizer: int, epoch: int, rows: list[TextRow], prompts: list[list[int]]
    ) -> Future[list[TextDelta]]:
        """Turn rows into text at a detokenizer; ``prompts`` are those of openings in them.

        Raises ``TextsLost`` if it has died, with all it knew, or is not that of ``epoch``.
        """
        job = Read(next(self._numbers), rows)
        payloads = [pack_ids(prompt) for prompt in prompts]
        task = Task(job, payloads, partial(_deltas_of, len(rows)), epoch=epoch)
        return self._ask(task, self.size + detokenizer)

    def _ask(self, task: Task, slot: int | None = None) -> Future[Any]:
        self._loop.add(Seat(task, slot))
        return task.future


class PoolLoop:
    """The thread of a pool. ``add`` and ``close`` may be called from others."""

    def __init__(self, asked: Asked, size: int) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._inbox: deque[Seat] = deque()
        self._waker = Waker()
        self._lock = threading.Lock()  # nothing is added once it is closing
        self._is_closing = False
        self._death = EngineDeadError("the engine was shut down")
        self.num_tokenizers = size
        names: tuple[Role, Role] = ("tokenizer", "detokenizer")
        roles = [role for role in names for _ in range(size)]
        self.slots = [
            Slot(
                f"{role} process {index % size}",
                partial(TextProcess, self._context, role, asked),
                time.monotonic,
                asked.hang_seconds,
                self._pass_on,
            )
            for index, role in enumerate(roles)
        ]
        for slot in self.slots:
            slot.start()
        self._thread = threading.Thread(target=self._run, name="text-pool", daemon=True)
        self._thread.start()

    def add(self, seat: Seat) -> None:
        """Queue a task. Raises ``EngineDeadError`` after ``close``, and in a fork of the process
        that started this."""
        with self._lock:
            if self._is_closing:
                raise EngineDeadError(str(self._death)) from self._death.__cause__
            if not self._thread.is_alive():
                raise EngineDeadError(
                    "the text processes belong to the process that this one was forked from; "
                    "make an engine of its own here"
                )
            self._inbox.append(seat)
            self._waker.wake()

    def close(self) -> None:
        """End thread and processes; harmless when repeated."""
        with self._lock:
            self._is_closing = True
        self._waker.wake()
        if threading.current_thread() is not self._thread:  # which may be collecting garbage
            self._thread.join()

    # In the thread.

    def _run(self) -> None:
        try:
            while not self._is_closing:
                ready = self._wait()
                if self._waker.fd in ready:
                    self._waker.clear()
                    self._take_inbox()
                for slot in self.slots:
                    self._attend(slot, ready)
        except BaseException as error:  # after any error, callers that wait must get it
            self._death = EngineDeadError(f"the text processes were given up: {error!r}")
            self._death.__cause__ = error
            logger.exception("the thread of the text processes has died")
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._is_closing = True
        for slot in self.slots:
            slot.close(self._death)
        for task, _ in self._inbox:
            task.fail(self._death)
        self._context.destroy(linger=0)
        self._waker.close()

    def _wait(self) -> dict[Any, int]:
        poller = zmq.Poller()
        poller.register(self._waker.fd, zmq.POLLIN)
        for slot in self.slots:
            if slot.process is not None:
                poller.register(slot.process.socket, zmq.POLLIN)
                poller.register(slot.process.program.pidfd, zmq.POLLIN)
        deadlines = [slot.deadline for slot in self.slots if slot.deadline is not None]
        if not deadlines:
            return dict(poller.poll())
        left = max(0.0, min(deadlines) - time.monotonic())
        return dict(poller.poll(int(left * 1000) + 1))

    def _attend(self, slot: Slot, ready: dict[Any, int]) -> None:
        process = slot.process
        if process is None:
            return
        if process.socket in ready:
            slot.receive()
        if process.program.pidfd in ready:
            slot.died()
        else:
            slot.check()

    def _take_inbox(self) -> None:
        for _ in range(len(self._inbox)):  # and not more: answers wait, too
            task, slot = self._inbox.popleft()
            chosen = self._least_busy() if slot is None else self.slots[slot]
            chosen.add(task)

    def _least_busy(self) -> Slot:
        return min(self.slots[: self.num_tokenizers], key=attrgetter("load"))

    def _pass_on(self, task: Task, error: RefusedError) -> None:
        """Give the task of a tokenizer that cannot be started to another, if one can."""
        another = self._least_busy()
        if isinstance(task.job, Read) or another.is_down:
            task.fail(error)
        else:
            another.add(task)


def _wherever_we_go(directory: str) -> str:
    """The same directory for a process that is started after the working directory has changed."""
    return str(Path(directory).expanduser().absolute())


def _ids_of(delivery: Delivery[Reply]) -> list[int]:
    _expect(delivery, Encoded, 1)
    return unpack_ids(delivery.payloads[0])


def _rendering_of(delivery: Delivery[Reply]) -> Rendering:
    _expect(delivery, Rendered, 2)
    text, ids = delivery.payloads
    try:
        return Rendering(str(text, "utf-8"), unpack_ids(ids))
    except UnicodeDecodeError as error:
        raise WireError(f"a rendered chat is no text: {error}") from error


def _deltas_of(num_rows: int, delivery: Delivery[Reply]) -> list[TextDelta]:
    _expect(delivery, Texts, 0)
    assert isinstance(delivery.message, Texts)
    deltas = delivery.message.deltas
    if len(deltas) != num_rows:
        raise WireError(f"{len(deltas)} texts are no answer to {num_rows} rows")
    return deltas


def _expect(delivery: Delivery[Reply], kind: type, num_payloads: int) -> None:
    if not isinstance(delivery.message, kind) or len(delivery.payloads) != num_payloads:
        raise WireError(f"{delivery.message!r:.80} is no answer to what was asked")

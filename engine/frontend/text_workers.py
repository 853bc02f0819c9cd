"""Pool of processes that tokenise, detokenise or decode pictures.

    any thread ── encode, render ─> Future ── queue of all tokenizers ──> thread <─> its process
    session    ── token ids ────────────── queue of one detokenizer ──> thread <─> its process

Each process has a thread that sends it batches of tasks and receives the answers. When a process
dies or hangs, its thread starts another and sends the tasks again, one at a time, to find the input
that causes the crash. An input fails once it has caused ``MAX_DEATHS`` crashes."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from engine.config.model import ModelConfig
from engine.errors import ConfigError, EngineDeadError, RefusedError, RequestError, WireError
from engine.ipc.codec import MessageDecoder, MessageEncoder
from engine.ipc.frames import pack_frames, read_frames, unpack_ids
from engine.ipc.program import Program
from engine.ipc.sockets import Waker
from engine.messages.text import (
    Encode,
    Encoded,
    Failed,
    Job,
    Ready,
    Render,
    Rendered,
    Rendering,
    Reply,
    StartText,
)
from engine.rpc.failures import error_of

logger = logging.getLogger(__name__)

PROGRAM = "engine.frontend.text_worker_main"
HANG_SECONDS = 30.0  # time limit of a batch of tasks, in addition to the time for its texts
RETRY_SECONDS = 10.0  # pause after a process failed to start or died immediately
START_SECONDS = 60.0  # a process that is not ready after this time is ended
EXIT_MS = 200  # time for a process to exit after it closed its connection
MAX_DEATHS = 3  # crashes that one input may cause
MAX_FAILED_STARTS = 3  # in a row
MAX_IDLE_DEATHS = 8  # crashes in a row before any task was done; above MAX_DEATHS
SLOWEST = 1 << 18  # bytes of text per second that the slowest tokenizer handles
TASK_BYTES = 1000  # fixed cost of a task, in bytes of text
TOGETHER_BYTES = 16 * TASK_BYTES  # cost of tasks sent together
SEE_STDERR = "see what it wrote to standard error"


class Task(ABC):
    """A job for a text process. ``cost``: its size in bytes of text. Tasks with the same ``owner``
    are executed in order."""

    def __init__(self, cost: int, owner: object) -> None:
        self.cost = cost
        self.owner = owner
        self.is_suspect = False  # a process died while it had this task: it is sent alone
        self.num_deaths = 0  # processes that died while they had only this task

    @abstractmethod
    def is_wanted(self) -> bool:
        """True while the task's result is still needed."""

    @abstractmethod
    def job(self, process_number: int) -> Job:
        """The message to send to a process. ``process_number``: its number in the order of
        starts."""

    @abstractmethod
    def result_of(self, reply: Reply) -> Any:
        """Convert the answer to the task's result. Raises ``WireError`` if it does not fit."""

    @abstractmethod
    def finish(self, result: Any) -> None:
        """Deliver the task's result, or an ``Exception``."""

    @abstractmethod
    def death(self, how: str) -> RequestError:
        """The error for an input that ended ``MAX_DEATHS`` processes. ``how``: how the last one
        ended."""


class FutureTask(Task):
    """A task whose result is awaited by a future. It may be cancelled until a process has it."""

    def __init__(self, cost: int) -> None:
        super().__init__(cost, object())  # not itself, which would keep the input
        self.future: Future[Any] = Future()

    def is_wanted(self) -> bool:  # True also marks the future as running: no cancel after it
        future = self.future
        return future.running() or (not future.done() and future.set_running_or_notify_cancel())

    def finish(self, result: Any) -> None:
        if self.is_wanted():
            if isinstance(result, Exception):
                self.future.set_exception(result)
            else:
                self.future.set_result(result)


class PromptTask(FutureTask):
    """A prompt to tokenise or render. ``what``: description of the input for error messages."""

    def __init__(self, job: Encode | Render, what: object) -> None:
        super().__init__(TASK_BYTES + len(job.text if isinstance(job, Encode) else job.template))
        self._job = job
        self._what = what

    def job(self, process_number: int) -> Job:
        return self._job

    def result_of(self, reply: Reply) -> Any:
        match self._job, reply:
            case Encode(), Encoded(token_ids):
                return unpack_ids(token_ids)
            case Render(), Rendered(text, token_ids):
                return Rendering(text, unpack_ids(token_ids))
        raise WireError(f"{reply!r:.80} does not answer the job")

    def death(self, how: str) -> RequestError:
        return RequestError(
            f"the tokenizer process {how} over {self._what!r:.80}, {MAX_DEATHS} times; "
            "this input cannot be tokenised",
            param="prompt",
        )


class TextPool:
    """A pool of ``size`` tokenizer and ``size`` detokenizer processes, and for a model that sees
    ``size`` picture processes. Thread-safe.

    For a batch of b bytes, a process may take ``hang_seconds`` + b / ``slowest`` seconds; then it
    is killed. A process that could not be started is tried again after ``retry_seconds``. Futures
    raise ``RequestError`` for an input that cannot be processed, ``RefusedError`` while no process
    can be started, and ``EngineDeadError`` once the pool is closed."""

    def __init__(
        self,
        model: ModelConfig,
        size: int,
        *,
        hang_seconds: float = HANG_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
        slowest: int = SLOWEST,
        pictures: dict[str, Any] | None = None,
    ) -> None:
        """pictures: settings of the model's image processor in place of its own; ``None``: no
        process decodes pictures."""
        start = partial(
            StartText,
            model=_from_anywhere(model.model),
            tokenizer=None if model.tokenizer is None else _from_anywhere(model.tokenizer),
            trust_remote_code=model.trust_remote_code,
        )
        limits = (hang_seconds, retry_seconds, slowest)
        self._tokenizers = TaskQueue()
        self.detokenizers = [TaskQueue() for _ in range(size)]
        """The task queue of each detokenizer process."""
        self.pictures = TaskQueue()
        """The task queue of the picture processes."""
        queues = [self._tokenizers, *self.detokenizers, self.pictures]
        names = [(f"tokenizer process {i}", self._tokenizers) for i in range(size)]
        names += [(f"detokenizer process {i}", each) for i, each in enumerate(self.detokenizers)]
        on_error = partial(_close, queues, is_waiting=False)
        self.workers = [
            TextWorker(name, queue, partial(TextProcess, start), *limits, on_error)
            for name, queue in names
        ]
        if pictures is not None:
            spawn = partial(TextProcess, partial(start, pictures=pictures))
            self.workers += [
                TextWorker(f"picture process {i}", self.pictures, spawn, *limits, on_error)
                for i in range(size)
            ]
        self.close: Callable[[], None] = weakref.finalize(
            self, _close, queues, EngineDeadError("the engine was shut down")
        )
        """End the processes. A second call does nothing."""
        for worker in self.workers:
            worker.thread.start()

    def wait_until_ready(self) -> None:
        """Block until all processes are ready. Raises ``EngineDeadError``, which names a process
        that could not be started."""
        for worker in self.workers:
            worker.started.result(START_SECONDS * (MAX_FAILED_STARTS + 1))  # fails earlier

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of running processes, by name."""
        running = [(worker.name, worker.process) for worker in self.workers]
        return {name: process.program.pid for name, process in running if process is not None}

    def encode(self, text: str, add_special_tokens: bool = True) -> Future[list[int]]:
        """Run ``Tokenizer.encode`` in a process. Raises ``UnicodeError`` if the text is not valid
        Unicode."""
        return self._put(PromptTask(Encode(str.encode(text), add_special_tokens), text))

    def render(self, template: str, values: dict[str, Any]) -> Future[Rendering]:
        """Render a chat template with plain values. The future raises ``WireError`` for values that
        cannot be sent."""
        return self._put(PromptTask(Render(template.encode(), values), values.get("messages")))

    def _put(self, task: PromptTask) -> Future[Any]:
        self._tokenizers.put([task])
        return task.future


class TaskQueue:
    """First-in, first-out queue of tasks for one or several workers. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # reentrant: garbage collection may close the pool
        self.workers: list[TextWorker] = []
        self.death: EngineDeadError | None = None  # set when the queue is closed
        self.notify: Callable[[], None] = _do_nothing
        """Called by a worker's thread when tasks are done or have failed."""
        self._tasks: deque[Task] = deque()
        self._owner = os.getpid()

    @property
    def num_waiting(self) -> int:
        """Number of tasks that no worker has taken."""
        return len(self._tasks)

    @property
    def is_down(self) -> bool:
        """True if no worker has a process, and all wait before they try to start one again."""
        return all(worker.is_down for worker in self.workers)

    def put(self, tasks: Sequence[Task]) -> None:
        """Queue tasks. Raises ``EngineDeadError`` if the queue is closed, or in a forked
        process."""
        if os.getpid() != self._owner:
            raise EngineDeadError(
                "the text processes belong to the process from which this one was forked; create a "
                "new engine in this process"
            )
        with self.lock:
            if self.death is not None:
                raise EngineDeadError(str(self.death)) from self.death.__cause__
            self._tasks += tasks
            if not self.is_down:
                idle = (each for each in self.workers if each.is_idle and not each.is_down)
                if (worker := next(idle, None)) is not None:
                    worker.is_idle = False
                    worker.waker.wake()
                return
        self.refuse_if_down()

    def put_back(self, tasks: Iterable[Task]) -> None:
        """Return tasks to the front of the queue. If the first of them has crashed a process, all
        tasks of its owner go to the end of the queue."""
        with self.lock:
            tasks = [*tasks, *self._tasks]
            culprit = tasks[0].owner if tasks and tasks[0].num_deaths else None
            self._tasks = deque(sorted(tasks, key=lambda task: task.owner is culprit))
        self.refuse_if_down()

    def take(self, worker: TextWorker) -> list[Task]:
        """Return the next batch of tasks for a worker; [] marks the worker as idle, to be woken by
        new tasks."""
        tasks: list[Task] = []
        cost = 0
        with self.lock:
            while self._tasks and not worker.is_down:
                cost += self._tasks[0].cost
                if tasks and (self._tasks[0].is_suspect or cost > TOGETHER_BYTES):
                    break
                tasks.append(self._tasks.popleft())
                if tasks[0].is_suspect:
                    break
            worker.is_idle = not tasks
        return tasks

    def refuse_if_down(self) -> None:
        """Fail all waiting tasks if no worker can execute them; otherwise wake the workers."""
        with self.lock:
            error: Exception | None = self.death
            if error is None and self.is_down:
                error = self.workers[-1].refusal
            if error is None:
                for worker in self.workers:
                    worker.waker.wake()
                return
            tasks, self._tasks = self._tasks, deque()
        for task in tasks:
            task.finish(error)
        self.notify()

    def close(self, death: EngineDeadError) -> None:
        """Close the queue, fail its tasks with ``death`` and end the processes. Does nothing in a
        forked process."""
        if os.getpid() != self._owner:
            return
        with self.lock:
            self.death = self.death or death
            for worker in self.workers:
                worker.waker.wake()
                if worker.process is not None:
                    worker.process.program.kill()
        self.refuse_if_down()


class TextWorker:
    """A text process, and the thread that serves it. Only the thread sets attributes, except
    ``is_idle``, which the queue's lock guards."""

    def __init__(
        self,
        name: str,
        queue: TaskQueue,
        spawn: Callable[[], TextProcess],
        hang_seconds: float,
        retry_seconds: float,
        slowest: int,
        on_error: Callable[[EngineDeadError], None],
    ) -> None:
        self.name = name
        self.started: Future[None] = Future()
        """Done when a process is ready; raises if none could be started."""
        self.process: TextProcess | None = None
        self.refusal: RefusedError | None = None
        """Why there is no process, if starting one was given up."""
        self.num_starts = 0
        self.num_idle_deaths = 0  # in a row
        self.num_failed_starts = 0  # in a row
        self.is_idle = False
        self.waker = Waker()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._queue = queue
        self._spawn = spawn
        self._hang_seconds = hang_seconds
        self._retry_seconds = retry_seconds
        self._slowest = slowest
        self._on_error = on_error
        self._encoder = MessageEncoder()
        self._down_until = 0.0
        self._tasks: list[Task] = []  # that the process works on
        queue.workers.append(self)

    @property
    def is_down(self) -> bool:
        """True if the worker has no process and waits before it tries to start one again."""
        return self.refusal is not None and time.monotonic() < self._down_until

    def _run(self) -> None:
        try:
            while self._queue.death is None:
                if self.process is None and self.refusal is None:
                    self._start()
                elif tasks := self._queue.take(self):
                    self._work(tasks)
                else:
                    self._sleep()
        except BaseException as error:  # waiting callers must get every error
            logger.exception("the thread of the %s has died", self.name)
            death = EngineDeadError(f"the text processes were shut down after an error: {error!r}")
            death.__cause__ = error
            for task in self._tasks:
                task.finish(death)
            self._on_error(death)
        if self.process is not None:
            self.process.close()
            self.process = None
        if not self.started.done():
            assert self._queue.death is not None
            self.started.set_exception(self._queue.death)
        self.waker.close()

    def _start(self) -> None:
        self.num_starts += 1
        try:
            process = self._spawn()
        except (OSError, ConfigError) as error:
            self._give_up(f"could not be started: {error}")
            return
        with self._queue.lock:  # a later ``close`` ends the process
            self.process = process
            if self._queue.death is not None:
                return
        try:
            process.wait_until_ready(START_SECONDS)
        except (EOFError, TimeoutError, WireError):
            how = self._end_process()
            self.num_failed_starts += 1
            if self.num_failed_starts == MAX_FAILED_STARTS:
                times = f"{MAX_FAILED_STARTS} times"
                self._give_up(f"{how} before it was ready, {times}; {SEE_STDERR}")
        else:
            self.num_failed_starts = 0
            if not self.started.done():
                self.started.set_result(None)

    def _sleep(self) -> None:
        """Sleep until there are tasks or the process has ended."""
        poller = select.poll()
        poller.register(self.waker.fd, select.POLLIN)
        if self.process is not None:
            poller.register(self.process.program.pidfd, select.POLLIN)
        ready = dict(poller.poll())
        self.waker.clear()
        if self.process is not None and self.process.program.pidfd in ready:
            self._died([])

    def _work(self, tasks: list[Task]) -> None:
        """Send these tasks to the process and deliver their results."""
        if self.process is None:  # starting was given up a while ago: try again
            self.refusal = None
            self._queue.put_back(tasks)
            return
        self._tasks = tasks
        sent: list[Task] = []
        frames: list[bytes] = []
        for task in tasks:
            if not task.is_wanted():
                continue
            try:
                frames.append(self._encoder.encode(task.job(self.num_starts)))
            except WireError as error:
                task.finish(error)
            else:
                sent.append(task)
        if sent:
            self._exchange(self.process, sent, frames)
        self._tasks = []
        self._queue.notify()

    def _exchange(self, process: TextProcess, tasks: list[Task], frames: list[bytes]) -> None:
        limit = self._hang_seconds + sum(task.cost for task in tasks) / self._slowest
        try:
            replies = process.exchange(frames, limit)
            results = [
                error_of(reply.failure) if isinstance(reply, Failed) else task.result_of(reply)
                for task, reply in zip(tasks, replies, strict=True)
            ]
        except EOFError:
            self._died(tasks)
        except TimeoutError:
            logger.error("the %s does not answer and is ended", self.name)
            process.program.kill()
            self._died(tasks)
        except WireError as error:
            logger.error("the %s sent an invalid message and was terminated: %s", self.name, error)
            process.program.kill()
            self._died(tasks)
        else:
            self.num_idle_deaths = 0
            for task, result in zip(tasks, results, strict=True):
                task.finish(result)

    def _died(self, tasks: list[Task]) -> None:
        """Handle a crash of the process while it had these tasks: queue them again, each to be sent
        alone. If there was only one task, the crash is blamed on it."""
        how = self._end_process()
        if self._queue.death is None:
            logger.warning("the %s %s; starting another one", self.name, how)
        self.num_idle_deaths += 1
        for task in tasks:
            task.is_suspect = True
        if len(tasks) == 1:
            tasks[0].num_deaths += 1
            if tasks[0].num_deaths == MAX_DEATHS:
                culprit = tasks.pop()
                culprit.finish(culprit.death(how))
        self._queue.put_back(tasks)
        if self.num_idle_deaths == MAX_IDLE_DEATHS:
            times = f"{MAX_IDLE_DEATHS} times"
            self._give_up(f"{how} before it had done a task, {times}; {SEE_STDERR}")

    def _end_process(self) -> str:
        """End the process and return how it ended."""
        assert self.process is not None
        how = self.process.end()
        with self._queue.lock:
            self.process.close()
            self.process = None
        return how

    def _give_up(self, why: str) -> None:
        """Refuse tasks for ``retry_seconds``; after that, a task starts a process again."""
        message = f"the {self.name} {why}"
        logger.error("%s", message)
        if not self.started.done():
            self.started.set_exception(EngineDeadError(message))
        self.num_failed_starts = self.num_idle_deaths = 0
        self._down_until = time.monotonic() + self._retry_seconds
        self.refusal = RefusedError(
            message, retry_after=self._retry_seconds, code="text_processes_down"
        )
        self._queue.refuse_if_down()


class TextProcess:
    """A tokenizer or detokenizer process, and the socket to it. ``start``: makes the start message,
    which names the process's file descriptor of the socket.

    Raises ``OSError`` or ``ConfigError`` if the system cannot start it."""

    def __init__(self, start: Callable[[int], StartText]) -> None:
        self.is_ready = False
        self._decoder: MessageDecoder[Reply] = MessageDecoder(Reply)
        self._socket, theirs = socket.socketpair()
        try:
            message = msgspec.msgpack.encode(start(theirs.fileno()))
            self.program = Program(PROGRAM, message, [theirs.fileno()])
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()

    def wait_until_ready(self, seconds: float) -> None:
        """Block until the process reports that it is ready. Raises the errors of ``exchange``."""
        if self._read(1, time.monotonic() + seconds) != [Ready()]:
            raise WireError("the first message of the process must be 'ready'")
        self.is_ready = True

    def exchange(self, frames: list[bytes], seconds: float) -> list[Reply]:
        """Send jobs and wait for the answers. Raises ``EOFError`` if the process ends first,
        ``TimeoutError`` after ``seconds``, and ``WireError`` for invalid answers."""
        deadline = time.monotonic() + seconds
        self._socket.settimeout(seconds)
        try:
            self._socket.sendall(pack_frames(frames))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError("the process is gone") from error
        return self._read(len(frames), deadline)

    def end(self) -> str:
        """End the process if it still runs. Returns how it ended."""
        poller = select.poll()
        poller.register(self.program.pidfd, select.POLLIN)
        poller.poll(EXIT_MS)
        self.program.kill()
        return self.program.how_it_ended()

    def close(self) -> None:
        self.program.close()
        self._socket.close()

    def _read(self, num: int, deadline: float) -> list[Reply]:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        poller.register(self.program.pidfd, select.POLLIN)  # a fork may keep its socket open

        def receive(size: int) -> bytes:
            left = max(0.0, deadline - time.monotonic())
            ready = [fd for fd, _ in poller.poll(int(1000 * left) + 1)]
            if not ready:
                raise TimeoutError
            try:
                return self._socket.recv(size) if self._socket.fileno() in ready else b""
            except ConnectionResetError:
                return b""

        frames = read_frames(receive)
        if len(frames) != num:
            raise WireError(f"{len(frames)} answers to {num} jobs")
        return [self._decoder.decode([frame]) for frame in frames]


def _close(queues: list[TaskQueue], death: EngineDeadError, *, is_waiting: bool = True) -> None:
    """End all workers and, if ``is_waiting``, wait for their threads. Does nothing in a forked
    process."""
    for queue in queues:
        queue.close(death)
    for thread in (worker.thread for queue in queues for worker in queue.workers):
        is_other = threading.current_thread() is not thread  # garbage collection may run in it
        if is_waiting and is_other and thread.is_alive():
            thread.join()


def _do_nothing() -> None: ...


def _from_anywhere(directory: str) -> str:
    """Make a path absolute, for processes that start after a change of the working directory."""
    return str(Path(directory).expanduser().absolute())

"""Tasks of text processes, and the queue of tasks of one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from engine.ipc.channel import Delivery
from engine.messages.text import Job, Reply

TASK_BYTES = 1000  # a task costs as much as so many bytes of text, beside its own


class TextsLost(Exception):
    """A detokenizer has died. ``epoch``: the process that takes its place.

    ``is_suspect``: the process had this task; ``is_culprit``: and no other.
    """

    def __init__(self, epoch: int, *, is_suspect: bool = False, is_culprit: bool = False) -> None:
        super().__init__(epoch, is_suspect, is_culprit)
        self.epoch = epoch
        self.is_suspect = is_suspect
        self.is_culprit = is_culprit


@dataclass
class Task:
    """A job on its way. ``what`` is shown in errors: the input it is about."""

    job: Job
    payloads: list[bytes]
    result_of: Callable[[Delivery[Reply]], Any]
    """What the future brings; raises ``WireError`` for an answer that does not fit this job."""
    what: Any = None
    epoch: int = 0  # of a Read: the process it is meant for
    future: Future[Any] = field(default_factory=Future)
    num_deaths: int = 0

    @property
    def cost(self) -> int:
        """Its cost, in bytes of text."""
        return TASK_BYTES + sum(map(len, self.payloads))

    def is_wanted(self) -> bool:
        """Whether a caller still waits; from then on it cannot be cancelled any more."""
        return self.future.running() or self.future.set_running_or_notify_cancel()

    def fail(self, error: Exception) -> None:
        """Raise the error in the caller that waits."""
        if self.is_wanted():
            self.future.set_exception(error)


class TaskQueue:
    """Tasks of one process, in order, and what they cost together."""

    def __init__(self) -> None:
        self.cost = 0
        self._tasks: deque[Task] = deque()

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    def __getitem__(self, place: int) -> Task:
        return self._tasks[place]

    def append(self, task: Task) -> None:
        self._tasks.append(task)
        self.cost += task.cost

    def take(self, place: int = 0) -> Task:
        """Take out one."""
        task = self._tasks[place]
        del self._tasks[place]
        self.cost -= task.cost
        return task

    def take_all(self) -> list[Task]:
        tasks, self._tasks = list(self._tasks), deque()
        self.cost = 0
        return tasks

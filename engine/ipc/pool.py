"""A pool of processes for independent computations."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker as resource_tracker
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from engine.ipc.process import without_interrupts


class Workers(ProcessPoolExecutor):
    """A pool of spawned processes, which ignore interrupts and end with their parent."""

    def __init__(self, num_workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        super().__init__(num_workers, mp_context=context, initializer=_end_with_parent)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        with without_interrupts():  # a submission may start a process
            return super().submit(fn, *args, **options)


@contextmanager
def workers(num_workers: int) -> Iterator[Workers]:
    """A process pool for use in a ``with``. If the block raises, the processes are killed, because
    nobody waits for their results."""
    resource_tracker.ensure_running()  # its start would unblock interrupts later
    others = set(multiprocessing.active_children())
    pool = Workers(num_workers)
    try:
        yield pool
    except BaseException:
        for child in set(multiprocessing.active_children()) - others:
            child.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()

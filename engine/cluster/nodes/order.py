"""Order: a process that a node must start, for the actor ``Keeper``."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from engine.config.env import NUM_THREADS, core_secret
from engine.ipc.process import Child, StartReport


class Order(Protocol):
    """A process that a node must start. It is pickled, by Ray."""

    @property
    def ready_timeout(self) -> float:
        """Seconds that the process may take until its start report."""
        ...

    def spawn(self) -> Child:
        """Start the process."""
        ...


@dataclass(frozen=True)
class NodeOptions:
    """What a process gets from the node on which it runs, and from the machine that wants it."""

    ip: str
    """Address of the node, at which the process listens."""
    secret: str | None
    """Secret of the process and its client; ``None``: the one in the node's environment."""
    variables: Mapping[str, str]
    """Environment variables of the process."""

    def environment(self, num_threads: int) -> Mapping[str, str]:
        """The variables with the number of threads, whose value by Ray is 1."""
        return {**self.variables, NUM_THREADS: str(num_threads)}

    def known_secret(self) -> str | None:
        """The secret, on the node."""
        return core_secret() if self.secret is None else self.secret


def forget_main_module() -> None:
    """Let new processes of this one not import its main module, Ray's program for workers."""
    sys.modules["__main__"].__file__ = None


def started(child: Child, timeout: float) -> tuple[bytes, int]:
    """Wait until the process is ready. Returns the encoded start report and the process id."""
    return msgspec.msgpack.encode(child.wait_until_ready(timeout)), child.pid


def failure_report(error: Exception) -> bytes:
    """The encoded start report of a process that could not be started."""
    return msgspec.msgpack.encode(
        StartReport(False, type(error).__name__, str(error), traceback.format_exc())
    )

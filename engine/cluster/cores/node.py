"""CoreNode: the Ray actor that keeps one core on a node. No step of the core passes through it.

Ray sends this module by value, so that it also runs on a node that lacks the engine: only the
standard library is imported at its top.
"""

from __future__ import annotations

import hashlib
import os
import platform
import select
import socket
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.cluster.cores.spawn import CoreOrder
    from engine.ipc.process import Child

SECRET = "METRONOME_CORE_SECRET"


def describe(
    packages: Sequence[str], model: str | None, variables: Sequence[str]
) -> dict[str, Any]:
    """What cores on this machine depend on, as plain values.

    packages: distributions whose versions are wanted, ``None`` for a missing one; model: a local
    model, whose files are listed with their sizes; variables: names of environment variables."""
    return {
        "host": socket.gethostname(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "versions": {name: _version(name) for name in packages},
        "files": None if model is None else _files(Path(model)),
        "variables": {name: os.environ.get(name) for name in variables},
        "secret": fingerprint(os.environ.get(SECRET)),
    }


def fingerprint(secret: str | None) -> str | None:
    """A digest of a secret, to compare it with another machine's."""
    if not secret:
        return None
    return hashlib.sha256(f"metronome/check/{secret}".encode(errors="replace")).hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package).partition("+")[0]  # builds for CPU and for GPU fit together
    except PackageNotFoundError:
        return None


def _files(model: Path) -> Mapping[str, int]:
    """The names and sizes, in bytes, of the files of a model; {} if it does not exist."""
    try:
        files = [model] if model.is_file() else [each for each in model.iterdir() if each.is_file()]
        return {each.name: each.stat().st_size for each in files if each.name[0] != "."}
    except OSError:
        return {}


class CoreNode:
    """Describes a node, then starts a core's process there and supervises it. Its methods are
    called by the front end, each in a thread of its own."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._lock = threading.Lock()  # protects the child's end

    def report(
        self, packages: Sequence[str], model: str | None, variables: Sequence[str]
    ) -> dict[str, Any]:
        """Describe this node."""
        import ray

        about = describe(packages, model, variables)
        node = ray.get_runtime_context().get_node_id()
        return {**about, "node": node, "ip": ray.util.get_node_ip_address()}

    def start(self, order: CoreOrder) -> tuple[bytes, int]:
        """Start the core's process and wait until it is ready. Returns the encoded start report and
        the process id."""
        from engine.cluster.cores.spawn import failure_report, spawn, started

        try:
            self._child = spawn(order)
            return started(self._child, order)
        except Exception as error:
            return failure_report(error), 0

    def watch(self) -> str:
        """Wait until the core's process has ended. Returns how."""
        child = self._child
        assert child is not None
        poller = select.poll()
        poller.register(child.pidfd, select.POLLIN)
        poller.poll()
        return child.how_it_ended() or "ended"

    def end(self, kills: bool) -> None:
        """End the core's process: at once, or as soon as its step has ended."""
        with self._lock:
            if self._child is None:
                return
            if kills:
                self._child.kill()
            self._child.close()

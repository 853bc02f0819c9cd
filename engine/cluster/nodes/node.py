"""Keeper: the Ray actor that keeps one process on a node. No step passes through it.

Ray sends this module by value, so that it also runs on a node that lacks the engine: only the
standard library is imported at its top.
"""

from __future__ import annotations

import hashlib
import importlib.util
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
    from engine.cluster.nodes.order import Order
    from engine.ipc.process import Child

SECRET = "METRONOME_CORE_SECRET"
GPUS = "CUDA_VISIBLE_DEVICES"  # set by Ray for an actor that has reserved GPUs
SOURCES = ("engine", "kernels")  # packages whose files must be the same
CONFIG = "config.json"
FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")  # of processors


def describe(
    packages: Sequence[str], models: Sequence[str], variables: Sequence[str]
) -> dict[str, Any]:
    """What processes on this machine depend on, as plain values.

    packages: distributions whose versions are wanted, ``None`` for a missing one; models: local
    models, whose files are listed with their sizes; variables: names of environment variables."""
    return {
        "host": socket.gethostname(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "versions": {name: _version(name) for name in packages},
        "source": source_digest(),
        "models": {model: _files(Path(model)) for model in models},
        "variables": {name: os.environ.get(name) for name in variables},
        "processor": _flags(),
        "secret": fingerprint(os.environ.get(SECRET)),
    }


def source_digest() -> str | None:
    """A digest of the engine's source files on this machine; ``None`` where it is not installed."""
    digest = hashlib.sha256()
    for package in SOURCES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            return None
        folder = Path(spec.origin).parent
        for file in sorted(folder.rglob("*.py")):
            digest.update(f"{package}/{file.relative_to(folder)}".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


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


def _files(model: Path) -> Mapping[str, str]:
    """The names of the files of a model, with their sizes, and a digest of its configuration; {} if
    it does not exist."""
    try:
        files = [model] if model.is_file() else [each for each in model.iterdir() if each.is_file()]
        return {each.name: _content(each) for each in files if each.name[0] != "."}
    except OSError:
        return {}


def _content(file: Path) -> str:
    size = f"{file.stat().st_size} bytes"
    if file.name != CONFIG:
        return size
    return f"{size} (SHA-256 {hashlib.sha256(file.read_bytes()).hexdigest()[:12]})"


def _flags() -> str:
    """Which of ``FLAGS`` the processor has."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    found = next((line.split() for line in lines if line.startswith("flags")), [])
    return " ".join(flag for flag in FLAGS if flag in found)


class Keeper:
    """Describes a node, then starts a process there and supervises it. Its methods are called from
    another process, each in a thread of its own."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._lock = threading.Lock()  # protects the child's end

    def report(
        self, packages: Sequence[str], models: Sequence[str], variables: Sequence[str]
    ) -> dict[str, Any]:
        """Describe this node."""
        import ray

        about = describe(packages, models, variables)
        node, ip = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return {**about, "node": node, "ip": ip, "gpus": os.environ.get(GPUS, "")}

    def start(self, order: Order) -> tuple[bytes, int]:
        """Start the process and wait until it is ready. Returns the encoded start report and the
        process id."""
        from engine.cluster.nodes.order import failure_report, started

        try:
            self._child = order.spawn()
            return started(self._child, order.ready_timeout)
        except Exception as error:
            return failure_report(error), 0

    def watch(self) -> str:
        """Wait until the process has ended. Returns how."""
        child = self._child
        assert child is not None
        poller = select.poll()
        poller.register(child.pidfd, select.POLLIN)
        poller.poll()
        return child.how_it_ended() or "ended"

    def end(self, kills: bool) -> None:
        """End the process: at once, or as soon as its step has ended."""
        with self._lock:
            if self._child is None:
                return
            if kills:
                self._child.kill()
            self._child.close()

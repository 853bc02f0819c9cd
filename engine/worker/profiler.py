"""Profiler traces of the worker, for Perfetto or chrome://tracing."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
from contextlib import suppress
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from engine.errors import ConfigError, reason_of
from engine.observe.guard import Failures
from engine.worker.steps import is_recording

logger = logging.getLogger("engine.worker")


class TorchProfiler:
    """Records the torch operations of all threads of this process between ``start`` and ``stop``.

    Traces are written as ``trace-PID-N.json`` to ``directory``, which is created if missing; with
    ``None``, recording is not possible. Raises ``ConfigError`` if the directory is not writable.
    ``failures`` counts traces that could not be written."""

    def __init__(self, directory: str | None, failures: Failures | None = None) -> None:
        self._failures = failures or Failures()
        self._directory = None if directory is None else _writable(Path(directory))
        self._running: profile | None = None

    def start(self) -> None:
        """Start recording. Raises ``ConfigError`` if a profiler is already recording in this
        process."""
        if self._directory is None:
            raise ConfigError(
                "torch_profiler_dir is not set; start the engine with torch_profiler_dir set to a "
                "directory for traces"
            )
        if self._running is not None:
            raise ConfigError("a profile is being recorded already; stop it before you start one")
        if is_recording():  # a second profiler would stop the first without an error
            raise ConfigError(
                "another torch profiler is recording in this process; stop it before you start one"
            )
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            activities.append(ProfilerActivity.CUDA)
        # All threads, since another thread may step than the one that starts or stops.
        config = _ExperimentalConfig(profile_all_threads=True)
        begun = profile(activities=activities, experimental_config=config)
        begun.start()
        self._running = begun
        atexit.register(self.close)  # torch crashes if the process exits during a recording

    def stop(self) -> list[str]:
        """Stop and write the trace, which may take seconds. Returns the paths of the files. Raises
        ``ConfigError`` if nothing is being recorded or the trace cannot be written."""
        if self._running is None or self._directory is None:
            raise ConfigError("no profile is being recorded; start one before you stop it")
        ended = self._running
        self.close()
        try:
            return [str(_written(ended, self._directory))]
        except ConfigError as error:
            self._failures.add("profiler")
            logger.error("%s", error)
            raise

    def close(self) -> None:
        """Stop without writing a trace. Does nothing if nothing is being recorded."""
        if self._running is not None:
            ended, self._running = self._running, None
            atexit.unregister(self.close)
            ended.stop()


def _written(recorded: profile, directory: Path) -> Path:
    path = _free_path(_writable(directory))
    try:
        recorded.export_chrome_trace(str(path))
        if not _is_complete(path):  # torch prints a failure and does not raise
            raise OSError("the file is incomplete; the disk may be full")
    except (OSError, RuntimeError) as error:
        for left in (path, path.with_name(f"{path.name}.tmp")):
            with suppress(OSError):
                left.unlink(missing_ok=True)
        raise ConfigError(
            f"the trace could not be written to {path}: {error}; what was recorded is lost"
        ) from error
    return path


def _is_complete(path: Path) -> bool:
    """True if a trace file ends with "}", which shows that it was written to its end."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 64))
            return file.read().rstrip().endswith(b"}")
    except OSError:
        return False


def _writable(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"torch_profiler_dir {directory} cannot be created: {reason_of(error)}"
        ) from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"torch_profiler_dir {directory} is not writable; choose another")
    return directory


def _free_path(directory: Path) -> Path:
    """The first unused file name: several engines may write to one directory."""
    names = (f"trace-{os.getpid()}-{n}.json" for n in itertools.count())
    return next(path for path in map(directory.joinpath, names) if not path.exists())

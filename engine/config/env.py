"""The only reader of the environment but for one variable. Each is named here, with its meaning."""

from __future__ import annotations

import difflib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from engine.errors import ConfigError, reason_of

logger = logging.getLogger("engine.config")

PREFIX = "METRONOME_"
MAX_DIGITS = 10  # of a number of threads
LOG_LEVELS = ("debug", "info", "warning", "error")

LOG_LEVEL = "METRONOME_LOG_LEVEL"
"""Log level of engines that were not given one."""

NUM_THREADS = "OMP_NUM_THREADS"
"""Threads of CPU kernels, for engines without a number of their own; OpenMP's own name for it."""


API_KEY = "METRONOME_API_KEY"
"""A key that clients of the HTTP server must show, where a command line would show it to others."""

ADMIN_API_KEY = "METRONOME_ADMIN_API_KEY"
"""The key of those who may pause the HTTP server's engine and the like."""

INTERPRET_CUDA = "METRONOME_INTERPRET_CUDA"
"""1: the CPU stands in for the device of ``device="cuda"``; with TRITON_INTERPRET=1, for tests."""


def interprets_cuda() -> bool:
    """Whether the CUDA worker is to compute on the CPU, in Triton's interpreter.

    Raises ``ConfigError`` for a value that is neither 0 nor 1.
    """
    value = os.environ.get(INTERPRET_CUDA, "0")
    if value not in ("0", "1"):
        raise ConfigError(f"{INTERPRET_CUDA} is {value!r:.80}, must be 0 or 1")
    return value == "1"


VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
"""Numbers or UUIDs of the GPUs that a process sees, divided by commas; the driver's own name."""


def visible_gpus(num: int) -> list[str]:
    """The variable that gives a child process each of the ``num`` GPUs this one sees, in order."""
    listed = os.environ.get(VISIBLE_GPUS)
    if listed is None:
        return [str(index) for index in range(num)]
    return [name.strip() for name in listed.split(",")][:num]


_LENT = threading.Lock()


@contextmanager
def environment_for_child(values: Mapping[str, str]) -> Iterator[None]:
    """Within it the environment has these values, for a process that is started here: what its
    main module imports may read them before any line of ours runs."""
    if not values:
        yield
        return
    with _LENT:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


CPU_ISA = "METRONOME_CPU_ISA"
"""Instructions of the CPU's kernels, fewer than it has; read by ``kernels.cpu.isa``, which comes
before everything else that is compiled."""


KERNEL_CACHE = "METRONOME_KERNEL_CACHE"
"""Where compiled kernels are kept, before all other places; read by ``kernels.cpu.disk_cache``."""

TRITON_CACHE = "TRITON_CACHE_DIR"
"""Where Triton keeps those of GPUs; its own name for it."""


def kernel_cache() -> str | None:
    """What ``METRONOME_KERNEL_CACHE`` says, ``None`` if it is not set or empty."""
    return os.environ.get(KERNEL_CACHE) or None


def use_kernel_cache(directory: str) -> None:
    """Have this process, and those it starts, keep compiled kernels there.

    Raises ``ConfigError`` if it is no directory and none can be made.
    """
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"kernel_cache {directory} cannot be made: {reason_of(error)}") from error
    os.environ[KERNEL_CACHE] = directory
    os.environ.setdefault(TRITON_CACHE, str(Path(directory) / "triton"))


CORE_SECRET = "METRONOME_CORE_SECRET"
"""What a core and its clients share, for cores that are reached over TCP."""


DECODE_POLL_TIMEOUT = "METRONOME_DECODE_POLL_TIMEOUT_MS"
"""``decode_poll_timeout_ms`` of engines that were not given one."""


def decode_poll_timeout() -> str | None:
    """What ``METRONOME_DECODE_POLL_TIMEOUT_MS`` says, ``None`` if it is not set."""
    return os.environ.get(DECODE_POLL_TIMEOUT)


def default_log_level(fallback: str = "info") -> str:
    """What ``METRONOME_LOG_LEVEL`` says, ``fallback`` if it is not set.

    Raises ``ConfigError`` if that is no level.
    """
    value = os.environ.get(LOG_LEVEL, fallback)
    if value.lower() not in LOG_LEVELS:
        raise ConfigError(f"{LOG_LEVEL} is {value!r:.80}, must be one of: {', '.join(LOG_LEVELS)}")
    return value.lower()


def default_num_threads() -> int | None:
    """What ``OMP_NUM_THREADS`` says, ``None`` if it is not set to a positive number.

    At most as many as this machine has cores: it is set for all programs, on machines of any size.
    """
    value = os.environ.get(NUM_THREADS, "").split(",")[0]
    is_number = value.isdecimal() and len(value) < MAX_DIGITS
    return min(int(value), os.cpu_count() or 1) if is_number and int(value) else None


def core_secret() -> str | None:
    """What ``METRONOME_CORE_SECRET`` says, ``None`` if it is not set.

    Raises ``ConfigError`` for bytes that are no text: keys are made from text.
    """
    value = os.environ.get(CORE_SECRET)
    if value is not None and not _is_utf8(value):
        raise ConfigError(f"{CORE_SECRET} is not UTF-8; choose another secret")
    return value


def api_keys() -> list[str]:
    """The key that the environment has, if any."""
    return list(filter(None, [os.environ.get(API_KEY)]))


def admin_api_key() -> str | None:
    """What ``METRONOME_ADMIN_API_KEY`` says, ``None`` if it is not set or empty."""
    return os.environ.get(ADMIN_API_KEY) or None


def _is_utf8(value: str) -> bool:
    """Is it valid UTF-8? Python keeps other bytes of a variable as surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def warn_of_typos() -> None:
    """Log variables that are not ours but whose names are nearly those of ours."""
    known = (
        LOG_LEVEL, API_KEY, ADMIN_API_KEY, INTERPRET_CUDA, CPU_ISA, KERNEL_CACHE, CORE_SECRET,
        DECODE_POLL_TIMEOUT,
    )  # fmt: skip
    for name in os.environ:
        if not name.startswith(PREFIX) or name in known:
            continue
        for near in difflib.get_close_matches(name, known, 1, cutoff=0.85):
            logger.warning("%s is not known, and has no effect; did you mean %s?", name, near)

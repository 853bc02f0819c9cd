"""Reads the environment variables that the engine uses."""

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
MAX_DIGITS = 10  # in a number of threads
LOG_LEVELS = ("debug", "info", "warning", "error")

LOG_LEVEL = "METRONOME_LOG_LEVEL"
"""Log level of engines without the option."""

NUM_THREADS = "OMP_NUM_THREADS"
"""Threads of CPU kernels for engines without the option; OpenMP's own variable."""


API_KEY = "METRONOME_API_KEY"
"""API key that clients of the HTTP server must send. Other users of the machine cannot see it here,
unlike on a command line."""

OPENAI_API_KEY = "OPENAI_API_KEY"
"""API key that ``metronome bench serve`` sends, as OpenAI's own client does."""

ADMIN_API_KEY = "METRONOME_ADMIN_API_KEY"
"""Key that clients must send to pause the HTTP server's engine and for similar requests."""

INTERPRET_CUDA = "METRONOME_INTERPRET_CUDA"
"""1: engines with ``device="cuda"`` compute on the CPU, in Triton's interpreter (which needs
TRITON_INTERPRET=1); for tests."""


def interprets_cuda() -> bool:
    """Whether the CUDA worker must compute on the CPU, in Triton's interpreter.

    Raises ``ConfigError`` for a value other than 0 and 1.
    """
    value = os.environ.get(INTERPRET_CUDA, "0")
    if value not in ("0", "1"):
        raise ConfigError(f"{INTERPRET_CUDA} is {value!r:.80}, must be 0 or 1")
    return value == "1"


VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
"""Numbers or UUIDs of the GPUs that a process may use, separated by commas; the CUDA driver's own
variable."""


def visible_gpus(num: int) -> list[str]:
    """Return the first ``num`` visible GPUs, each as a value of ``CUDA_VISIBLE_DEVICES`` for one
    child process."""
    listed = os.environ.get(VISIBLE_GPUS)
    if listed is None:
        return [str(index) for index in range(num)]
    return [name.strip() for name in listed.split(",")][:num]


BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
"""1: torch starts no thread that watches a group of ranks; torch's own variable."""

TRACE_BUFFER = "TORCH_NCCL_TRACE_BUFFER_SIZE"
"""How many operations of ranks torch records; torch's own variable."""


_LENT = threading.Lock()


@contextmanager
def environment_with(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables in this block, for child processes that are started in it and for
    libraries that read them. A child could not set them itself in time: importing its main module
    may already read them."""
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
"""Limits the instruction set of CPU kernels; read by ``kernels.cpu.isa``, before anything is
compiled."""


KERNEL_CACHE = "METRONOME_KERNEL_CACHE"
"""Directory for compiled kernels, tried first; read by ``kernels.cpu.disk_cache``."""

TRITON_CACHE = "TRITON_CACHE_DIR"
"""Directory for Triton's compiled kernels; Triton's own variable."""


def kernel_cache() -> str | None:
    """Return ``METRONOME_KERNEL_CACHE``, ``None`` if it is not set or empty."""
    return os.environ.get(KERNEL_CACHE) or None


def use_kernel_cache(directory: str) -> None:
    """Make this process and its children keep compiled kernels in this directory.

    Raises ``ConfigError`` if it cannot be created.
    """
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"kernel_cache {directory} cannot be created: {reason_of(error)}; name a writable place"
        ) from error
    os.environ[KERNEL_CACHE] = directory
    os.environ.setdefault(TRITON_CACHE, str(Path(directory) / "triton"))


NO_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
"""transformers' own variable."""


def expect_no_torch() -> None:
    """Let transformers, imported after this call, not say that it finds no torch."""
    os.environ[NO_ADVICE] = "1"


CORE_SECRET = "METRONOME_CORE_SECRET"
"""Secret that a core and its clients share, for cores that are reached over TCP."""


RAY_ADDRESS = "RAY_ADDRESS"
"""Address of the Ray cluster; Ray's own variable. Default: the cluster that runs on this
machine."""


def ray_address() -> str | None:
    """Return ``RAY_ADDRESS``, ``None`` if it is not set or empty."""
    return os.environ.get(RAY_ADDRESS) or None


DECODE_POLL_TIMEOUT = "METRONOME_DECODE_POLL_TIMEOUT_MS"
"""``decode_poll_timeout_ms`` of engines without the option."""


def user_cache() -> Path:
    """The directory in which programs keep caches of this user (XDG Base Directory)."""
    found = os.environ.get("XDG_CACHE_HOME", "")
    return Path(found) if os.path.isabs(found) else Path.home() / ".cache"


def decode_poll_timeout() -> str | None:
    """Return ``METRONOME_DECODE_POLL_TIMEOUT_MS``, ``None`` if it is not set."""
    return os.environ.get(DECODE_POLL_TIMEOUT)


def default_log_level(fallback: str = "info") -> str:
    """Return ``METRONOME_LOG_LEVEL``, or ``fallback`` if it is not set.

    Raises ``ConfigError`` for an unknown level.
    """
    value = os.environ.get(LOG_LEVEL, fallback)
    if value.lower() not in LOG_LEVELS:
        raise ConfigError(f"{LOG_LEVEL} is {value!r:.80}, must be one of: {', '.join(LOG_LEVELS)}")
    return value.lower()


def default_num_threads() -> int | None:
    """Return ``OMP_NUM_THREADS``, ``None`` if it is not set to a positive number.

    The result is at most the number of cores of this machine."""
    value = os.environ.get(NUM_THREADS, "").split(",")[0]
    is_number = value.isdecimal() and len(value) < MAX_DIGITS
    return min(int(value), os.cpu_count() or 1) if is_number and int(value) else None


def core_secret() -> str | None:
    """Return ``METRONOME_CORE_SECRET``, ``None`` if it is not set.

    Raises ``ConfigError`` if it is not valid UTF-8.
    """
    value = os.environ.get(CORE_SECRET)
    if value is not None and not _is_utf8(value):
        raise ConfigError(f"{CORE_SECRET} is not UTF-8; choose another secret")
    return value


def api_keys() -> list[str]:
    """Return a list with the environment's API key, [] if it is not set."""
    return list(filter(None, [os.environ.get(API_KEY)]))


def client_api_key() -> str | None:
    """Return the key that a client of a server sends, ``None`` if the environment has none."""
    return os.environ.get(OPENAI_API_KEY) or os.environ.get(API_KEY) or None


def admin_api_key() -> str | None:
    """Return ``METRONOME_ADMIN_API_KEY``, ``None`` if it is not set or empty."""
    return os.environ.get(ADMIN_API_KEY) or None


def _is_utf8(value: str) -> bool:
    """Whether an environment variable is valid UTF-8. Python decodes other bytes to surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def warn_of_typos() -> None:
    """Log unknown METRONOME_ variables whose names are close to known ones."""
    known = (
        LOG_LEVEL, API_KEY, ADMIN_API_KEY, INTERPRET_CUDA, CPU_ISA, KERNEL_CACHE, CORE_SECRET,
        DECODE_POLL_TIMEOUT,
    )  # fmt: skip
    for name in os.environ:
        if not name.startswith(PREFIX) or name in known:
            continue
        for near in difflib.get_close_matches(name, known, 1, cutoff=0.85):
            logger.warning("%s is unknown and has no effect; did you mean %s?", name, near)

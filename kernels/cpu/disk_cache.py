"""Disk cache of compiled functions.

All modules that pass functions to Numba import this one, which first imports
:mod:`kernels.cpu.isa`, so that the instruction set is chosen before anything is compiled.

A process reads all cache directories that it trusts and writes to the first that is writable. If
none is, it compiles what it needs and logs this once. Damaged files are compiled again.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from numba import config, njit
from numba.core import caching
from numba.core.registry import cpu_target

from kernels.cpu import isa

logger = logging.getLogger("engine.kernels")

PACKAGES = Path(__file__).parents[2]
DIGEST_BYTES = 16
MOST_SECONDS = 300.0  # that a process waits for another one that compiles the same
POLL_SECONDS = 0.05
NOWHERE = ""  # a path without files
_TURN = threading.RLock()
# A second lock: threads that hold _TURN wait for Numba's lock, and this one is taken within that.
_PLACES = threading.Lock()


@cache
def directory_name() -> str:
    """Name of the cache directory for these sources and this instruction set.

    It contains a hash of all sources, because Numba only checks the file of a body and would miss
    changes in functions that the body calls.
    """
    here = Path(__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(here.rglob("*.py")))
    return f"numba-{isa.LEVEL}-{hashlib.sha256(text).hexdigest()[:16]}"


class CachePlaces:
    """The directories that hold compiled functions: those that are read, and the one to which new
    ones are written."""

    def __init__(self, chosen: str | None = None, trusted: Collection[int] = ()) -> None:
        """chosen: the cache directory; default: NUMBA_CACHE_DIR, otherwise the package's directory
        and the user's cache. trusted: ids of users whose compiled code may run."""
        self._trusted = trusted or trusted_users()
        self.readable: list[str] = []
        self.writable: str | None = None
        self.refusals: list[str] = []
        """Reasons why other directories are not used."""
        self._is_reported = False
        if chosen is None and config.CACHE_DIR and not _is_for_all(Path(config.CACHE_DIR)):
            self._consider(Path(config.CACHE_DIR))
            return
        chosen = chosen or config.CACHE_DIR
        if chosen:
            self._consider(Path(chosen) / directory_name())
            return
        self._consider(Path(__file__).parent / "__pycache__" / directory_name())
        home = home_directory()
        if home is not None and home.is_dir():
            self._consider(home / ".cache" / "metronome" / directory_name())
        else:
            self.refusals.append(f"{home or 'a home directory'} does not exist")

    def complain(self, error: OSError | None = None) -> None:
        """Log once that compiled code cannot be stored, with the reason and what to do."""
        with _PLACES:
            is_first, self._is_reported = not self._is_reported, True
        if is_first:
            why = "; ".join([*self.refusals, *([] if error is None else [str(error)])])
            logger.warning(
                "compiled kernels cannot be stored (%s), so each start compiles them for about 20 "
                "seconds; set --kernel-cache (%s) to a writable directory, or run `metronome "
                "prepare` once as a user who can write to the package",
                why,
                isa.KERNEL_CACHE,
            )

    def _consider(self, place: Path) -> None:
        try:
            with suppress(OSError):
                place.mkdir(0o755, parents=True, exist_ok=True)
            about = place.stat()
        except OSError as error:
            self.refusals.append(f"{place}: {error.strerror}")
            return
        if about.st_uid not in self._trusted or _is_for_all(place):
            self.refusals.append(f"{place}: other users can write to it")
            return
        self.readable.append(str(place))
        if self.writable is None:
            try:
                tempfile.TemporaryFile(dir=place).close()
            except OSError as error:
                self.refusals.append(f"{place}: {error.strerror}")
            else:
                self.writable = str(place)


def _is_for_all(place: Path) -> bool:
    """True if every user of the machine may write to a directory."""
    try:
        return bool(place.stat().st_mode & 0o002)
    except OSError:
        return False


def home_directory() -> Path | None:
    """The user's home directory; ``None`` if neither the environment nor the system has one."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def trusted_users() -> set[int]:
    """Ids of users whose compiled code may run: root, this user and the owner of the sources."""
    return {0, os.geteuid(), Path(__file__).stat().st_uid}


class Current:
    """The cache directories of this process."""

    def __init__(self) -> None:
        self._by_choice: dict[str | None, CachePlaces] = {}

    @property
    def places(self) -> CachePlaces:
        """The cache directories according to the current environment."""
        chosen = isa.kernel_cache()
        with _PLACES:
            if chosen not in self._by_choice:
                self._by_choice[chosen] = CachePlaces(chosen)
            return self._by_choice[chosen]


CURRENT = Current()


class Locator:
    """Finds the cache files of a function for Numba: at the same relative path in each cache
    directory."""

    def __init__(self, function: Any, file: str) -> None:
        self._py_file = file
        self._line = function.__code__.co_firstlineno

    @classmethod
    def from_function(cls, function: Any, file: str) -> Locator | None:
        """Make a locator, as Numba requires; ``None`` for a function that is not in a file."""
        return cls(function, file) if os.path.exists(file) else None

    def get_cache_path(self) -> str:
        """The path in the writable cache directory, or else in the first readable one."""
        places = CURRENT.places
        base = places.writable or next(iter(places.readable), NOWHERE)
        return os.path.join(base, self.below) if base else NOWHERE

    @property
    def below(self) -> str:
        """The path of these files relative to a cache directory, equal in every installation."""
        folder = Path(self._py_file).parent
        if folder.is_relative_to(PACKAGES):
            return "_".join(folder.relative_to(PACKAGES).parts)
        return f"{folder.name}_{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"

    def ensure_cache_path(self) -> None:
        """Does nothing (Numba's interface): the directory is created when something is stored."""

    def get_source_stamp(self) -> bytes:
        """A hash of the function's source file, independent of its path and time."""
        return hashlib.sha256(Path(self._py_file).read_bytes()).digest()

    def get_disambiguator(self) -> str:
        """The line of the function, which distinguishes functions of one name in a file."""
        return str(self._line)


class OneSaverAtATime(caching.IndexDataCacheFile):  # type: ignore[misc]
    """The cache files of one function, which several processes may write at the same time.

    Numba chooses a file name that is not in the index yet. Two processes could choose the same
    name, which would leave a wrong entry in the index forever; a lock prevents this. Files end with
    a checksum, since a partial file would be executed as machine code."""

    def save(self, key: Any, data: Any) -> None:
        """Store a compiled variant. If that is impossible, log this once."""
        is_ours = not self._cache_path or self._base is not None
        if is_ours and CURRENT.places.writable is None:
            CURRENT.places.complain()
            return
        try:
            os.makedirs(self._cache_path, exist_ok=True)
            with ExitStack() as locks:
                with suppress(OSError):  # some file systems have no locks
                    lock = locks.enter_context(open(f"{self._index_path}.lock", "a"))
                    fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
                super().save(key, data)
        except OSError as error:  # for example a full disk
            CURRENT.places.complain(error)

    def load(self, key: Any) -> Any:
        """Load a compiled variant from any of the cache directories."""
        each = (place.load_here(key) for place in (self, *self._elsewhere()))
        return next((found for found in each if found is not None), None)

    def load_here(self, key: Any) -> Any:
        """Load a compiled variant from this object's directory only."""
        return super().load(key)

    def has(self, key: Any) -> bool:
        """True if a file of this compiled variant exists."""
        for each in (self, *self._elsewhere()):
            name = each._load_index().get(key)
            if name is not None and os.path.exists(each._data_path(name)):
                return True
        return False

    @property
    def _base(self) -> str | None:
        """The readable cache directory that contains this object's files; ``None`` if none does."""
        bases = CURRENT.places.readable
        return next((each for each in bases if self._cache_path.startswith(each + os.sep)), None)

    def _elsewhere(self) -> Iterator[OneSaverAtATime]:
        base = self._base
        if base is None:
            return
        below = os.path.relpath(self._cache_path, base)
        for other in CURRENT.places.readable:
            if other != base:
                yield OneSaverAtATime(
                    cache_path=os.path.join(other, below),
                    filename_base=self._index_name.removesuffix(".nbi"),
                    source_stamp=self._source_stamp,
                )

    @contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[Summed]:
        with super()._open_for_write(filepath) as file:
            summed = Summed(file)
            yield summed
            file.write(summed.digest())

    def _load_index(self) -> dict[Any, str]:
        if not _is_complete(self._index_path):
            return {}
        overloads: dict[Any, str] = super()._load_index()
        return overloads

    def _load_data(self, name: str) -> Any:
        path = self._data_path(name)
        if not _is_complete(path):
            raise OSError(f"{path} is damaged")  # Numba treats it as missing
        return super()._load_data(name)


class Summed:
    """A writable file that computes the checksum of its contents."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sum = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def write(self, data: bytes) -> int:
        self._sum.update(data)
        return self._file.write(data)

    def digest(self) -> bytes:
        return self._sum.digest()


def _is_complete(path: str) -> bool:
    """True if a file exists and ends with the checksum of its contents (Numba ignores these
    bytes)."""
    try:
        data = Path(path).read_bytes()
    except OSError:
        return False
    content, checksum = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest() == checksum


@contextmanager
def cache_of_these_sources() -> Iterator[bool]:
    """Context in which functions passed to Numba use this disk cache. Yields True, the value for
    Numba's ``cache`` option.

    Numba reads its locator and cache class when it decorates a function. Both classes are global,
    so only one thread at a time is in the context."""
    kind = caching.CompileResultCacheImpl
    with _TURN:
        file, caching.IndexDataCacheFile = caching.IndexDataCacheFile, OneSaverAtATime
        chosen, config.CACHE_LOCATOR_CLASSES = getattr(config, "CACHE_LOCATOR_CLASSES", ""), ""
        kind._locator_classes = [Locator]
        try:
            yield True
        finally:
            del kind._locator_classes  # the class above has Numba's own
            config.CACHE_LOCATOR_CLASSES = chosen
            caching.IndexDataCacheFile = file


def kept(function: Callable[..., Any]) -> Any:
    """Decorate a function with ``njit``; its compiled code is stored in this disk cache."""
    with cache_of_these_sources() as cache:
        return njit(cache=cache)(function)


def is_kept(body: Callable[..., Any], signature: Any) -> bool:
    """True if the disk cache has this function's code for this signature."""
    file, key = _entry(body, signature)
    return file.has(key)


def _entry(body: Callable[..., Any], signature: Any) -> tuple[OneSaverAtATime, Any]:
    """The cache files of a function, and the key of its code for this signature."""
    with cache_of_these_sources():
        kept = caching.FunctionCache(body)
        key = kept._index_key(signature, cpu_target.target_context.codegen())
        return kept._cache_file, key


@contextmanager
def compiled_once(
    body: Callable[..., Any], signature: Any, *, waits: bool = True
) -> Iterator[bool]:
    """Context in which to compile a function or load it from the disk cache: processes that start
    together compile each function once. Waits while another process compiles it; yields False
    instead if ``waits`` is false. Locks end with their process."""
    file, key = _entry(body, signature)
    if CURRENT.places.writable is None or file.has(key):
        yield True
        return
    with ExitStack() as locks:
        lock: BinaryIO | None = None
        with suppress(OSError):
            os.makedirs(file._cache_path, exist_ok=True)
            lock = locks.enter_context(open(f"{file._index_path}.compiling", "ab"))
        yield lock is None or _is_locked(lock, waits=waits)


def _is_locked(lock: BinaryIO, *, waits: bool) -> bool:
    """Lock a file until it is closed. Returns False if another process keeps it locked, and
    ``waits`` is false; waits no longer than ``MOST_SECONDS``, or until this program ends."""
    until = time.monotonic() + MOST_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not waits:
                return False
            if time.monotonic() > until or not threading.main_thread().is_alive():
                return True
            time.sleep(POLL_SECONDS)
        except OSError:  # some file systems have no locks
            return True
        else:
            return True


def kept_file(name: str) -> Path | None:
    """Path in the cache for a file that depends on the machine but is not compiled code. The file
    exists or can be written; ``None`` without a writable directory."""
    places = CURRENT.places
    for place in places.readable:
        if (Path(place) / name).exists():
            return Path(place) / name
    return Path(places.writable) / name if places.writable else None


def has_place() -> bool:
    """True if compiled functions can be stored."""
    return CURRENT.places.writable is not None

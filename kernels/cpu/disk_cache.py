"""Where compiled functions are kept between processes.

Imports :mod:`kernels.cpu.isa` before anything is compiled: whoever hands a function to Numba comes
by here.

A process reads all places that it may trust and writes to the first that it can. Without any it
compiles what it needs and says so once. What is damaged is compiled anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import tempfile
import threading
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
NOWHERE = ""  # the place of files that are not there
_TURN = threading.RLock()
# Not the one above: it is held by who waits for Numba's own lock, and this is taken within that.
_PLACES = threading.Lock()


@cache
def directory_name() -> str:
    """What is kept of these sources, for these instructions, is in directories of this name.

    It is made from the text of all sources: Numba looks only at the file a body stands in, and
    would miss a change in what the body calls.
    """
    here = Path(__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(here.rglob("*.py")))
    return f"numba-{isa.LEVEL}-{hashlib.sha256(text).hexdigest()[:16]}"


class CachePlaces:
    """The directories in which compiled functions are looked for, and the one they are kept in."""

    def __init__(self, chosen: str | None = None, trusted: Collection[int] = ()) -> None:
        """chosen: the user's directory; without it NUMBA_CACHE_DIR, else the package's own and the
        user's cache. trusted: users whose compiled code may run."""
        self._trusted = trusted or trusted_users()
        self.readable: list[str] = []
        self.writable: str | None = None
        self.refusals: list[str] = []
        """Why others are not used."""
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
            self.refusals.append(f"{home or 'a home directory'} is not there")

    def complain(self, error: OSError | None = None) -> None:
        """Compiled code cannot be kept: log the reason and the remedy, once."""
        with _PLACES:
            is_first, self._is_reported = not self._is_reported, True
        if is_first:
            why = "; ".join([*self.refusals, *([] if error is None else [str(error)])])
            logger.warning(
                "compiled kernels cannot be kept (%s): each start compiles them, which takes some "
                "20 seconds; give --kernel-cache (%s) a directory that can be written to, or run "
                "`metronome prepare` once where the package is installed",
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
            self.refusals.append(f"{place}: others than its user can write code to it")
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
    """May every user of the machine write there?"""
    try:
        return bool(place.stat().st_mode & 0o002)
    except OSError:
        return False


def home_directory() -> Path | None:
    """The user's; ``None`` for one of whom neither the environment nor the system knows it."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def trusted_users() -> set[int]:
    """Whose compiled code may run: whose sources do, the system's and one's own."""
    return {0, os.geteuid(), Path(__file__).stat().st_uid}


class Current:
    """The places of this process."""

    def __init__(self) -> None:
        self._by_choice: dict[str | None, CachePlaces] = {}

    @property
    def places(self) -> CachePlaces:
        """The places that the environment names now, for functions compiled from now on."""
        chosen = isa.kernel_cache()
        with _PLACES:
            if chosen not in self._by_choice:
                self._by_choice[chosen] = CachePlaces(chosen)
            return self._by_choice[chosen]


CURRENT = Current()


class Locator:
    """Tells Numba where a function is kept: the same path below each of the places."""

    def __init__(self, function: Any, file: str) -> None:
        self._py_file = file
        self._line = function.__code__.co_firstlineno

    @classmethod
    def from_function(cls, function: Any, file: str) -> Locator | None:
        """Numba's interface; ``None`` for what stands in no file."""
        return cls(function, file) if os.path.exists(file) else None

    def get_cache_path(self) -> str:
        """Below the place that is written to, else below the first that is read."""
        places = CURRENT.places
        base = places.writable or next(iter(places.readable), NOWHERE)
        return os.path.join(base, self.below) if base else NOWHERE

    @property
    def below(self) -> str:
        """The part of the path that all places share, wherever the packages are."""
        folder = Path(self._py_file).parent
        if folder.is_relative_to(PACKAGES):
            return "_".join(folder.relative_to(PACKAGES).parts)
        return f"{folder.name}_{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"

    def ensure_cache_path(self) -> None:
        """Numba's interface; it is made when something is kept."""

    def get_source_stamp(self) -> bytes:
        """The stamp of the file that the function stands in, wherever and whenever it was
        installed."""
        return hashlib.sha256(Path(self._py_file).read_bytes()).digest()

    def get_disambiguator(self) -> str:
        """Numba's interface."""
        return str(self._line)


class OneSaverAtATime(caching.IndexDataCacheFile):  # type: ignore[misc]
    """The compiled variants of one function, to which several processes may add.

    A variant gets a file that the index does not name yet. Two processes that look at the same time
    choose the same one, and the index may then name it for the variant that is not in it, for good.
    Files end with a checksum, for what was written in part is machine code, too.
    """

    def save(self, key: Any, data: Any) -> None:
        """Keep a variant where that is possible; complain once where it is not."""
        is_ours = not self._cache_path or self._base is not None
        if is_ours and CURRENT.places.writable is None:
            CURRENT.places.complain()
            return
        try:
            os.makedirs(self._cache_path, exist_ok=True)
            with ExitStack() as locks:
                with suppress(OSError):  # some file systems know no locks
                    lock = locks.enter_context(open(f"{self._index_path}.lock", "a"))
                    fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
                super().save(key, data)
        except OSError as error:  # the disk is full, say
            CURRENT.places.complain(error)

    def load(self, key: Any) -> Any:
        """A variant, of whichever place has it."""
        each = (place.load_here(key) for place in (self, *self._elsewhere()))
        return next((found for found in each if found is not None), None)

    def load_here(self, key: Any) -> Any:
        """A variant, if it is in this place."""
        return super().load(key)

    def has(self, key: Any) -> bool:
        """Is there a file of this variant?"""
        for each in (self, *self._elsewhere()):
            name = each._load_index().get(key)
            if name is not None and os.path.exists(each._data_path(name)):
                return True
        return False

    @property
    def _base(self) -> str | None:
        """The one of the places that this is below; the others have the same path below them."""
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
        if not _is_whole(self._index_path):
            return {}
        overloads: dict[Any, str] = super()._load_index()
        return overloads

    def _load_data(self, name: str) -> Any:
        path = self._data_path(name)
        if not _is_whole(path):
            raise OSError(f"{path} is damaged")  # to Numba, it is not there
        return super()._load_data(name)


class Summed:
    """A file that is written, and the checksum of what was."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sum = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def write(self, data: bytes) -> int:
        self._sum.update(data)
        return self._file.write(data)

    def digest(self) -> bytes:
        return self._sum.digest()


def _is_whole(path: str) -> bool:
    """Is it there, and does it end with the checksum of the rest? Numba reads no further than its
    own end."""
    try:
        data = Path(path).read_bytes()
    except OSError:
        return False
    content, checksum = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest() == checksum


@contextmanager
def cache_of_these_sources() -> Iterator[bool]:
    """Functions handed to Numba meanwhile are looked for and kept there; says whether Numba is to
    be given ``cache=True``, which is always so.

    Numba chooses place and class when a function is handed over, not when it is compiled. Both are
    the process's: threads take turns.
    """
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
    """Compiled when it is first called, and kept."""
    with cache_of_these_sources() as cache:
        return njit(cache=cache)(function)


def is_kept(body: Callable[..., Any], signature: Any) -> bool:
    """Whether what is compiled from this function is there, so that it need not be compiled."""
    with cache_of_these_sources():
        kept = caching.FunctionCache(body)
        key = kept._index_key(signature, cpu_target.target_context.codegen())
        return bool(kept._cache_file.has(key))


def kept_file(name: str) -> Path | None:
    """Where something else that depends on the machine is kept, if there is such a place: a file
    that is there, or one that can be written."""
    places = CURRENT.places
    for place in places.readable:
        if (Path(place) / name).exists():
            return Path(place) / name
    return Path(places.writable) / name if places.writable else None


def has_place() -> bool:
    """Whether there is a place where compiled functions can be kept."""
    return CURRENT.places.writable is not None

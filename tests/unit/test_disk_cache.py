"""Compiled kernels that several processes keep in one place."""

from __future__ import annotations

import threading
from pathlib import Path

import numba
import pytest
from numba.core.caching import IndexDataCacheFile
from support.patience import WAIT_SECONDS

from kernels.cpu.disk_cache import OneSaverAtATime, cache_of_these_sources, compiled_once
from kernels.cpu.isa import KERNEL_CACHE
from kernels.cpu.team import launch, launch_nogil

STAMP = (1.0, 1)


class Slow(OneSaverAtATime):
    """Its data is written when the other one has written its own."""

    def __init__(self, path: Path, has_saved: threading.Event) -> None:
        super().__init__(cache_path=str(path), filename_base="f", source_stamp=STAMP)
        self.has_named = threading.Event()
        self._has_saved = has_saved

    def _save_index(self, overloads):
        super()._save_index(overloads)
        self.has_named.set()

    def _save_data(self, name, data):
        self._has_saved.wait(1.0)
        super()._save_data(name, data)


class Overtaken(OneSaverAtATime):
    """Another one saves a variant after it has looked which files there are."""

    def __init__(self, path: Path) -> None:
        super().__init__(cache_path=str(path), filename_base="f", source_stamp=STAMP)
        self.has_saved = threading.Event()
        self.other = Slow(path, self.has_saved)
        self.thread = threading.Thread(target=self.other.save, args=("b", "code of b"))

    def _save_index(self, overloads):
        self.thread.start()
        self.other.has_named.wait(0.3)  # which it cannot while we save
        super()._save_index(overloads)


def test_two_that_save_at_once_get_a_file_each(tmp_path: Path) -> None:
    first = Overtaken(tmp_path)
    first.save("a", "code of a")
    first.has_saved.set()
    first.thread.join()
    reader = IndexDataCacheFile(cache_path=str(tmp_path), filename_base="f", source_stamp=STAMP)
    assert (reader.load("a"), reader.load("b")) == ("code of a", "code of b")


def test_what_is_handed_over_is_kept_so_and_others_functions_as_ever() -> None:
    before = numba.core.caching.IndexDataCacheFile
    with cache_of_these_sources():
        assert numba.core.caching.IndexDataCacheFile is OneSaverAtATime
    assert numba.core.caching.IndexDataCacheFile is before


def test_launches_that_let_other_threads_run_are_kept_apart() -> None:
    """Numba's index does not know the option, only the function."""
    assert launch.py_func is not launch_nogil.py_func


def body(x: int) -> int:
    return x + 1


SIGNATURE = numba.int64(numba.int64)


def test_a_function_is_compiled_by_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock of a file keeps threads apart as it does processes."""
    monkeypatch.setenv(KERNEL_CACHE, str(tmp_path))
    order: list[str] = []

    def compile_it() -> None:
        with compiled_once(body, SIGNATURE) as is_mine:
            order.append("second")
            assert is_mine

    with compiled_once(body, SIGNATURE) as is_mine:
        assert is_mine
        with compiled_once(body, SIGNATURE, waits=False) as is_mine:
            assert not is_mine
        thread = threading.Thread(target=compile_it)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join(WAIT_SECONDS)
    assert order == ["first", "second"]


def test_nobody_waits_for_a_function_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KERNEL_CACHE, str(tmp_path))
    with compiled_once(body, SIGNATURE):
        with cache_of_these_sources() as is_writable:
            numba.njit(SIGNATURE, cache=is_writable)(body)
        with compiled_once(body, SIGNATURE, waits=False) as is_mine:
            assert is_mine

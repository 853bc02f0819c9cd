"""What a GPU's kernels need of a machine is looked for before a model is loaded."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from engine import LLM
from engine.assets import BOX_MODEL
from engine.errors import ConfigError
from engine.worker.worker import ModelWorker
from kernels.toolchain import missing_for_build, why_triton_cannot_start

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is made up")


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU as torch sees it; a model that is loaded fails the test."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(ModelWorker, "load", lambda self: pytest.fail("the model was loaded"))


def no_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PATH", str(folder))


def another_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("CC", str(folder / "mycc"))


def no_headers(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    paths = {**sysconfig.get_paths(), "include": str(folder)}
    monkeypatch.setattr(sysconfig, "get_paths", lambda **options: paths)


def no_triton(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize(
    "take_away, told",
    [
        (no_compiler, "a C compiler, and none is in PATH: apt install gcc python3-dev, or set CC"),
        (another_compiler, r"CC is '.*mycc', which does not exist: apt install gcc"),
        (no_headers, r"finds no Python.h in /.*: apt install python3-dev \(python3\.1\d-dev\)"),
        (no_triton, r"Triton cannot be imported \(.*\); pip install 'triton>=3.6,<3.8'"),
    ],
)
def test_what_is_missing_is_said_before_a_model_is_loaded(
    take_away, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    take_away(monkeypatch, tmp_path)
    with pytest.raises(
        ConfigError, match=rf"device='cuda' needs Triton.*{told}.*; or use device='cpu'"
    ):
        LLM(BOX_MODEL, device="cuda")


def test_nothing_is_missing_where_a_module_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    assert missing_for_build(None) is None
    broken = missing_for_build(sys.executable)  # a program that is no compiler
    assert broken is not None and "which fails: " in broken


def test_a_compiler_may_complain_in_any_encoding(tmp_path: Path) -> None:
    command = tmp_path / "mycc"
    command.write_text("#!/bin/sh\nprintf 'Datei nicht lesbar f\\374r uns' >&2\nexit 1\n")
    command.chmod(0o755)
    told = missing_for_build(str(command))
    assert told is not None and "which fails: Datei nicht lesbar f" in told


def test_a_driver_that_triton_does_not_find_is_told_in_its_words() -> None:
    told = why_triton_cannot_start()
    assert told is not None and "finds no supported device (RuntimeError: 0 active drivers" in told

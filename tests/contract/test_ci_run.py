"""Continuous integration runs on a bare machine: nothing of the caller's home or settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import source_tree as tree

# Stands where `make` would: writes what it was given, and ends with a status of its own.
MAKE = """#!{python}
import json, os, sys
home = os.environ.get("HOME")
found = {{"words": sys.argv[1:], "variables": dict(os.environ), "home": os.listdir(home)}}
open({out!r}, "w").write(json.dumps(found))
open(home + "/left", "w").close()
sys.exit({status})
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def run(tmp_path: Path, home: Path, status: int = 0, **variables: str) -> dict[str, Any]:
    """What `make` gets if continuous integration is started at this home."""
    out = tmp_path / "found.json"
    programs = tmp_path / "programs"
    programs.mkdir(exist_ok=True)
    make = programs / "make"
    make.write_text(MAKE.format(python=sys.executable, out=str(out), status=status))
    make.chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:/usr/bin:/bin"
    rooms = tmp_path / "rooms"
    rooms.mkdir(exist_ok=True)
    done = subprocess.run(
        ["sh", str(tree.ROOT / ".ci" / "run")],
        env={"PATH": path, "HOME": str(home), "TMPDIR": str(rooms), **variables},
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stderr
    assert not list(rooms.iterdir()), "the directory that was home stays"
    found: dict[str, Any] = json.loads(out.read_text())
    return found


SETTINGS = (
    *("XDG_CACHE_HOME", "MPLCONFIGDIR", "NUMBA_CACHE_DIR", "HF_HOME", "OMP_NUM_THREADS"),
    *("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "METRONOME_API_KEY", "MAKEFLAGS", "VLLM_API_KEY"),
)


def test_no_setting_of_the_caller_passes(tmp_path: Path, home: Path) -> None:
    found = run(tmp_path, home, **dict.fromkeys(SETTINGS, str(tmp_path)))
    assert not found["variables"].keys() & {*SETTINGS}


@pytest.mark.parametrize(
    "value", ["https://registry.example/simple", "two words", 'it\'s "quoted" $HOME `id` \\', ""]
)
def test_the_way_to_registries_passes_as_it_is(value: str, tmp_path: Path, home: Path) -> None:
    given = dict.fromkeys(
        [
            "PIP_INDEX_URL",
            "PIP_CERT",
            "npm_config_registry",
            "NPM_CONFIG_CAFILE",
            "SSL_CERT_FILE",
            "REQUESTS_CA_BUNDLE",
            "NODE_EXTRA_CA_CERTS",
            "https_proxy",
            "NO_PROXY",
            "LANG",
            "CI",
        ],
        value,
    )
    found = run(tmp_path, home, **given)["variables"]
    assert {name: found.get(name) for name in given} == given


def test_home_is_empty_and_the_interpreter_is_the_callers(tmp_path: Path, home: Path) -> None:
    (home / ".cache").mkdir()
    found = run(tmp_path, home)
    assert found["home"] == [] and found["variables"]["HOME"] != str(home)
    assert found["words"][0] == "test"
    assert os.path.realpath(found["words"][1].removeprefix("PYTHON=")) == os.path.realpath(
        sys.executable
    )


@pytest.mark.parametrize("status", [1, 2])
def test_the_status_is_that_of_the_tests(status: int, tmp_path: Path, home: Path) -> None:
    run(tmp_path, home, status)


def test_files_that_configure_pip_and_npm_are_still_found(tmp_path: Path, home: Path) -> None:
    pip, npm = home / ".config" / "pip" / "pip.conf", home / ".npmrc"
    pip.parent.mkdir(parents=True)
    pip.touch()
    npm.touch()
    found = run(tmp_path, home)["variables"]
    assert (found["PIP_CONFIG_FILE"], found["NPM_CONFIG_USERCONFIG"]) == (str(pip), str(npm))
    found = run(tmp_path, home, PIP_CONFIG_FILE="/x/pip.conf")["variables"]
    assert found["PIP_CONFIG_FILE"] == "/x/pip.conf"
    bare = run(tmp_path, tmp_path / "nowhere")["variables"]
    assert not {"PIP_CONFIG_FILE", "NPM_CONFIG_USERCONFIG"} & set(bare)

"""Commands that packages add to ``metronome`` by entry points."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from support import source_tree as tree

from engine.cli.commands import GROUP, OWN
from engine.cli.main import main

HELLO = '''"""Greet somebody, 100% of the time.

More about it.
"""
def add_arguments(parser):
    parser.add_argument("name")
    parser.add_argument("--count", type=int, default=1)

def run(parsed):
    print(*["hello", parsed.name] * parsed.count)
    return 7
'''

Add = Callable[..., None]


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Add]:
    """Makes a package as if pip had installed it: files by name, and commands by name."""
    before = set(sys.modules)

    def add(package: str, files: dict[str, str], **commands: str) -> None:
        root = tmp_path / package
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        about = root / f"{package}-1.0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {place}" for name, place in commands.items()]
        (about / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
        monkeypatch.syspath_prepend(str(root))

    yield add
    for name in set(sys.modules) - before:
        if name.startswith("made_"):
            del sys.modules[name]


def help_text(capsys: pytest.CaptureFixture[str]) -> str:
    """What ``metronome --help`` prints."""
    with pytest.raises(SystemExit) as leave:
        main(["--help"])
    assert leave.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_commands_of_the_policy_lab_are_installed() -> None:
    project = tomllib.loads((tree.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["entry-points"][GROUP]
    found = {entry.name: entry.value for entry in entry_points(group=GROUP)}
    assert wanted.items() <= found.items(), "run: make, or: pip install -e '.[dev]'"
    assert not set(wanted) & set(OWN)


def test_a_package_adds_a_command(add: Add, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "made_a/__init__.py": "import nowhere",
        "made_a/cli/hello.py": HELLO,
        "made_b.py": HELLO,
    }
    add("greeter", files, hello="made_b", never="made_a.cli.hello")
    shown = help_text(capsys)
    assert "hello Greet somebody, 100% of the time. (of greeter)" in shown
    assert "never Greet somebody" in shown and "generate Complete prompts" in shown
    assert not [name for name in sys.modules if name.startswith("made_")]  # not for its help
    assert main(["hello", "you", "--count", "2"]) == 7
    assert capsys.readouterr().out == "hello you hello you\n"
    with pytest.raises(SystemExit):
        main(["hello", "you", "--cuont", "2"])
    assert "did you mean '--count'?" in capsys.readouterr().err


def test_an_object_may_be_a_command(add: Add, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "class Hello:\n    def add_arguments(self, parser): pass\n"
        "    def run(self, parsed): return 3\nhello = Hello()\n"
    )
    add("greeter", {"made_c.py": text}, hello="made_c:hello")
    assert "hello (of greeter)" in help_text(capsys)
    assert main(["hello"]) == 3


@pytest.mark.parametrize(
    ("files", "place", "in_help", "why"),
    [
        ({}, "made_d", "cannot be loaded: ModuleNotFoundError: No module named 'made_d'", "made_d"),
        ({"made_d.py": "1 +"}, "made_d", "cannot be loaded: SyntaxError", "SyntaxError"),
        ({"made_d.py": '"""Says."""\nimport nowhere'}, "made_d", "Says.", "named 'nowhere'"),
        ({"made_d.py": '"""Says."""\nraise OSError(5)'}, "made_d", "Says.", "OSError: 5"),
        (
            {"made_d.py": '"""Says."""'},
            "made_d",
            "Says.",
            "made_d needs a function 'add_arguments'",
        ),
        ({"made_d.py": '"""Says."""'}, "made_d:it", "(of greeter)", "has no attribute 'it'"),
        ({"made_d.py": '"""Says."""'}, "not a place", "cannot be loaded: ", "cannot be loaded: "),
    ],
)
def test_a_command_that_cannot_be_loaded_hurts_no_other(
    files: dict[str, str],
    place: str,
    in_help: str,
    why: str,
    add: Add,
    capsys: pytest.CaptureFixture[str],
) -> None:
    add("greeter", files, hello=place)
    shown = help_text(capsys)
    assert f"hello {in_help}" in shown and "(of greeter)" in shown and "generate" in shown
    assert main(["hello"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line.startswith("metronome: error: command 'hello' of greeter cannot be ") and why in line
    )
    for command in ("generate", "workload"):
        with pytest.raises(SystemExit) as leave:
            main([command, "--help"])
        assert leave.value.code == 0
    assert main(["workload", "--list"]) == 0


def test_of_two_packages_the_first_has_the_command(
    add: Add, capsys: pytest.CaptureFixture[str]
) -> None:
    add("second", {"made_e.py": HELLO}, hello="made_e", generate="made_e")
    add("first", {"made_f.py": HELLO.replace("hello", "good day")}, hello="made_f")
    warning = (
        "metronome: warning: command {!r} of second is ignored, because {} has a command with this "
        "name"
    )
    assert main(["hello", "you"]) == 7
    printed = capsys.readouterr()
    assert printed.out == "good day you\n"
    assert printed.err.splitlines() == [warning.format("hello", "first")]
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = capsys.readouterr().err.splitlines()
    assert sorted(lines) == [
        warning.format("generate", "metronome-engine"),
        warning.format("hello", "first"),
    ]
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    assert "Complete prompts" in capsys.readouterr().out


def test_a_checkout_that_has_to_be_installed_again_says_so(
    add: Add, capsys: pytest.CaptureFixture[str]
) -> None:
    add("metronome_engine", {})  # as it was before there were commands in the group
    with pytest.raises(SystemExit):
        main(["simulate"])
    warning, error = capsys.readouterr().err.splitlines()
    assert "the commands of the policy lab are missing" in warning
    assert "pip install -e ." in warning and "unknown command 'simulate'" in error

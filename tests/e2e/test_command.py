"""The command ``metronome`` as a user runs it, with the model in the box."""

import json
import re
import subprocess
import sys

import pytest

from engine.assets import BOX_MODEL
from engine.cli.main import main

MODEL = ("--model", str(BOX_MODEL))


def test_generate_ends_with_a_line_of_figures(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--max-tokens", "12", "--num-threads", "1")
    assert main(["generate", *MODEL, *options, "A list comprehension"]) == 0
    done = capsys.readouterr()
    assert done.out.startswith("A list comprehension") and done.err == ""
    figures = done.out.splitlines()[-1]
    assert re.fullmatch(
        r"\[\d+ prompt tokens, 12 output tokens, [\d.]+ tokens/s, first token after \d+ ms\]",
        figures,
    )


def test_startup_is_measured_in_fresh_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "startup", "--num-iters", "1", "--num-threads", "1", "--json"]) == 0
    seconds = json.loads(capsys.readouterr().out)
    phases = [seconds[f"{name}_seconds"] for name in ("import", "first_token", "process")]
    assert 0 < phases[0] < phases[1] < phases[2]


def test_a_reader_that_has_had_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "engine.cli.main", "generate", *MODEL, "--max-tokens", "50"]
    command.append("Hello")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None and running.stderr is not None
        assert running.stdout.read(1) == b"H"
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait() == 141

"""The command ``metronome`` as a user runs it: a fresh process, the model in the box."""

import json
import re
import subprocess
import sys

from engine.assets import BOX_MODEL

MODEL = ("--model", str(BOX_MODEL))


def metronome(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engine.cli.main", *args],
        capture_output=True,
        text=True,
    )


def test_generate_ends_with_a_line_of_figures() -> None:
    done = metronome(
        *("generate", *MODEL, "--max-tokens", "12", "--num-threads", "1", "A list comprehension")
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("A list comprehension") and done.stderr == ""
    figures = done.stdout.splitlines()[-1]
    assert re.fullmatch(
        r"\[\d+ prompt tokens, 12 output tokens, [\d.]+ tokens/s, first token after \d+ ms\]",
        figures,
    )


def test_startup_is_measured_in_fresh_processes() -> None:
    done = metronome("bench", "startup", "--num-iters", "1", "--num-threads", "1", "--json")
    assert done.returncode == 0, done.stderr
    seconds = json.loads(done.stdout)
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

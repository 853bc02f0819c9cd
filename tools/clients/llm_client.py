"""The command `llm`: chat, stream, tool, schema."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cells

FUNCTION = """
def weather(city: str) -> str:
    "The weather in a city"
    return "sunny"
"""
SECONDS = 120


@contextmanager
def home(url: str) -> Iterator[dict[str, str]]:
    """The variables of a user whose `llm` knows the server's model."""
    with tempfile.TemporaryDirectory() as path:
        model = {
            "model_id": cells.NAME,
            "model_name": cells.NAME,
            "api_base": f"{url}/v1",
            "can_stream": True,
            "supports_schema": True,
            "supports_tools": True,
        }
        Path(path, "extra-openai-models.yaml").write_text(json.dumps([model]))
        yield {**os.environ, "LLM_USER_PATH": path}


def prompt(url: str, text: str, *options: str, most: int = 64) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llm", "-m", cells.NAME, "-o", "max_tokens", str(most)]
    with home(url) as variables:
        return subprocess.run(
            [*command, *options, text],
            env=variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )


def output(run: subprocess.CompletedProcess[str]) -> str:
    assert run.returncode == 0, run.stderr
    return run.stdout


def chat(url: str) -> None:
    output(prompt(url, "Hello", "--no-stream", most=8))


def stream(url: str) -> None:
    plain = ("-o", "temperature", "0")
    whole = output(prompt(url, cells.QUESTION, "--no-stream", *plain, most=8))
    assert output(prompt(url, cells.QUESTION, *plain, most=8)) == whole


def tool(url: str) -> None:
    """`llm` cannot demand a call: the request with tools must be answered."""
    for how in ((), ("--no-stream",)):
        output(prompt(url, cells.QUESTION, "--functions", FUNCTION, "--td", *how))


def schema(url: str) -> None:
    for how in ((), ("--no-stream",)):
        text = output(prompt(url, cells.QUESTION, "--schema", json.dumps(cells.PARAMETERS), *how))
        cells.check_city(json.loads(text)["city"])


def error(url: str) -> None:
    run = prompt(url, cells.QUESTION, "-o", "temperature", "1.9", "-o", "top_p", "0.0", most=8)
    assert run.returncode != 0
    cells.check_message(Exception(run.stderr), "top_p")


def cancel(url: str) -> None:
    command = [sys.executable, "-m", "llm", "-m", cells.NAME, "-o", "max_tokens", "1500"]
    with (
        home(url) as variables,
        subprocess.Popen(
            [*command, cells.QUESTION],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as running,
    ):
        assert running.stdout is not None
        running.stdout.read(1)
        running.kill()
    cells.wait_until_idle(url)


if __name__ == "__main__":
    cells.run(
        {"chat": chat, "stream": stream, "tool": tool, "schema": schema, "error": error,
         "cancel": cancel}
    )  # fmt: skip

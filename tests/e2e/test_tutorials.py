"""The tutorials run as they are: each block in its order, in one directory.

A block of ``metronome serve`` runs until the next one. Python blocks that define a policy become
``mine.py``; others that follow each other are one program. A command that the page shows failing is
in ``FAILS``.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path

import pytest
from support.served import Served, free_port, until_it_ends
from support.source_tree import ROOT

from engine.assets import BOX_MODEL

pytest.importorskip("openai")
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
ADDRESS = "127.0.0.1:8000"
INSTALLS = "make run"
FAILS = "metronome verify"
SLOW = (FAILS, "sarathi(")
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def blocks_of(page: str) -> list[tuple[str, str]]:
    """Language and text of each block that can be run."""
    found = BLOCK.findall((ROOT / "docs" / f"tutorial-{page}.md").read_text(encoding="utf-8"))
    return [(kind, text) for kind, text in found if kind in ("sh", "python")]


class Reader:
    """A reader who runs what a page shows."""

    def __init__(self, place: Path, stack: ExitStack) -> None:
        self._place = place
        self._stack = stack
        self._port = free_port()
        tools = place / "bin"
        tools.mkdir()
        command = tools / "metronome"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m engine.cli.main "$@"\n')
        command.chmod(0o755)
        self._variables = {
            **os.environ,
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(place), os.environ["PYTHONPATH"]]),
        }

    def run(self, command: list[str], text: str) -> str:
        """The output. Fails unless the exit status is that which the page expects."""
        done = subprocess.run(
            [*command, text.replace(ADDRESS, f"127.0.0.1:{self._port}")],
            cwd=self._place,
            env=self._variables,
            capture_output=True,
            text=True,
            check=False,
        )
        expected = 1 if FAILS in text else 0
        assert done.returncode == expected, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def serve(self, text: str) -> None:
        self._stack.close()
        self._port = free_port()
        options = shlex.split(text.strip().removeprefix("metronome serve"))
        command = ["metronome", "serve", "--port", str(self._port), *options]
        model = ["--model", str(BOX_MODEL), "--num-threads", "1"]
        process = subprocess.Popen([*command, *model], cwd=self._place, env=self._variables)
        self._stack.enter_context(running(process, self._port))

    def save(self, text: str) -> None:
        (self._place / "mine.py").write_text(text)


@contextmanager
def running(process: subprocess.Popen[bytes], port: int) -> Iterator[Served]:
    yield from until_it_ends(Served(process, port))


def kind_of(block: tuple[str, str]) -> str:
    language, text = block
    if language == "sh":
        return "serve" if text.startswith("metronome serve") else "sh"
    return "policy" if re.search(r"^class \w+\(Policy\)", text, re.MULTILINE) else "python"


def follow(page: str, place: Path, *, is_short: bool) -> str:
    """Run all that a page shows. is_short: without commands that take long, and with simulations of
    fewer requests. Returns what it printed."""
    printed = ""
    with ExitStack() as stack:
        reader = Reader(place, stack)
        for kind, group in groupby(blocks_of(page), kind_of):
            texts = [text for _, text in group]
            for text in ["\n".join(texts)] if kind == "python" else texts:
                if INSTALLS in text or (is_short and any(slow in text for slow in SLOW)):
                    continue
                if is_short:
                    text = text.replace("--load 0.95", "--load 0.95 --requests 200")
                if kind == "serve":
                    reader.serve(text)
                elif kind == "policy":
                    reader.save(text)
                else:
                    text = text.replace("LLM(", f"LLM({str(BOX_MODEL)!r}, num_threads=1, ")
                    command = ["bash", "-ec"] if kind == "sh" else [sys.executable, "-c"]
                    printed += reader.run(command, text)
    return printed


def test_an_application(tmp_path: Path) -> None:
    printed = follow("application", tmp_path, is_short=True)
    assert '"finish_reason"' in printed  # by curl
    assert re.search(r"^(London|Paris)$", printed, re.MULTILINE)
    assert '"id":"first","state":"ended"' in printed  # by curl, after the streamed answer
    assert re.search(r"^weather \{'age': -?\d+, 'city': ", printed, re.MULTILINE)


def test_an_operator(tmp_path: Path) -> None:
    printed = follow("operator", tmp_path, is_short=True)
    assert '"id":"small"' in printed and "the API key is missing" in printed
    assert 'metronome_wait_seconds_total{cause="seats"' in printed
    assert '"status":"paused"' in printed and '"status":"resumed"' in printed


def test_a_researcher(tmp_path: Path) -> None:
    printed = follow("researcher", tmp_path, is_short=True)
    assert printed.count("mine.ShortestFirst") > 1
    assert (tmp_path / "steps.log").is_file()


@pytest.mark.slow
def test_a_researcher_at_full_length(tmp_path: Path) -> None:
    printed = follow("researcher", tmp_path, is_short=False)
    assert "a request was not served in 1000 steps" in printed

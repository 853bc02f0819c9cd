"""schemathesis over the document of a running server, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import NamedTuple


class Fuzzed(NamedTuple):
    """What it found."""

    status: int
    num_cases: int
    said: str


def fuzz(url: str, *, examples: int, seed: int, seconds: float, key: str = "") -> Fuzzed:
    """Requests that follow the document and requests that do not. Status 0: each was answered as
    the document says, none of them by an error of the server."""
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json",
        "--max-examples", str(examples), "--seed", str(seed), "--generation-database", "none",
        "--phases", "examples,coverage,fuzzing", "--request-timeout", "30", "--no-color",
        # What fits its types may still be refused: a number out of its range, names that clash.
        "--exclude-checks", "positive_data_acceptance",
        *(["-H", f"Authorization: Bearer {key}"] if key else []),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    said = done.stdout + done.stderr
    found = re.search(r"(\d+) generated", said)
    return Fuzzed(done.returncode, int(found[1]) if found else 0, said)

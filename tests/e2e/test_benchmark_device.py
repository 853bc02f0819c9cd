"""The benchmark of a GPU goes through all its sections where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ["decode", "prefill", "launches", "sampler", "pieces", "products"]
KINDS = ["windows", "quantised", "experts", "drafts", "grammars", "states"]
SECTIONS = ["ceilings", *MEASURED, "tiny", *KINDS]


@pytest.mark.slow
def test_dry_run_goes_through_every_section(tmp_path: Path) -> None:
    where = tmp_path / "device.json"
    interpreted = [sys.executable, "-m", "support.triton_interpreter", "benchmarks/device.py"]
    done = subprocess.run(
        [*interpreted, "--dry-run", "--json", str(where)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT / "tests"),
            "TRITON_INTERPRET": "1",
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads(where.read_text())
    assert list(found["sections"]) == SECTIONS
    for name, section in found["sections"].items():
        assert section["ended"] == "done" and section["rows"], name
    steps = [row["what"] for row in found["sections"]["tiny"]["rows"]]
    assert steps[:3] == ["start", "one request alone", "256 of 100 to 1024, seed 0"]
    assert {"step, graphs", "step, call by call"} <= set(steps)

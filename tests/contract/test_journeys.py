"""How many files one must have open to follow a journey; see `tools/journeys.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
AT_FA18182 = {"step": 34, "abort": 37, "generate": 71}  # the same script, for comparison
MOST = {"step": 17, "abort": 20, "generate": 40}  # 12, 12 and 40 are asked, or 0.55 of those above


@pytest.fixture(scope="module")
def journeys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    kept = tmp_path_factory.mktemp("journeys") / "files.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "journeys.py"), "--json", str(kept)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(kept.read_text())


@pytest.mark.parametrize("name", MOST)
def test_journeys_pass_through_no_more_files(journeys: dict[str, list[str]], name: str) -> None:
    files = journeys[name]
    assert files, "nothing was noted"
    told = f"{len(files)} files, {AT_FA18182[name]} at fa18182:\n" + "\n".join(files)
    assert len(files) <= MOST[name], told

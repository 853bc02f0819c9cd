"""The benchmark of a GPU goes through all its sections where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu.attention import PROMPTS
from gpu.box import Box, Ceilings
from gpu.engines import decode_seconds, floor_of, headline, step_floor
from gpu.expected import expected
from gpu.report import Report, Section
from shapes import SHAPES

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ["decode", "prefill", "launches", "sampler", "pieces", "products"]
SECTIONS = ["correctness", "ceilings", *MEASURED, "tiny"]


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
    assert all(row["ok"] for row in found["sections"]["correctness"]["rows"])
    steps = [row["what"] for row in found["sections"]["tiny"]["rows"]]
    assert steps[:3] == ["start", "one request alone", "256 of 100 to 1024, seed 0"]
    assert {"step, graphs", "step, call by call"} <= set(steps)


def test_a_row_stands_beside_its_estimate() -> None:
    """Every row of attention that is measured has one, on a card that is known."""
    for model in ("qwen3-0.6b", "llama-3.1-8b"):
        for label in PROMPTS:
            row = {"model": model, "prompts": label, "us": 1.0}
            assert expected("NVIDIA H200", "prefill", row)["expected us"] > 0
        decode = {"model": model, "batch": 64, "context": 100_000, "cache": "bfloat16"}
        assert expected("NVIDIA H100 80GB HBM3", "decode", decode)["expected us"] > 0
        step = {"what": "step, graphs", "requests": 64}
        assert expected("NVIDIA H100 80GB HBM3", model, step)["expected ms"] > 0
    assert not expected("NVIDIA L4", "decode", decode)
    assert not expected("NVIDIA H200", "decode", decode | {"cache": "float8_e4m3fn"})


def test_headline_is_the_published_workload() -> None:
    loads = headline()
    assert (len(loads), sum(load.num_new for load in loads)) == (256, 133_966)
    most = Ceilings(4.3e12, 790e12)
    # As worked out by hand from the formulas: 3.7 and 10.1 seconds.
    assert floor_of(SHAPES["qwen3-0.6b"], loads, most) == pytest.approx(3.70, rel=0.03)
    assert floor_of(SHAPES["llama-3.1-8b"], loads, most) == pytest.approx(10.1, rel=0.03)


def test_a_step_takes_at_least_its_weights_and_keys() -> None:
    shape, most = SHAPES["llama-3.1-8b"], Ceilings(4.3e12, 790e12)
    assert 1e3 * step_floor(shape, 1, 1024, most) == pytest.approx(3.52, rel=0.01)
    assert 1e3 * step_floor(shape, 256, 256 * 1024, most) == pytest.approx(12.9, rel=0.01)


def test_a_step_counts_where_all_got_a_token() -> None:
    marks = [(0.0, 0), (5.0, 1), (6.0, 3), (7.0, 5), (9.0, 7), (9.5, 8)]
    assert decode_seconds(marks, 2) == 1.0


def test_what_was_found_is_kept_when_a_section_fails_or_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "found.json"

    def rows(box: Box):
        yield {"what": 1}
        assert json.loads(path.read_text())["sections"]["cut"]["rows"] == [{"what": 1}]
        yield {"what": 2}

    def broken(box: Box):
        yield {"what": 1}
        raise RuntimeError("no memory")

    report = Report(path, {})
    box = Box(is_dry=True)
    report.run([Section("cut", -1.0, rows), Section("broken", 9.0, broken)], box, 60.0)
    report.run([Section("late", 9.0, rows)], box, -1.0)
    sections = json.loads(path.read_text())["sections"]
    assert {name: s["ended"] for name, s in sections.items()} == {
        "cut": "cut off",
        "broken": "RuntimeError: no memory",
        "late": "skipped",
    }
    assert sections["cut"]["rows"] == sections["broken"]["rows"] == [{"what": 1}]
    assert not report.is_sound


def test_a_wrong_result_is_not_sound(tmp_path: Path) -> None:
    report = Report(tmp_path / "found.json", {})
    report.run([Section("s", 9.0, lambda box: iter([{"ok": False}]))], Box(is_dry=True), 9.0)
    assert not report.is_sound

"""Images of a run's plots: matplotlib looks for fonts with a child process at its first use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support import source_tree as tree

from engine.cli.main import main
from policylab.sim.promises import slo
from policylab.sim.report import charts_of, read_report, write_plots
from policylab.sim.run import Engine, Run, run

SIZE = ("--requests", "60", "--rate", "12", "--num-kv-blocks", "250")


@pytest.fixture(scope="module")
def simulated() -> Run:
    engine = Engine(num_blocks=250, max_num_seqs=16)
    workload = "log-uniform(num_requests=60,num_users=3)"
    return run("fcfs", workload, engine, rate=12.0, steps=True)


def test_images_are_drawn_where_matplotlib_is_installed(simulated: Run, tmp_path: Path) -> None:
    charts = charts_of([simulated], slo=slo("ttft<0.2,e2e<2"))
    assert write_plots(tmp_path, charts) == []
    for chart in charts:
        assert (tmp_path / f"{chart.key}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "command",
    [
        ("simulate",),
        pytest.param(("policies",), marks=pytest.mark.slow),
        pytest.param(("compare", "fcfs", "lpm", "--seeds", "2"), marks=pytest.mark.slow),
    ],
    ids=lambda command: command[0],
)
def test_commands_write_a_report_and_its_plots(
    command: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.html"
    asked = ["--report", str(out), "--plots", str(tmp_path / "plots")]
    if command[0] == "simulate":
        asked += ["--trace", str(tmp_path / "trace.json")]
    assert main([*command, *SIZE, *asked]) == 0
    assert f"report: {out}" in capsys.readouterr().out
    shown = read_report(out)["runs"]
    assert len(shown) == (1 if command[0] == "simulate" else 2) and shown[0]["steps"]
    assert (tmp_path / "plots" / "cdf-ttft.csv").is_file()
    assert (tmp_path / "plots" / "cdf-ttft.png").is_file()
    assert (tmp_path / "trace.json").is_file() is (command[0] == "simulate")


@pytest.mark.parametrize("has_room", [True, False], ids=["a temporary directory", "no directory"])
def test_a_home_that_cannot_be_written_costs_images_at_most(has_room: bool, tmp_path: Path) -> None:
    """matplotlib keeps its list of fonts at home or, failing that, in a temporary directory."""
    no_directory = tmp_path / "file"
    no_directory.touch()
    room = tmp_path if has_room else no_directory
    # The last place that tempfile tries is the working directory, which root may always write.
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, sys, tempfile\n"
            f"tempfile._candidate_tempdir_list = lambda: [{str(room)!r}]\n"
            "from engine.cli.main import main\n"
            "sys.exit(main(sys.argv[1:]))",
            *("simulate", *SIZE, "--plots", str(tmp_path / "plots")),
        ],
        env={**os.environ, "MPLCONFIGDIR": str(no_directory / "x"), "HOME": str(no_directory)},
        cwd=tree.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "plots" / "cdf-ttft.svg").is_file()
    assert (tmp_path / "plots" / "cdf-ttft.csv").is_file()
    assert (tmp_path / "plots" / "cdf-ttft.png").is_file() is has_room
    assert ("no PNG files were written: " in done.stdout) is not has_room

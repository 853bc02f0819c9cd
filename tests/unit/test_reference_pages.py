"""Pages for researchers name all figures, and their files work as they are shown."""

from __future__ import annotations

import json
import re
from pathlib import Path

from policylab.sim.figures import KINDS, LATENCIES, NAMES
from policylab.sim.run import run
from policylab.sim.workloads import find_workload
from policylab.sim.workloads.jsonl import JsonLine

INTERNALS = Path(__file__).parents[2] / "docs" / "internals"


def test_the_page_of_figures_has_them_all() -> None:
    page = (INTERNALS / "figures.md").read_text(encoding="utf-8")
    for name in {*KINDS, *NAMES} - {*LATENCIES}:
        assert f"`{name}`" in page, name


def test_own_traces_work_as_they_are_shown(tmp_path: Path) -> None:
    page = (INTERNALS / "workloads.md").read_text(encoding="utf-8")
    table, lines = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    (tmp_path / "mine.csv").write_text(table)
    made = run("fcfs", find_workload(str(tmp_path / "mine.csv")))
    assert made.requests.counts("num_output").tolist() == [120, 300]
    (tmp_path / "mine.jsonl").write_text(lines)
    [job] = find_workload(str(tmp_path / "mine.jsonl")).source(0)
    assert (job.num_prompt, job.num_output, job.user, job.deadline) == (67, 120, "ann", 30.0)
    assert json.loads(lines.splitlines()[1]).keys() == {*JsonLine.__struct_fields__}
    assert run("fcfs", find_workload(str(tmp_path / "mine.jsonl"))).requests.done.all()

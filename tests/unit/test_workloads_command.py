"""``metronome workload``: what a workload is like, and its file."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from engine.cli.main import main
from policylab.sim.workloads import WORKLOADS
from policylab.sim.workloads.arrivals import ARRIVALS


def told(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["workload", *args]) == 0
    return capsys.readouterr().out


def test_a_workload_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("azure-conv(num_requests=2000,users='ann(share=3),bob')", "--seed", "3")
    text = told(capsys, *asked)
    lines = text.splitlines()
    assert lines[0].startswith("azure-conv(") and lines[0].endswith(", seed 3")
    assert lines[1].startswith("2000 requests in ") and "gaps: CV 1." in lines[2]
    head = next(line for line in lines if line.startswith("tokens"))
    assert head.split() == [
        "tokens",
        "mean",
        *["P5", "P25", "P50", "P75", "P90", "P95", "P99", "longest"],
    ]
    ann = next(line.split() for line in lines if line.startswith("ann"))
    assert 1350 < int(ann[1]) < 1650
    assert (
        told(capsys, "azure-conv(num_requests=2000,users='ann(share=3),bob')", "--seed", "3")
        == text
    )


def test_followers_and_many_users(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "conversations(num_requests=200,num_users=30)")
    assert "some requests follow others" in text and "programs: " in text and " more  " in text
    assert "all at once" in told(capsys, "arxiv(num_requests=5)", "--rate", "inf")


def test_a_workload_is_written_and_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "requests.jsonl"
    asked = ("mooncake-conv(num_requests=100)", "--rate", "2", "--block-size", "512")
    first = told(capsys, *asked, "--out", str(path))
    again = told(capsys, f"jsonl(path={str(path)!r})", "--block-size", "512")
    assert first.splitlines()[1:] == again.splitlines()[1:]
    assert "in blocks of 512" in first and len(path.read_text().splitlines()) == 101


def test_all_kinds_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "--list")
    assert all(f"\n{name} " in f"\n{text}" for name in WORKLOADS)
    assert "arrivals='poisson'" in text and "\nall of them" in text


def test_the_page_names_all_kinds_and_options() -> None:
    path = Path(__file__).parents[2] / "docs" / "internals" / "workloads.md"
    page = path.read_text(encoding="utf-8")
    for name, kind in WORKLOADS.items():
        assert f"\n| `{name}` |" in page
        assert all(f"`{option.name}`" in page for option in fields(kind))
    assert all(f"| `{name}" in page for name in ARRIVALS)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no workload is named"),
        (["arxive"], "did you mean 'arxiv'"),
        (["arxiv", "--rate", "0"], "--rate is 0, must be above 0"),
        (["arxiv", "--block-size", "0"], "--block-size is 0, must be 1 or more"),
        (["arxiv", "--out", "no/such/folder"], "no/such/folder cannot be written"),
    ],
)
def test_mistakes_are_named(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["workload", *args]) == 2
    assert message in capsys.readouterr().err

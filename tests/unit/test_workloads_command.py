"""``metronome workload``: what a workload is like, and its file."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from engine.cli.main import main
from policylab.sim.workloads import WORKLOADS, find_workload
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
    assert "num_users=4" in text.partition("log-uniform ")[2].partition("mooncake")[0]


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
        (["no.log"], "workload 'no.log' is neither a known name nor a file"),
        (["log-uniform(max_tokens='shortest')"], "must be 'longest' (longest output"),
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


def test_a_file_is_a_workload_by_its_first_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.csv"
    mine.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,9,3\n1.5,20,7\n")
    assert main(["workload", str(mine), "--out", str(tmp_path / "mine.jsonl")]) == 0
    assert "vidur-csv(path=" in capsys.readouterr().out
    assert main(["workload", str(tmp_path / "mine.jsonl")]) == 0
    assert "2 requests in 1.5 s" in capsys.readouterr().out
    assert main(["simulate", "--workload", str(mine)]) == 0
    assert "2 requests, 2 done" in capsys.readouterr().out
    mine.write_text("prompt,output\n9,3\n")
    for command in (["workload"], ["simulate", "--workload"]):
        assert main([*command, str(mine)]) == 2
        said = capsys.readouterr().err
        assert "its first line, 'prompt,output', is that of no known format" in said
        for head in said.partition("first lines that work are: ")[2].split("; "):
            works = tmp_path / "works"
            works.write_text(head.rpartition(" (")[0] + "\n")
            assert main(["workload", str(works)]) == 2
            assert "contains no request" in capsys.readouterr().err


def test_max_tokens_may_be_the_length_of_each_request(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    assert (
        main(["workload", "log-uniform(num_requests=9,max_tokens='own')", "--out", str(path)]) == 0
    )
    for workload in (
        find_workload("log-uniform", num_requests=9, max_tokens="own"),
        find_workload(str(path)),
    ):
        for job in workload.source(0):
            assert job.request(workload.max_output).max_tokens == job.num_output
    longest = find_workload("log-uniform", num_requests=9)
    assert {job.request(512).max_tokens for job in longest.source(0)} == {512}

"""``metronome simulate``: one run, its figures and its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.cli.main import main
from policylab.cli import lab
from policylab.sim.figures import NAMES
from policylab.sim.run import Run

FEW = ("--requests", "60")


def told(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["simulate", *args]) == 0
    said = capsys.readouterr()
    assert not said.err
    return said.out


def mistake(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line that is said of it."""
    assert main(["simulate", *args]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1
    return said.err.removeprefix("metronome: error: ").strip()


def test_the_same_seed_writes_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def written(name: str, *args: str) -> bytes:
        asked = ("--policy", "vtc", *FEW, "--rate", "12", *args)
        told(capsys, *asked, "--out", str(tmp_path / name))
        return (tmp_path / name).read_bytes()

    first = written("a", "--seed", "5")
    assert written("b", "--seed", "5") == first
    assert written("c", "--seed", "6") != first
    assert b"hook" not in first
    with_steps = written("d", "--seed", "5", "--steps")
    assert with_steps == written("e", "--seed", "5", "--steps")
    assert b'"step"' in with_steps and b'"step"' not in first


def test_a_file_tells_what_the_run_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "run.jsonl")
    told_then = told(capsys, "--workload", "two-users", *FEW, "--rate", "5", "--out", path)
    assert told_then.endswith(f"\nwritten to {path}\n")
    told_later = told(capsys, "--read", path)
    assert told_then.startswith(told_later.rstrip())
    kept = told(capsys, "--read", path, "--slo", "ttft<1000")
    assert "(100.0 %), goodput" in kept and "goodput" not in told_later


def test_what_is_said_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "--policy", "residual-sjf", *FEW, "--rate", "5").splitlines()
    assert lines[0] == "residual-sjf on log-uniform(num_requests=60), seed 0, 5 per second"
    assert lines[1].startswith("60 requests, 60 done; ") and "are warm-up" in lines[1]
    assert lines[3].split() == ["seconds", "mean", "p50", "p90", "p99"]
    rows = ["ttft", "tpot", "itl", "e2e", "normalised", "delay", "slowdown"]
    assert [line.split()[0] for line in lines[4:11]] == rows


def test_figures_are_told_to_other_programs(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (*FEW, "--rate", "12", "--json")
    found = json.loads(told(capsys, *asked))
    assert set(found["figures"]) == set(NAMES)
    assert found["run"]["seed"] == 0 and found["outcomes"] == {"done": 60}
    low, high = found["intervals"]["ttft.mean"]
    assert low < found["figures"]["ttft.mean"] < high
    assert found == json.loads(told(capsys, *asked))


def test_a_run_that_is_overloaded_or_all_at_once_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    over = told(capsys, "--requests", "200", "--load", "2")
    assert "overloaded: its queue grows to the end, so there are no means" in over
    assert "ttft" not in over
    assert "all arrived at once, and all count" in told(capsys, *FEW, "--rate", "inf")


def test_a_workload_comes_at_its_own_rate_if_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    told(capsys, "--workload", "azure-conv(scale=0.1)", *FEW, "--rate", "own", "--out", str(path))
    assert Run.read(path).head["rate"] == pytest.approx(5.53, rel=0.01)


def test_a_file_that_is_too_fast_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.csv"
    lines = [f"{number / 20},800,100" for number in range(70)]  # too few to see a queue grow
    path.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *lines]))
    over = told(capsys, "--workload", str(path))
    assert "(fcfs can serve " in over and "times as fast as fcfs can serve them" in over
    assert "times as fast" not in told(capsys, "--workload", str(path), "--whole")
    for command in (["policies", "--policies"], ["compare", "--seeds", "2"]):
        assert main([*command, "fcfs", "--workload", str(path)]) == 0
        assert "20.00 requests per second; fcfs can serve " in capsys.readouterr().out
    assert "times as fast" not in told(capsys, "--workload", f"vidur-csv(path='{path}',speed=0.1)")


def test_long_comparisons_say_how_far_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = iter([0.0, 4.0, 12.0, 15.0, 40.0])
    progress = lab.Progress(lambda: next(seconds))
    for number in range(1, 5):
        progress(number, 4)
    assert capsys.readouterr().err == "2 of 4 settings and seeds; about 12 s left\n"


def damaged(tmp_path: Path, text: str) -> str:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is incomplete: its head or its end is missing"),
        ("not json\n", "is not a run file"),
        ('{"run":{"format":1}}\n', "is incomplete: its head or its end is missing"),
        ('{"run":{"format":99}}\n{"totals":{}}\n', "has format 99; this version reads format 1"),
        ('{"run":{"format":1}}\n{"gap":[1]}\n{"totals":{}}\n', "is not a run file"),
        ('{"run":{"format":1}}\n{"totals":{}}\n', "is not a run file"),
    ],
)
def test_a_file_that_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    line = mistake(capsys, "--read", damaged(tmp_path, text))
    assert "bad.jsonl" in line and said in line


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--policy", "fcsf"], "fcsf"),
        (["--policy", "edf(default_deadline)"], "--policy has 'edf(default_deadline)', must be"),
        (["--load", "0.5", "--rate", "3"], "--load and --rate both set"),
        (["--load", "0"], "load is 0.0, must be above 0"),
        (["--rate", "fast"], "--rate is 'fast', must be a number above 0 or 'own'"),
        (["--read", "no.jsonl"], "no.jsonl cannot be read"),
        (["--out", "no/where.jsonl"], "--out 'no/where.jsonl': create its directory first"),
        (["--slo", "fast"], "--slo has 'fast', must be as in ttft<1,tpot<0.1"),
        (["--slo", "ttft>1"], "--slo has 'ttft>1', must be a limit of one of"),
        (["--workload", "log-uniform(users=5)"], "users"),
        (["--length-predictor", "no.such.Thing"], "no.such"),
        (["--profile", "llama-8b@toaster"], "toaster"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in mistake(capsys, *FEW, *args)


WINDOWS = ("--kv-groups", "0,64*3", "--shared-prefix", "50")


def test_a_model_with_windows_says_which_groups_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    args = ("--rate", "5", *FEW, "--num-kv-blocks", "400", "--seed", "3")
    lines = told(capsys, *args, *WINDOWS, "--out", str(path)).splitlines()
    [groups] = [line for line in lines if line.startswith("KV blocks in use at most: ")]
    assert "full attention: " in groups and "window of 64 tokens (3 groups): " in groups
    found = json.loads(told(capsys, "--read", str(path), "--json"))
    assert found["run"]["engine"]["kv_groups"] == [0, 64, 64, 64]
    assert [group["window"] for group in found["kv_groups"]] == [0, 64, 64, 64]
    assert 0 < found["kv_groups"][1]["peak_blocks"] < found["kv_groups"][0]["peak_blocks"] < 400
    assert sum(found["prefix_missed"].values()) > 0
    again = told(capsys, *args, "--kv-groups", str(path), "--shared-prefix", "50")
    assert groups in again.splitlines()
    assert "KV blocks in use" not in told(capsys, *args)


def test_groups_are_read_from_the_configuration_of_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "model_type": "gemma3_text", "num_hidden_layers": 12, "hidden_size": 64, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 32,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    block = 2 * 2 * 16 * 2 * 16 * 2  # bytes of two layers' keys and values of 16 tokens
    for path in (tmp_path, tmp_path / "config.json"):
        args = ("--rate", "5", *FEW, "--kv-groups", str(path), "--max-model-len", "2000")
        memory = ("--kv-cache-memory-bytes", str(1000 * block + 5))
        found = json.loads(told(capsys, *args, *memory, "--json"))
        assert found["run"]["engine"]["kv_groups"] == [0, 32, 32, 32, 32, 32]
        assert found["run"]["engine"]["num_blocks"] == 1000


def test_what_is_wrong_with_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "'0,x', must be the path of" in mistake(capsys, "--kv-groups", "0,x")
    assert "must have 1 to 256" in mistake(capsys, "--kv-groups", "7*300")
    assert "needs the size of a block" in mistake(capsys, "--kv-cache-memory-bytes", "7")
    both = ("--kv-cache-memory-bytes", "7", "--num-kv-blocks", "7")
    assert "both set the size of the KV pool" in mistake(capsys, *both)
    (tmp_path / "config.json").write_text("{}")
    assert "is not the config.json of a model" in mistake(capsys, "--kv-groups", str(tmp_path))
    real = ("--real", "--rate", "5", "--kv-groups", "0,8")
    assert "need a simulated run" in mistake(capsys, *real)


def test_prefill_and_decode_cores_are_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = (*FEW, "--rate", "20", "--prefill", "1", "--decode", "1")
    path = str(tmp_path / "run.jsonl")
    link = ("--kv-link", "tcp(load=1e-4, latency=1e-3)")
    then = told(capsys, *args, *link, "--out", path)
    assert "60 done" in then and "prefill apart.sent" in then and "kv link.blocks" in then
    assert then.startswith(told(capsys, "--read", path).rstrip())
    assert "prefill apart" not in told(capsys, *FEW, "--rate", "20", "--data-parallel-size", "2")
    assert "set both to 1 or more" in mistake(capsys, *FEW, "--prefill", "1")
    assert "has no option 'speed'" in mistake(capsys, *args, "--kv-link", "tcp(speed=1)")
    assert "steps are kept of one core" in mistake(capsys, *args, "--steps")
    assert "need a simulated run; leave --real out" in mistake(capsys, *args, "--real")

"""Simulations of models with recurrent states compare snapshot policies."""

from __future__ import annotations

from math import isnan

import pytest

from engine.cli.main import main
from engine.errors import ConfigError
from engine.states.policies import ByCost
from policylab.sim.figures import figures
from policylab.sim.run import Engine, Run, run

LFM2, QWEN3_NEXT, MAMBA2 = 1, 191, 512  # blocks of a snapshot
CHATS = "conversations(turns=8, num_requests={})"
AGENTS = "agents(num_requests={})"
RATE = 2.0  # requests per second


def simulated(workload: str, num_blocks: int, snapshot_blocks: int, policy="cost") -> Run:
    engine = Engine(num_blocks=num_blocks, snapshot_blocks=snapshot_blocks, snapshot_policy=policy)
    return run("fcfs", workload, engine, rate=RATE)


def test_figures_compare_with_a_model_without_states():
    found = figures(simulated(CHATS.format(40), 200, LFM2)).values()
    assert found["prompt_tokens"] > 0 and 1.0 <= found["prompt_tokens.dense"] < 1.5
    assert 0.0 < found["snapshot_peak"] < 0.15
    dense = figures(simulated(CHATS.format(40), 200, 0)).values()
    assert dense["prompt_tokens"] == found["prompt_tokens"] / found["prompt_tokens.dense"]
    assert isnan(dense["prompt_tokens.dense"]) and isnan(dense["snapshot_peak"])


def test_figures_survive_a_file(tmp_path):
    made = simulated(CHATS.format(20), 200, LFM2)
    made.write(tmp_path / "run.jsonl")
    assert figures(Run.read(tmp_path / "run.jsonl")).values() == pytest.approx(
        figures(made).values(), nan_ok=True
    )


def test_commands_take_snapshot_policies(capsys):
    asked = ["--workload", CHATS.format(6), "--rate", "2", "--snapshot-blocks", "2"]
    assert main(["simulate", *asked, "--snapshot-policy", "marconi(alpha=2)"]) == 0
    shown = capsys.readouterr().out
    assert "x as many as without states; snapshots took at most" in shown
    sweep = ["--sweep", "snapshot_policy=cost,interval(tokens=64)", "--seeds", "1"]
    assert main(["compare", "fcfs", *asked, *sweep]) == 0
    shown = capsys.readouterr().out
    assert "2 blocks a snapshot, policy cost" in shown
    assert shown.count("prompt_tokens.dense") == 2 and "interval(tokens=64)" in shown


class Broken(ByCost):
    def takes(self, req, num_tokens, view):
        return "yes"


def test_a_policy_that_was_replaced_gets_no_figures():
    why = simulated(CHATS.format(10), 200, LFM2, Broken).not_own
    assert "Broken.takes" in why and "switched off" in why


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"snapshot_policy": "marcony"}, "did you mean 'marconi'"),
        ({"snapshot_policy": "marconi(beta=1)"}, "unexpected keyword argument 'beta'"),
        ({"snapshot_policy": "marconi(alpha=-1)"}, "alpha is -1"),
        ({"snapshot_policy": "marconi(1)"}, "--snapshot-policy has 'marconi"),
    ],
)
def test_options_of_snapshot_policies_are_checked(options, error):
    with pytest.raises(ConfigError, match=error):
        run("fcfs", CHATS.format(10), Engine(snapshot_blocks=1, **options), rate=RATE)


@pytest.mark.parametrize("num_blocks", [-1, 700, "all"])
def test_the_size_of_snapshots_is_checked(num_blocks):
    with pytest.raises(ConfigError, match="snapshot_blocks"):
        Engine(num_blocks=700, snapshot_blocks=num_blocks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "num_blocks"),
    [(CHATS, 700), (CHATS, 1500), (CHATS, 3000), (AGENTS, 700), (AGENTS, 1500)],
)
def test_small_snapshots_cost_little(workload, num_blocks):
    """LFM2 computes at most 1.1 times the prompt tokens of a model without states."""
    found = figures(simulated(workload.format(1000), num_blocks, LFM2)).values()
    assert found["prompt_tokens.dense"] <= 1.1
    assert found["snapshot_peak"] <= 0.15


@pytest.mark.slow
@pytest.mark.parametrize(("snapshot_blocks", "num_blocks"), [(QWEN3_NEXT, 6000), (MAMBA2, 16000)])
@pytest.mark.parametrize("workload", [CHATS, AGENTS])
def test_fewer_or_more_large_snapshots_save_nothing(workload, snapshot_blocks, num_blocks):
    size = (workload.format(400), num_blocks, snapshot_blocks)
    numbers = {
        policy: simulated(*size, policy).num_prompt_tokens
        for policy in ("cost(per_request=0.5)", "cost", "cost(per_request=2)")
    }
    assert min(numbers, key=numbers.__getitem__) == "cost", numbers

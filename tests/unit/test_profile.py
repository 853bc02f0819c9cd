"""Profiles of what steps cost: fitted without bias, written, read, drawn from, and asked."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from engine.cli.main import main
from engine.errors import ConfigError
from engine.sched import Policy
from engine.sched.predict.cost import StepShape
from engine.sched.predict.profile import HostCost, Profile, ProfileCost, read_profile
from policylab.sim.calibrate import Sample, calibrate, fit, halves, judge
from policylab.sim.datasheet import from_datasheet
from policylab.sim.run import Engine, run
from policylab.sim.timing import ProfileTiming
from policylab.sim.workloads import find_workload

HOST = HostCost(step=1e-4, sequence=1e-5, request=2e-4, token=1e-6)


def took(shape: StepShape) -> float:
    """A machine on which a token costs more from the 33rd on."""
    tokens = min(shape.num_tokens, 32) * 2e-5 + max(0, shape.num_tokens - 32) * 8e-5
    return 2e-3 + 1e-5 * shape.num_seqs + tokens + 2e-8 * shape.context + 1e-9 * shape.attention


def samples(seed: int, num: int = 2000, unrest: float = 0.1) -> list[Sample]:
    dice = random.Random(seed)
    found = []
    for _ in range(num):
        decodes, prompt = dice.randrange(1, 40), dice.choice([0, 0, 0, dice.randrange(1, 200)])
        context = decodes * dice.randrange(20, 400)
        pairs = context + decodes + prompt * (prompt + 1) // 2
        shape = StepShape(decodes + (prompt > 0), decodes + prompt, decodes, context, pairs, 0.0)
        slow = dice.lognormvariate(0.0, unrest)
        added = dice.choice([0, 0, 1])
        host = HOST.seconds(decodes, added, 50 * added) * dice.lognormvariate(0.0, unrest)
        found.append(
            Sample(shape._replace(seconds=took(shape) * slow), host, decodes, added, 50 * added)
        )
    return found


def test_a_fit_finds_the_machine_behind_its_noise(seed: int) -> None:
    profile = fit(samples(seed), "machine")
    quiet = [s.shape for s in samples(seed + 1, unrest=0.0)]
    wrong = [profile.seconds(shape) / shape.seconds / 1.005 - 1 for shape in quiet]
    assert abs(float(np.mean(wrong))) < 0.01 and float(np.quantile(np.abs(wrong), 0.95)) < 0.04
    assert profile.host.step == pytest.approx(HOST.step, rel=0.25)
    assert profile.host.seconds(20, 1, 50) == pytest.approx(HOST.seconds(20, 1, 50), rel=0.05)
    assert min(profile.coefficients) >= 0.0
    assert np.mean([ratio for _, ratio in profile.noise]) == pytest.approx(1.0, abs=0.02)


def test_steps_that_were_not_fitted_are_predicted_without_bias(seed: int) -> None:
    even, odd = halves(samples(seed, num=8000))
    for regime, judged in judge(fit(even, "machine"), odd).items():
        assert abs(judged.bias) < 0.01, (regime, judged)
        assert judged.median < 0.1


def test_an_outlier_counts_in_the_total_alone(seed: int) -> None:
    known = samples(seed)
    hit = [s._replace(shape=s.shape._replace(seconds=1.0)) for s in known[::200]]
    whole = [*known, *hit]
    profile = fit(whole, "machine")
    total = sum(sample.shape.seconds for sample in whole)
    predicted = sum(profile.seconds(sample.shape) for sample in whole)
    assert predicted == pytest.approx(total, rel=1e-6)


def test_a_profile_is_a_file(tmp_path: Path) -> None:
    profile = calibrate([samples(0)], "machine", {"logs": ["a.log"]})
    profile.write(tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == profile
    assert set(profile.report) == {"all", "decode", "mixed"} and profile.source["steps"] == 2000
    (tmp_path / "p.json").write_text('{"name": "x"}')
    with pytest.raises(
        ConfigError, match=r"is not a valid profile: .*`metronome calibrate` writes one"
    ):
        read_profile(tmp_path / "p.json")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_profile(tmp_path / "q.json")
    with pytest.raises(ConfigError, match="needs 200 steps or more, but these logs have 50"):
        calibrate([samples(0, num=50)], "machine")


def test_policies_ask_it_as_they_ask_the_learned_model() -> None:
    cost = ProfileCost(fit(samples(0, unrest=0.0), "machine"))
    assert cost.step_seconds(8, 8, 800, 808) == pytest.approx(
        took(StepShape(8, 8, 8, 800, 808, 0.0)), rel=0.02
    )
    for seconds in (0.004, 0.008, 0.02):
        most = cost.max_tokens(seconds, num_seqs=8, context=800) - 8

        def with_prompt(n: int) -> StepShape:
            return StepShape(9, 8 + n, 8, 800, 808 + n * (n + 1) // 2, 0.0)

        assert cost.profile.seconds(with_prompt(most)) <= seconds
        assert cost.profile.seconds(with_prompt(most + 1)) > seconds
    assert cost.max_tokens(1e-6, num_seqs=8, context=800) == 0
    assert cost.prefill_seconds(64) < cost.prefill_seconds(128)


def test_noise_is_drawn_by_a_seed_and_lasts_as_it_did() -> None:
    calm, slow = [1.0] * 500, [3.0] * 500
    profile = Profile(
        name="x", is_calibrated=True, knots=[], coefficients=[1.0, 0, 0, 0, 0, 0, 0],
        noise=[("decode", ratio) for ratio in [*calm, *slow]],
    )  # fmt: skip
    shape = StepShape(1, 1, 1, 0, 1, 0.0)
    drawn = [[ProfileTiming(profile, seed).seconds(shape) for _ in range(3)] for seed in (1, 1)]
    timing = ProfileTiming(profile, 1)
    long = np.array([timing.seconds(shape) for _ in range(20_000)])
    assert drawn[0] == drawn[1]
    assert long.mean() == pytest.approx(2.0, rel=0.15)
    assert np.count_nonzero(np.diff(long)) < 20_000 / 30


def test_noise_of_one_kind_of_steps_is_not_that_of_another() -> None:
    """Decodes of a real engine differed by 10 %, its steps with prompts by 4: drawn from all alike,
    simulated waits came out 10 % too long."""
    noise = [("decode", 0.5), ("mixed", 0.9), ("decode", 1.5), ("mixed", 1.1)] * 100
    profile = Profile(
        name="x", is_calibrated=True, knots=[], coefficients=[1.0, 0, 0, 0, 0, 0, 0], noise=noise
    )
    timing = ProfileTiming(profile, 1)
    decode, mixed, prompt = (StepShape(2, 2, n, 0, 1, 0.0) for n in (2, 1, 0))
    drawn = np.array([[timing.seconds(shape) for shape in (decode, mixed)] for _ in range(2000)])
    assert set(drawn[:, 0]) == {0.5, 1.5} and set(drawn[:, 1]) == {0.9, 1.1}
    assert drawn.mean(axis=0) == pytest.approx([1.0, 1.0], abs=0.05)
    assert timing.seconds(prompt) in {0.5, 0.9, 1.1, 1.5}  # none measured: of any


WORKLOAD = find_workload("log-uniform(num_requests=100,prompt_tokens=(8,100),output_tokens=(2,40))")


def test_a_simulation_takes_what_its_profile_says() -> None:
    profile = fit(samples(0), "machine")
    engine = Engine(max_num_seqs=8, max_num_batched_tokens=64, num_blocks=100, cost=profile)
    done = run("fcfs", WORKLOAD, engine, rate=1000.0, steps=True)
    assert done.steps is not None and done.head["cost"] == "machine"
    waits = done.steps[1:, 0] - done.steps[:-1, 1]  # between two steps
    assert 1e-4 < waits[(waits < 2e-3)].mean() < 1e-3
    again = run("fcfs", WORKLOAD, engine, rate=1000.0, steps=True)
    assert b"".join(done.lines()) == b"".join(again.lines())


def test_a_data_sheet_is_named_a_guess() -> None:
    profile = from_datasheet("llama-8b@h100")
    decode = StepShape(1, 1, 1, 1000, 1001, 0.0)
    prompt = StepShape(1, 8192, 0, 0, 8192 * 8193 // 2, 0.0)
    assert 0.005 < profile.seconds(decode) < 0.01  # 16 GB of weights at 2.7 TB/s
    assert 0.1 < profile.seconds(prompt) < 0.35
    assert str(profile) == "llama-8b@h100, by data sheet (uncalibrated)"
    two = from_datasheet("llama-8b@2xh100")
    assert two.seconds(decode) < profile.seconds(decode)
    with pytest.raises(ConfigError, match=r"models are qwen3-0.6b, llama-8b, llama-70b"):
        from_datasheet("llama-8b@h1000")
    with pytest.raises(ConfigError, match="model 'nobody' is none of"):
        from_datasheet("nobody@h100")


@pytest.mark.parametrize("name", ["gemma3_text", "mistral"])
def test_layers_with_windows_read_no_more_than_these(name: str, tmp_path: Path) -> None:
    """Requests shorter than a window cost as much as with full attention, longer ones less."""
    layers = 6 if name == "gemma3_text" else 1
    sizes = {"hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 30}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    config = {"model_type": name, "vocab_size": 32000, "sliding_window": 1024, **sizes}
    kinds = ["full_attention" if i % layers == 5 else "sliding_attention" for i in range(30)]
    profiles = []
    for each in ({}, {"layer_types": ["full_attention"] * 30, "sliding_window": None}):
        (tmp_path / "config.json").write_text(json.dumps({**config, "layer_types": kinds, **each}))
        profiles.append(from_datasheet(f"{tmp_path}@h100"))

    def decode(profile: Profile, length: int) -> float:
        return profile.seconds(StepShape(8, 8, 8, 8 * length, 8 * (length + 1), 0.0))

    local, full = profiles
    assert decode(local, 1000) == pytest.approx(decode(full, 1000))
    more = decode(full, 32768) - decode(full, 1024)
    expected = more * kinds.count("full_attention") / 30
    assert decode(local, 32768) - decode(local, 1024) == pytest.approx(expected, abs=1e-7)
    prompt = StepShape(1, 8192, 0, 0, 8192 * 8193 // 2, 0.0)
    assert local.seconds(prompt) < full.seconds(prompt)


def test_calibrate_is_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", str(tmp_path / "no.log"), "--out", str(tmp_path / "p.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err


class Asks(Policy):
    """Remembers what a step of one request is said to take."""

    def __init__(self) -> None:
        self.said: set[float] = set()

    def rank(self, req, view):
        self.said.add(view.cost.prefill_seconds(10))
        return (req.arrival,)


def test_policies_of_an_engine_are_given_a_profile(tmp_path: Path) -> None:
    profile = fit(samples(0), "machine")
    profile.write(tmp_path / "p.json")
    policy = Asks()
    run(policy, WORKLOAD, Engine(scheduler={"cost_profile": str(tmp_path / "p.json")}), rate=100.0)
    assert policy.said == {ProfileCost(profile).prefill_seconds(10)}
    with pytest.raises(ConfigError, match="cannot be read"):
        run("fcfs", WORKLOAD, Engine(scheduler={"cost_profile": "nowhere.json"}), rate=100.0)

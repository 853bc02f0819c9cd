"""A real run of the model in the box, recorded and replayed."""

from pathlib import Path

import pytest
from e2e.box_engine import PROMPTS, SIZES, greedy

from engine import EngineArgs, LLMEngine
from engine.cli.main import main
from engine.core.replay import replay


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["priority", "residual-sjf"])
def test_a_real_run_replays_to_identical_plans(
    tmp_path: Path, policy: str, depth: int, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "steps.log"
    sizes = {**SIZES, "num_kv_blocks": 14, "max_num_seqs": 6, "max_model_len": 96}
    args = EngineArgs(
        **sizes,
        scheduling_policy=policy,
        step_log=log,
        async_scheduling=depth == 2,
        max_waiting_requests=20,
    )
    with LLMEngine.from_engine_args(args) as engine:
        for number in range(16):
            prompt, params = PROMPTS[number % 4] * (1 + number % 3), greedy(max_tokens=8 + number)
            options = {"priority": number % 3, "timeout": 60.0}
            engine.add_request(str(number), prompt, params, **options)
        for number in range(200):
            if number in (3, 9):
                engine.abort_request(str(number))
            if number == 12:
                engine.pause("new")
            if number == 15:
                engine.resume()
                engine.reset_prefix_cache(reset_running=True)
            engine.step()
            if not engine.has_unfinished_requests():
                break
        stats = engine.stats()
        assert stats is not None and stats.num_preemptions > 2 and stats.num_running == 0
    outcome = replay(log)
    assert outcome.difference is None and outcome.num_requests == 16 and outcome.num_steps > 20
    assert main(["replay", str(log), "--policy", "fcfs", "--changes", '{"max_num_seqs": 2}']) == 1
    assert ", request " in capsys.readouterr().out

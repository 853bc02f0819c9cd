"""start_profile and stop_profile, wherever the core is."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, AsyncLLMEngine, ConfigError, EngineArgs, SamplingParams
from engine.assets import BOX_MODEL
from engine.cli.main import main

MODEL = ("--model", str(BOX_MODEL))
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
WHERE: dict[str, tuple[int, dict[str, Any]]] = {
    "here": (1, {}),
    "two processes": (2, {"multiprocess": True, "data_parallel_size": 2}),
}


def num_steps_in(path: str) -> int:
    """The number of steps in a trace. A replayed step has one section, any other step three."""
    events = json.loads(Path(path).read_text())["traceEvents"]
    counts = Counter(each["name"] for each in events if each.get("cat") != "Trace")
    assert counts["forward"] == counts["logits"] == counts["sample"] > 0
    return counts["forward"] + counts["replay"]


@pytest.mark.parametrize("where", WHERE)
def test_every_core_writes_a_trace_of_its_steps(where: str, tmp_path: Path) -> None:
    num_cores, options = WHERE[where]
    directory = tmp_path / "traces"
    with LLM(BOX_MODEL, num_threads=num_cores, torch_profiler_dir=directory, **options) as llm:
        with pytest.raises(ConfigError, match="no profile is being recorded"):
            llm.stop_profile()
        llm.start_profile()
        with pytest.raises(ConfigError, match="being recorded already"):
            llm.start_profile()
        llm.generate(["one", "two"], GREEDY, use_tqdm=False)
        paths = llm.stop_profile()
        assert sorted(paths) == sorted(map(str, directory.iterdir()))
        assert len(paths) == num_cores
        for path in paths:
            assert num_steps_in(path) >= 4
        llm.start_profile()  # and ends with it


async def test_profiles_of_an_engine_for_tasks(tmp_path: Path) -> None:
    args = EngineArgs(num_threads=1, torch_profiler_dir=tmp_path)
    engine = AsyncLLMEngine.from_engine_args(args)
    try:
        await engine.start_profile()
        async for output in engine.generate("one", GREEDY, "a"):
            assert output.request_id == "a"
        (path,) = await engine.stop_profile()
        assert num_steps_in(path) == 4
        with pytest.raises(ConfigError, match="no profile is being recorded"):
            await engine.stop_profile()
    finally:
        engine.shutdown()


def test_without_the_option_it_is_named(tmp_path: Path) -> None:
    with LLM(BOX_MODEL, num_threads=1) as llm:
        with pytest.raises(ConfigError, match="torch_profiler_dir is not set"):
            llm.start_profile()
        with pytest.raises(ConfigError, match="no profile is being recorded"):
            llm.stop_profile()


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--max-tokens", "3", "one", "two"],
        ["bench", "throughput", "--num-prompts", "2", "--output-len", "3", "--num-iters", "1"],
        pytest.param(
            ["bench", "latency", "--output-len", "3", "--num-iters", "1"], marks=pytest.mark.slow
        ),
    ],
    ids=["generate", "throughput", "latency"],
)
def test_a_command_records_what_it_does(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*MODEL, "--num-threads", "1", "--torch-profiler-dir", str(tmp_path)]
    assert main([*command, *options]) == 0
    (path,) = tmp_path.iterdir()
    assert f"trace: {path}" in capsys.readouterr().err
    assert num_steps_in(str(path)) == 3

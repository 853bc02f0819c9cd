"""A package of somebody else's, installed with pip, is found by its names and runs in an engine."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from e2e.box_engine import PROMPTS, SIZES, greedy

from engine import LLM, LLMEngine, RequestOutput
from engine.config.sched import SchedulerConfig
from engine.errors import ConfigError
from engine.messages.stats import SchedulerStats
from engine.sched.plugins.find import choose
from policylab.verify.testing import check_policy

PLUGIN = Path(__file__).parent.parent / "plugin"


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory into which pip has installed the package."""
    root = tmp_path_factory.mktemp("plugin")
    source, target = root / "source", root / "target"
    shutil.copytree(PLUGIN, source)  # a build leaves its traces beside what it builds
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "--disable-pip-version-check", "--target", str(target)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def on_path(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(installed))


def run(**options: Any) -> tuple[list[RequestOutput], SchedulerStats]:
    """The outputs and statistics of an engine with these options."""
    with LLM(**{**SIZES, **options}) as llm:
        outputs = llm.generate(PROMPTS, greedy(), use_tqdm=False)
        stats = llm.llm_engine.stats()
    assert stats is not None
    return outputs, stats


@pytest.mark.usefixtures("on_path")
def test_a_policy_and_a_resource_run_by_name(llm_engine: LLMEngine) -> None:
    outputs, stats = run(
        scheduling_policy="pace",
        policy_options={"chunk_tokens": 2},
        resources=["one-long-prompt"],
    )
    assert {"Pace.rank", "Pace.chunk", "OneLongPrompt.fit"} <= set(stats.hook_seconds)
    assert stats.num_policy_faults == 0
    assert [output.outputs[0].token_ids for output in outputs] == default_tokens(llm_engine)


@pytest.mark.usefixtures("on_path")
def test_a_loop_of_its_own_runs_by_name(llm_engine: LLMEngine) -> None:
    outputs, _ = run(scheduler_cls="oldest-half", max_num_seqs=2)
    assert any("seats" in output.metrics.waits for output in outputs)
    assert [output.outputs[0].token_ids for output in outputs] == default_tokens(llm_engine)


def default_tokens(llm_engine: LLMEngine) -> list[list[int]]:
    for number, prompt in enumerate(PROMPTS):
        llm_engine.add_request(str(number), prompt, greedy(output_kind="final"))
    finished = {}
    while llm_engine.has_unfinished_requests():
        finished |= {o.request_id: o.outputs[0].token_ids for o in llm_engine.step()}
    return [finished[str(number)] for number in range(len(PROMPTS))]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"scheduling_policy": "from-the-future"},
            r"FromTheFuture was written for API version 99, this engine has API version 1",
        ),
        (
            {"resources": ("resource-from-the-future",)},
            r"ResourceFromTheFuture was written for API version 99",
        ),
        (
            {"scheduling_policy": "gone"},
            r"'gone' is installed \(metronome_pace.gone:Policy\) but cannot be loaded: "
            r"ModuleNotFoundError",
        ),
        (
            {"scheduling_policy": "paces"},
            r"'paces' is not known; there are: .*fcfs.*pace.*residual-sjf.*dotted path",
        ),
        ({"resources": ("nothing",)}, r"'nothing' is not known; there are: one-long-prompt"),
        ({"scheduling_policy": "no-policy"}, r"'no-policy' is not a subclass of engine.Policy"),
        ({"scheduling_policy": "oldest-half"}, r"'oldest-half' is not a subclass of engine.Policy"),
        ({"scheduler_cls": "pace"}, r"is not a subclass of engine.SchedulerInterface"),
        (
            {"scheduling_policy": "pace", "policy_options": {"chunks": 3}},
            r"Pace cannot be created with policy_options {'chunks': 3}: .*options are: chunk",
        ),
    ],
)
@pytest.mark.usefixtures("on_path")
def test_what_cannot_be_used_says_why(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(SchedulerConfig(**options))


@pytest.mark.slow
@pytest.mark.usefixtures("on_path")
def test_the_kit_for_strangers_passes() -> None:
    assert check_policy("pace", steps=500).num_steps >= 500

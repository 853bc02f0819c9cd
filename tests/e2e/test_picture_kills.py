"""Processes die, hang or are slow amid a picture: its requests get the right tokens, or an error
with the reason; others go on, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.picture_cases import picture
from e2e.seeing_models import make_seeing_model
from e2e.test_late_pictures import finished
from e2e.test_pictures import GREEDY, SMALL, expected, prompt_of, tokens_of
from support import picture_phases
from support.kill_cells import Scene
from support.live_core import is_running, own_directory, shared_names, wait_until
from support.patience import WAIT_SECONDS
from support.picture_phases import GO_ON, PHASES, SIZE, DecodingGate, come_to
from support.processes import tree_of

from engine import LLM, SamplingParams
from engine.errors import EngineError

LONG = SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True)
SHOWN = picture(*SIZE)
PIXELS = "metronome-pixels"


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing_model(tmp_path_factory.mktemp("seeing") / "llava", "llava")


@pytest.fixture(autouse=True)
def place() -> Iterator[Path]:
    """Sockets and names in shared memory are all gone at the end."""
    names = shared_names()
    with own_directory() as path:
        yield path
        assert wait_until(lambda: not list(path.iterdir())) is not None, list(path.iterdir())
    assert not shared_names() - names


def halting(directory: Path, phase: str) -> dict[str, Any]:
    """Options of an engine whose core halts in a phase."""
    options = {"directory": str(directory), "phase": phase}
    return {"scheduling_policy": "support.picture_phases.Halting", "policy_options": options}


def files_of_pixels(pid: int) -> list[str]:
    """Shared memory with pixels that a process has open or mapped."""
    found = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if PIXELS in line]
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(link)
        except FileNotFoundError:
            continue
        found += [target] if PIXELS in target else []
    return found


def served(llm: LLM) -> Any:
    """The output of a new request with the picture, when the engine takes some."""
    until = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            (output,) = llm.generate([prompt_of("a <image>", [SHOWN])], GREEDY, use_tqdm=False)
            return output
        except EngineError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def pid_of(llm: LLM) -> int:
    (pid,) = llm.llm_engine.session.client.pids
    return int(pid)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "phase", [pytest.param(phase, marks=SLOW if phase != "encoding" else ()) for phase in PHASES]
)
def test_a_core_that_dies_amid_a_picture_ends_its_requests_and_is_replaced(
    llava: Path, tmp_path: Path, phase: str
) -> None:
    gate = DecodingGate() if phase in ("decoding", "travelling") else None
    options = {"multiprocess": True, "on_core_death": "restart", **halting(tmp_path, phase)}
    with LLM(llava, **options, **SMALL) as llm:
        engine, pid = llm.llm_engine, pid_of(llm)
        contents = engine.session.contents
        assert contents is not None
        engine.add_request("seeing", prompt_of("a <image>", [SHOWN]), GREEDY)
        engine.add_request("reading", "none", LONG)
        if phase == "travelling" and gate is not None:
            assert gate.begun.wait(WAIT_SECONDS)
            os.kill(pid, signal.SIGSTOP)
            gate.opened.set()
        outputs = come_to(phase, engine, tmp_path, gate)
        os.kill(pid, signal.SIGKILL)
        outputs += finished(engine)
        for output in outputs:
            (end,) = output.outputs
            assert end.code == "core_died" and "core" in str(end.error), output
        assert {output.request_id for output in outputs} == {"seeing", "reading"}
        if gate is not None:
            gate.opened.set()
            gate.restore()
        assert tokens_of(served(llm)) == expected(llava, "llava", "a <image>", [SHOWN])
        new = pid_of(llm)
        assert new != pid
        llm.reset_mm_cache()
        assert not len(contents)

        def is_closed() -> bool:
            return not files_of_pixels(os.getpid()) + files_of_pixels(new)

        assert wait_until(is_closed) is not None
    assert wait_until(lambda: not is_running(pid) and not is_running(new)) is not None


def start_actor(llava: Path, phase: str, directory: Path, *address: str) -> subprocess.Popen[str]:
    """A front end that has come to a phase."""
    command = [sys.executable, picture_phases.__file__, str(llava), phase, str(directory), *address]
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths}
    actor = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert actor.stdout is not None
    assert actor.stdout.readline() == "ready\n", f"it failed before {phase}"
    actor.stdout.close()
    return actor


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_front_end_that_is_killed_amid_a_picture_hurts_no_other_client(
    llava: Path, tmp_path: Path, phase: str
) -> None:
    with LLM(llava, multiprocess=True, **halting(tmp_path, phase), **SMALL) as llm:
        engine, pid = llm.llm_engine, pid_of(llm)
        address = engine.session.client.address.data
        actor = start_actor(llava, phase, tmp_path, address)
        actor.kill()
        actor.wait()
        (tmp_path / GO_ON).touch()
        engine.add_request("reading", "none", GREEDY)
        (output,) = finished(engine)
        assert tokens_of(output) == expected(llava, "llava", "none", [])
        assert tokens_of(served(llm)) == expected(llava, "llava", "a <image>", [SHOWN])
        llm.reset_mm_cache()

        def is_quiet() -> bool:
            stats = engine.session.client.stats()
            numbers = (stats.num_running, stats.num_waiting, stats.num_parked)
            return not any(numbers) and not files_of_pixels(pid)

        assert wait_until(is_quiet) is not None, files_of_pixels(pid)
    assert wait_until(lambda: not is_running(pid)) is not None


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_front_end_that_is_killed_amid_a_picture_leaves_no_process(
    llava: Path, tmp_path: Path, phase: str
) -> None:
    actor = start_actor(llava, phase, tmp_path)
    tree = tree_of(actor.pid)
    assert len(tree) > 1 or phase == "travelling"  # it may be dead already
    actor.kill()
    actor.wait()
    (tmp_path / GO_ON).touch()
    assert wait_until(lambda: not Scene.alive(tree)) is not None


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["dies", "is slow", "hangs"])
def test_prompts_outlive_a_text_process_amid_a_picture(llava: Path, fault: str) -> None:
    large, small = picture(2400, 1800), picture(9, 9)
    with LLM(llava, tokenizer_pool_size=1, **SMALL) as llm:
        engine = llm.llm_engine
        pool = vars(engine.session)["_pool"]
        pool.wait_until_ready()
        pid = pool.pids["picture process 0"]
        os.kill(pid, signal.SIGSTOP)  # so that it cannot have done it
        for name, shown in (("large", [large]), ("small", [small]), ("both", [large, small])):
            engine.add_request(name, prompt_of("<image>" * len(shown), shown), GREEDY)
        engine.add_request("none", "none", GREEDY)
        outputs: list[Any] = []
        while not outputs:  # a request without pictures does not wait
            outputs += [each for each in engine.step() if each.finished]
        assert [each.request_id for each in outputs] == ["none"]
        if fault == "is slow":
            os.kill(pid, signal.SIGCONT)
        elif fault == "dies":
            os.kill(pid, signal.SIGKILL)
        outputs += finished(engine)
        wanted = {"large": [large], "small": [small], "both": [large, small], "none": []}
        for output in outputs:
            shown = wanted.pop(output.request_id)
            text = "<image>" * len(shown) or "none"
            assert tokens_of(output) == expected(llava, "llava", text, shown)
        assert not wanted
        assert (pool.pids["picture process 0"] == pid) == (fault == "is slow")

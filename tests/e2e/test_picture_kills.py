"""A core that dies amid a picture: its requests end with an error that says so, a new core serves
the picture, and nothing is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.seeing_models import make_seeing_model
from e2e.test_pictures import GREEDY, SMALL, expected, picture, prompt_of, tokens_of
from support.live_core import is_running, own_directory, shared_names, wait_until
from support.patience import WAIT_SECONDS
from support.picture_phases import PHASES, SIZE, DecodingGate, come_to

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


def finished(llm: LLM) -> list[Any]:
    outputs: list[Any] = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += [each for each in llm.llm_engine.step() if each.finished]
    return outputs


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
        outputs += finished(llm)
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
        assert wait_until(lambda: not files_of_pixels(os.getpid()) + files_of_pixels(new))
    assert wait_until(lambda: not is_running(pid) and not is_running(new)) is not None

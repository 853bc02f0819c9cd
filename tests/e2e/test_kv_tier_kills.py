"""Cores are killed amid copies of KV blocks: the others go on, the next one gets the same tokens,
and nothing is left."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.references import engine_for, run
from e2e.tiny_models import TinyModels
from support.kv_phases import GO_ON
from support.kv_stores import slow_profile
from support.live_core import is_running, own_directory, shared_names, wait_until

from engine import LLM, SamplingParams
from engine.errors import EngineError

WAIT_SECONDS = 60.0
pytestmark = pytest.mark.slow
NUM_NEW = 6
PROMPTS = [[(n * k) % 281 + 3 for k in range(70 + 3 * n)] for n in (7, 11, 13, 17, 19, 23)]
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def path(tiny_models: TinyModels) -> str:
    return str(tiny_models.path("llama"))


@pytest.fixture(scope="module")
def wanted(path: str) -> list[list[int]]:
    """Tokens of an engine without a store."""
    with engine_for(path, enable_prefix_caching=False, max_model_len=256) as engine:
        return run(engine, PROMPTS, NUM_NEW)[0]


@pytest.fixture(autouse=True)
def place() -> Iterator[Path]:
    """Sockets and names in shared memory are all gone at the end."""
    names = shared_names()
    with own_directory() as path:
        yield path
        assert wait_until(lambda: not list(path.iterdir())) is not None, list(path.iterdir())
    assert not shared_names() - names


def engine(path: str, tmp_path: Path, phase: str, **options: Any) -> LLM:
    """An engine whose pools hold one prompt, so that blocks are stored and loaded all the time."""
    return LLM(
        path,
        multiprocess=True,
        on_core_death="restart",
        skip_tokenizer_init=True,
        log_level="error",
        scheduling_policy="support.kv_phases.Halting",
        policy_options={"directory": str(tmp_path), "phase": phase},
        cost_profile=slow_profile(tmp_path / "slow.json"),
        max_model_len=256,
        max_num_seqs=2,
        num_kv_blocks=24,
        block_size=8,
        **options,
    )


def pids_of(llm: LLM) -> list[int]:
    return [int(pid) for pid in llm.llm_engine.session.client.pids]


def counters(llm: LLM) -> dict[str, int]:
    stats = llm.llm_engine.stats()
    assert stats is not None
    return dict(stats.counters)


def served(llm: LLM, until: float) -> list[list[int] | None]:
    """Tokens of all prompts; ``None`` for those whose core died."""
    try:
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in PROMPTS], GREEDY, use_tqdm=False
        )
    except EngineError:
        assert time.monotonic() < until
        time.sleep(0.05)
        return [None] * len(PROMPTS)
    found: list[list[int] | None] = []
    for output in outputs:
        (end,) = output.outputs
        assert end.finish_reason == "length" or end.code == "core_died", output
        found.append(list(end.token_ids) if end.finish_reason == "length" else None)
    return found


def check(llm: LLM, wanted: list[list[int]], rounds: int, *, may_die: bool = False) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while rounds:
        found = served(llm, until)
        for one, right in zip(found, wanted, strict=True):
            assert one == right or (one is None and may_die)
        rounds -= None not in found
        assert time.monotonic() < until


def kill_amid(llm: LLM, wanted: list[list[int]], file: Path) -> int:
    """Kill the core that comes to a phase first."""
    file.with_suffix(".wanted").touch()
    until = time.monotonic() + WAIT_SECONDS
    new = itertools.count(10)
    while not (file.exists() and file.read_text()):
        check(llm, wanted, 1)
        llm.generate([{"prompt_token_ids": [next(new) % 250] * 30}], GREEDY, use_tqdm=False)
        assert time.monotonic() < until
    pid = int(file.read_text())
    os.kill(pid, signal.SIGKILL)
    return pid


@pytest.mark.parametrize("phase", ["host write", "host read"])
def test_a_core_that_dies_amid_a_copy_in_shared_memory_is_replaced(
    path: str, tmp_path: Path, wanted: list[list[int]], phase: str
) -> None:
    """The next one loads what the survivor has stored."""
    with engine(path, tmp_path, phase, data_parallel_size=2, kv_offloading_size=0.02) as llm:
        check(llm, wanted, 2)
        first = pids_of(llm)
        pid = kill_amid(llm, wanted, tmp_path / phase)
        assert pid in first
        check(llm, wanted, 3, may_die=True)
        until = time.monotonic() + WAIT_SECONDS
        while pid in pids_of(llm) or len(pids_of(llm)) < 2:  # which steps find out
            check(llm, wanted, 1, may_die=True)
            assert time.monotonic() < until
        while not counters(llm).get("kv load.host.from_others"):
            check(llm, wanted, 1)
            assert time.monotonic() < until
        last = pids_of(llm)
        (tmp_path / GO_ON).touch()
    assert wait_until(lambda: not any(map(is_running, {*first, *last}))) is not None


def test_a_core_that_dies_amid_a_write_to_its_directory_is_replaced(
    path: str, tmp_path: Path, wanted: list[list[int]]
) -> None:
    options = {"kv_offload_dir": str(tmp_path / "kv"), "kv_offload_dir_gib": 0.02}
    with engine(path, tmp_path, "disk write", **options) as llm:
        pid = kill_amid(llm, wanted, tmp_path / "disk write")
        check(llm, wanted, 3, may_die=True)
        assert pids_of(llm) != [pid]
        last = pids_of(llm)
        (tmp_path / GO_ON).touch()
    assert wait_until(lambda: not any(map(is_running, [pid, *last]))) is not None
    with engine(path, tmp_path, "disk write", **options) as llm:
        check(llm, wanted, 2)
        assert counters(llm)["kv load.blocks_loaded"] > 40


def test_damaged_blocks_of_a_killed_core_are_counted_and_computed(
    path: str, tmp_path: Path, wanted: list[list[int]]
) -> None:
    options = {"kv_offload_dir": str(tmp_path / "kv"), "kv_offload_dir_gib": 0.02}
    with engine(path, tmp_path, "disk write", **options) as llm:
        check(llm, wanted, 2)
        (pid,) = pids_of(llm)
        os.kill(pid, signal.SIGKILL)
        check(llm, wanted, 1, may_die=True)
        (tmp_path / GO_ON).touch()
    for file in (tmp_path / "kv").glob("*.kv"):
        with file.open("r+b") as stream:
            size = file.stat().st_size
            for at in range(size // 2, size, 3000):
                stream.seek(at)
                stream.write(b"\xaa")
    with engine(path, tmp_path, "disk write", **options) as llm:
        check(llm, wanted, 2)
        assert counters(llm)["kv load.disk.damaged"] > 0

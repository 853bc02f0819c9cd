"""Ranks keep their parts of KV blocks outside the pool: the tokens are those of one worker, and
what one rank lacks is computed by all."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from e2e.references import engine_for, pool_for, run
from e2e.test_drafts_everywhere import drafting
from e2e.test_kv_tiers import SITUATIONS
from e2e.test_rank_deaths import last_rank
from e2e.tiny_models import TinyModels
from support.kv_stores import counters, slow_profile
from support.live_core import wait_until
from support.processes import nothing_left
from support.rank_stores import FAULTS, rank_connector

from engine.assets import BOX_MODEL
from engine.core.replay import replay
from engine.errors import EngineDeadError

NUM_NEW = 8
PROMPTS = [[(n * k) % 281 + 3 for k in range(90 + 3 * n)] for n in (7, 11, 13, 17)]
FAMILIES = ("llama", "gemma3", "qwen3-next", "granite-hybrid-moe", "mistral-window", "jamba-moe")


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """Options of engines that prefer to load."""
    profile = slow_profile(tmp_path / "slow.json")
    return {"dtype": "float32", "max_model_len": 256, "cost_profile": profile}


def two(options: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**options, "tensor_parallel_size": 2, **more}


def in_directory(path: Path) -> dict[str, Any]:
    return {"kv_offload_dir": str(path), "kv_offload_dir_gib": 0.05}


def segments(path: Path) -> list[Path]:
    return sorted(path.glob("*.kv"))


def served(options: dict[str, Any]) -> tuple[list[list[int]], dict[str, int]]:
    """Tokens of ``PROMPTS`` from a new engine, and its counters of loads."""
    with engine_for(str(BOX_MODEL), **options) as engine:
        return run(engine, PROMPTS, NUM_NEW)[0], counters(engine)


def damage(file: Path) -> None:
    """Change a bit of a block in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_restart_finds_what_all_ranks_have_kept(options: dict[str, Any], tmp_path: Path) -> None:
    place = tmp_path / "kv"
    with engine_for(str(BOX_MODEL), **options) as engine:
        wanted, _ = run(engine, PROMPTS, NUM_NEW)
    found = []
    for nth in range(2):
        if nth:
            files = segments(place)
            assert len({file.name.partition("-")[0] for file in files}) == 2  # one of each rank
            damage(files[-1])
        log = tmp_path / f"steps-{nth}"
        with nothing_left():
            tokens, counted = served(two(options, **in_directory(place), step_log=str(log)))
        assert tokens == wanted and replay(log).difference is None
        found.append(counted)
    assert found[0]["blocks_stored"] > 40 and "blocks_loaded" not in found[0]
    assert found[1]["blocks_loaded"] > 20 and found[1]["blocks_failed"] > 0
    assert found[1]["disk.damaged"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_kind_of_layers_and_steps(
    family: str,
    situation: str,
    size: str,
    tiny_models: TinyModels,
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    if size == "pipeline_parallel_size" and situation == "draft model":
        pytest.skip("stages take no draft model")
    path = str(tiny_models.path(family))
    options = {**options, **SITUATIONS[situation]}
    if situation == "draft model":
        options |= drafting("draft_model", path)
    if options.get("num_kv_blocks") == "tight":
        with engine_for(path, **options | {"num_kv_blocks": 400}) as engine:
            options["num_kv_blocks"] = pool_for(engine, [len(PROMPTS[-1]) + NUM_NEW] * 2)
    with engine_for(path, **options) as engine:
        wanted, _ = run(engine, PROMPTS, NUM_NEW)
        has_states = engine.session.client.decided.snapshot_blocks > 0
    options |= {size: 2, **in_directory(tmp_path / "kv"), "kv_offloading_size": 0.02}
    for _ in range(2):
        with engine_for(path, **options) as engine:
            for _ in range(2):
                tokens, cached = run(engine, PROMPTS, NUM_NEW)
                assert tokens == wanted or situation == "8-bit cache"
            num_loaded = counters(engine).get("blocks_loaded", 0)
    if not (has_states and "preempted" in situation):  # a tight pool may have no room for states
        assert num_loaded > 0 and sum(cached) > 0.4 * sum(map(len, PROMPTS))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_store_that_fails_in_one_rank_costs_time_only(
    fault: str, rank: int, options: dict[str, Any], tmp_path: Path
) -> None:
    options |= {"num_kv_blocks": 60, "max_num_seqs": 2}
    with engine_for(str(BOX_MODEL), **options, enable_prefix_caching=False) as engine:
        wanted, _ = run(engine, PROMPTS, NUM_NEW)
    note = str(tmp_path / "note")
    stores = rank_connector(place=str(tmp_path), rank=rank, fault=fault, note=note)
    with engine_for(str(BOX_MODEL), **two(options, kv_transfer_config=stores)) as engine:
        for _ in range(4):
            assert run(engine, PROMPTS, NUM_NEW)[0] == wanted
        found = counters(engine)
    assert found.get("loads", 0) > 0 or fault == "is full"
    assert (found.get("blocks_loaded", 0) > 0) == (fault not in ("raises", "promises"))
    if fault in ("raises", "hangs"):
        assert found["memory.errors"] > 0


@pytest.mark.slow
def test_cores_of_several_ranks_share_an_arena(options: dict[str, Any]) -> None:
    """With prefill cores, each rank of a decode core reads what the same rank there has stored."""
    options |= {"num_kv_blocks": 400, "max_model_len": 512}
    with engine_for(str(BOX_MODEL), **options) as engine:
        wanted, _ = run(engine, PROMPTS, NUM_NEW)
    cores = {"multiprocess": True, "num_threads": 2, "kv_offloading_size": 0.1}
    apart = {"prefill_cores": 1, "decode_cores": 1, "prefill_threshold": 64}
    for more in (apart, {"data_parallel_size": 2}):
        with engine_for(str(BOX_MODEL), **two(options, **cores, **more)) as engine:
            for _ in range(3):
                assert run(engine, PROMPTS, NUM_NEW)[0] == wanted
            found = counters(engine)
        assert found["host.stored"] > 40
        assert more is not apart or found["host.from_others"] > 20


@pytest.mark.slow
@pytest.mark.parametrize("multiprocess", [False, True])
def test_a_rank_that_is_killed_amid_a_load_ends_the_group(
    multiprocess: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    note = tmp_path / "note"
    stores = rank_connector(place=str(tmp_path), rank=1, fault="hangs", note=str(note))
    more: dict[str, Any] = {"num_kv_blocks": 60, "max_num_seqs": 2, "multiprocess": multiprocess}

    def kill() -> None:
        if wait_until(note.exists) is not None:
            os.kill(rank, signal.SIGKILL)

    more |= two(options, kv_transfer_config=stores)
    with engine_for(str(BOX_MODEL), **more) as engine, nothing_left() as started:
        rank = last_rank()
        started.add(rank)
        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(EngineDeadError, match=r"rank 1 .*was killed by SIGKILL"):
            for _ in range(1000):
                run(engine, PROMPTS, NUM_NEW)
        killer.join()

"""Ranks of one model on two nodes of a Ray cluster: they compute what one worker does, and a node
that is killed is named to everybody who waited."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e.box_engine import EXACT
from e2e.seeing_models import make_seeing_model
from e2e.test_ngram import BOX
from e2e.test_pictures import GREEDY as SEEN_GREEDY
from e2e.test_pictures import PROMPTS as SEEN
from e2e.test_tensor_parallel import DRAFTS, REGEX
from support.box_adapters import write_adapter
from support.live_core import wait_until
from support.patience import WAIT_SECONDS
from support.processes import open_files
from support.ray_cluster import RayNodes, ray_cluster

from engine import LLM, AsyncLLMEngine, EngineArgs, LLMEngine, LoRARequest, SamplingParams
from engine.assets import BOX_MODEL
from engine.errors import ConfigError, EngineDeadError, RankError

pytest.importorskip("ray", reason="Ray is not installed: pip install metronome-engine[ray]")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own
PLACED: dict[str, Any] = {
    **BOX, **EXACT, "tensor_parallel_size": 2, "distributed_executor_backend": "ray",
    "num_threads": 2,
}  # fmt: skip
BOX_SIZES: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 256}
PROMPTS = ["a list of", "the tree", "Once upon a time there was a"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True, logprobs=1)
END_SECONDS = 5.0  # within which the streams of a dead node end
NUM_STREAMS = 32


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[RayNodes, list[Any]]]:
    """The node of this process and another one, each with a CPU."""
    with ray_cluster({"num_cpus": 1}, head_cpus=1) as cluster:
        yield cluster


def rank_processes() -> list[psutil.Process]:
    """The processes of ranks on nodes of this machine."""
    found = []
    for process in psutil.process_iter():
        try:
            parent = process.parent()
            is_kept = parent is not None and "ray::Keeper" in " ".join(parent.cmdline())
            if is_kept and "spawn_main" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def assert_nothing_is_left(num_cpus: float) -> None:
    """No rank runs, no actor lives, and the room is free again."""
    import ray
    from ray.util import placement_group_table

    assert wait_until(lambda: not rank_processes()) is not None
    if not ray.is_initialized():
        ray.init(address="auto", configure_logging=False, namespace="metronome")
    assert wait_until(lambda: ray.available_resources().get("CPU", 0) == num_cpus) is not None
    states = {each["state"] for each in placement_group_table().values()}
    assert states <= {"REMOVED"}


@pytest.mark.parametrize("multiprocess", [False, True])
def test_ranks_on_two_nodes_compute_what_one_worker_does(
    nodes: tuple[RayNodes, list[Any]], multiprocess: bool
) -> None:
    def tokens(**options: Any) -> list[list[int]]:
        with LLM(**options) as llm:
            outputs = [llm.generate(PROMPTS, each, use_tqdm=False) for each in (GREEDY, DRAWN)]
        return [each.outputs[0].token_ids for run in outputs for each in run]

    wanted = tokens(**{**BOX, **EXACT})
    assert tokens(**PLACED, multiprocess=multiprocess) == wanted
    assert_nothing_is_left(2)
    if not multiprocess:
        before = open_files()
        assert tokens(**PLACED) == wanted
        assert_nothing_is_left(2)
        assert wait_until(lambda: open_files() <= before) is not None


def both(model: str, prompts: Any, params: Any, more: dict[str, Any], **options: Any) -> list[Any]:
    """The tokens of one worker, and of two ranks on two nodes."""
    found = []
    placed = {name: PLACED[name] for name in PLACED if name not in BOX or name == "num_threads"}
    for ranks in ({"num_threads": 1}, placed):
        with LLM(model, **{"dtype": "float32", "log_level": "error", **options, **ranks}) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False, **more)
        found.append([each.outputs[0].token_ids for each in outputs])
    return found


def test_adapters_drafts_and_grammars_reach_both_nodes(
    nodes: tuple[RayNodes, list[Any]], tmp_path: Path
) -> None:
    adapter = LoRARequest("x", 1, str(write_adapter(tmp_path / "x", 1)))
    params = [GREEDY, DRAWN, SamplingParams(temperature=0.0, structured_outputs=REGEX)]
    alone, together = both(
        str(BOX_MODEL),
        [PROMPTS[0]] * 3,
        params,
        {"lora_request": [adapter, None, None]},
        **{**BOX_SIZES, **DRAFTS, "enable_lora": True},
    )
    assert together == alone


def test_pictures_reach_both_nodes(nodes: tuple[RayNodes, list[Any]], tmp_path: Path) -> None:
    path = str(make_seeing_model(tmp_path / "model", "qwen3-vl"))
    prompts = [{"prompt": text, "multi_modal_data": {"image": pictures}} for text, pictures in SEEN]
    alone, together = both(path, prompts, SEEN_GREEDY, {}, max_num_seqs=4, num_kv_blocks=200)
    assert together == alone


def test_a_node_that_differs_is_refused_before_weights_are_read(
    nodes: tuple[RayNodes, list[Any]], tmp_path: Path
) -> None:
    """The node lacks the model, which is under a path of this process, and has another version."""
    cluster, others = nodes
    folder = os.open(BOX["model"], os.O_RDONLY)
    try:
        model = f"/proc/self/fd/{folder}"
        message = rf"the ranks cannot start .*rank 1 on node [\d.]+ .*model {model} does not exist"
        with pytest.raises(ConfigError, match=message):
            LLM(**{**PLACED, "model": model})
    finally:
        os.close(folder)
    assert_nothing_is_left(2)
    cluster.kill(others.pop())
    (tmp_path / "msgspec-0.0.1.dist-info").mkdir()
    (tmp_path / "msgspec-0.0.1.dist-info" / "METADATA").write_text(
        "Name: msgspec\nVersion: 0.0.1\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    other = cluster.add(num_cpus=1, env_vars={"PYTHONPATH": path})
    with pytest.raises(ConfigError, match=r"rank 1 on node .*: msgspec is 0\.0\.1, here "):
        LLM(**PLACED)
    assert_nothing_is_left(2)
    cluster.kill(other)
    others.append(cluster.add(num_cpus=1))


def test_a_core_that_is_killed_leaves_no_rank_and_no_reservation(
    nodes: tuple[RayNodes, list[Any]],
) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(**PLACED, multiprocess=True))
    try:
        (rank,) = rank_processes()
        (core,) = engine.session.client.pids
        os.kill(core, signal.SIGKILL)
        assert wait_until(lambda: not rank.is_running()) is not None
    finally:
        engine.shutdown()
    assert_nothing_is_left(2)


def test_a_rank_that_dies_while_it_starts_is_named_at_once(
    nodes: tuple[RayNodes, list[Any]],
) -> None:
    """The others wait for it then, to make a group of torch.distributed."""

    def strike() -> None:
        assert wait_until(rank_processes) is not None
        killed.extend(each.pid for each in rank_processes())
        for pid in killed:
            os.kill(pid, signal.SIGKILL)

    killed: list[int] = []
    thread = threading.Thread(target=strike)
    thread.start()
    began = time.monotonic()
    with pytest.raises((RankError, EngineDeadError), match=r"rank 1.* was killed by SIGKILL"):
        LLM(**PLACED)
    assert time.monotonic() - began < WAIT_SECONDS
    thread.join()
    assert killed
    assert_nothing_is_left(2)


def test_too_little_room_is_an_error_that_names_what_the_cluster_has(
    nodes: tuple[RayNodes, list[Any]],
) -> None:
    began = time.monotonic()
    options = {**PLACED, "tensor_parallel_size": 3, "num_threads": 3, "core_ready_timeout": 4.0}
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 3, with rank 0 on this node"):
        LLM(**options)
    assert time.monotonic() - began < WAIT_SECONDS
    assert_nothing_is_left(2)


@pytest.mark.parametrize("multiprocess", [True, False])
def test_each_stream_hears_which_rank_and_node_have_died(
    nodes: tuple[RayNodes, list[Any]], multiprocess: bool
) -> None:
    cluster, others = nodes
    doomed = others.pop()
    long = SamplingParams(temperature=0.0, max_tokens=240, ignore_eos=True)
    options = {**PLACED, "max_num_seqs": NUM_STREAMS, "num_kv_blocks": 16 * NUM_STREAMS}
    ends: list[tuple[str, float]] = []
    killed_at = [0.0]

    async def stream(engine: AsyncLLMEngine, number: int, begun: list[int]) -> None:
        try:
            async for _ in engine.generate(PROMPTS[number % 3], long, str(number)):
                begun.append(number)
        except EngineDeadError as error:
            ends.append((str(error), time.monotonic() - killed_at[0]))

    async def use() -> None:
        engine = AsyncLLMEngine.from_engine_args(EngineArgs(**options, multiprocess=multiprocess))
        try:
            begun: list[int] = []
            streams = [asyncio.create_task(stream(engine, i, begun)) for i in range(NUM_STREAMS)]
            began = time.monotonic()
            while len(set(begun)) < NUM_STREAMS:
                assert time.monotonic() - began < WAIT_SECONDS
                await asyncio.sleep(0.01)
            killed_at[0] = time.monotonic()
            await asyncio.to_thread(cluster.kill, doomed)
            await asyncio.wait_for(asyncio.gather(*streams), WAIT_SECONDS)
        finally:
            engine.shutdown()

    asyncio.run(use())
    assert len(ends) == NUM_STREAMS
    for message, seconds in ends:
        assert seconds < END_SECONDS, message
        assert f"({doomed.node_id[:8]})" in message and "rank 1 (process" in message, message
    assert_nothing_is_left(1)
    others.append(cluster.add(num_cpus=1))

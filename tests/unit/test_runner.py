"""The worker's step: what fails, fails alone; what is asked for, is delivered once.

On the CPU as it computes for itself, and in a GPU's place, with graphs that run again.
"""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from support.one_bad import check_that_one_fails_alone, says
from support.simulate import make_request
from support.sum_model import CPU, FEW, GRAPHS, LONGEST, NAN, POISON, make_run

from engine.config.args import EngineArgs
from engine.config.decide import resolve
from engine.config.gpu import GPUConfig, graph_sizes, mixed_sizes
from engine.config.gpu_memory import GraphTrial, MemoryUse, graphs_bytes, kv_budget, shortage
from engine.config.model import ModelInfo
from engine.errors import ConfigError
from engine.messages.params import SamplingParams
from engine.worker.batches import ALIGNMENT, EXTRA_BYTES, Staging
from engine.worker.platform.host import HostPlatform, RerunGraph
from engine.worker.worker import explain_shortage

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
modes = pytest.mark.parametrize("sizes", [CPU, GRAPHS, FEW], ids=["cpu", "graphs", "few"])
depths = pytest.mark.parametrize("depth", [1, 3])


@depths
@modes
def test_tokens_go_round_on_the_device(depth, sizes):
    """Chunks, decodes, preemption and shared prefixes, and nobody's token is anybody else's."""
    run = make_run(depth, sizes, num_blocks=24, max_num_batched_tokens=20)
    dice = random.Random(depth)
    prompts = {str(i): [dice.randrange(40) for _ in range(1 + i * 3 % 17)] for i in range(14)}
    prompts["7"] = prompts["5"] + [3, 2, 1]
    for name, prompt in prompts.items():
        run.add(make_request(name, prompt, 9, params=GREEDY))
    run.drain()
    for name, prompt in prompts.items():
        assert run.outputs[name] == says(prompt, 9), name
    assert run.scheduler.make_stats().num_preemptions > 0


@depths
@modes
@pytest.mark.parametrize("bad", [POISON, NAN])
def test_one_bad_request_among_twelve_fails_alone(bad, depth, sizes):
    run = make_run(depth, sizes)
    check_that_one_fails_alone(run, bad, GREEDY)
    assert run.worker.runner.machine.model.lowest_id == 0, "an embedding has no such row"


@modes
def test_logits_that_nobody_samples_from_may_be_anything(sizes):
    run = make_run(1, sizes, max_num_batched_tokens=1, max_num_seqs=1)
    run.add(make_request("a", [NAN, 1, 2], 4, params=GREEDY))
    run.drain()
    assert run.outputs["a"] == says([NAN, 1, 2], 4)


def test_a_lost_device_ends_the_engine():
    run = make_run()

    def lost(*_):
        raise torch.AcceleratorError("an illegal memory access was encountered")

    run.worker.runner.machine.model.forward = lost
    run.add(make_request("a", [1, 2], 6, params=GREEDY))
    with pytest.raises(torch.AcceleratorError):
        run.drain()


@depths
@modes
def test_what_fails_behind_the_draw_is_not_drawn_again(depth, sizes):
    """The slots had advanced: to run the step again put every token one place too far."""
    run = make_run(depth, sizes)
    finish, calls = run.worker.runner.machine.sampler.finish, []

    def short_of_memory(rows, draws, drawing, drawn):
        calls.append(len(drawn))
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no room for log-probabilities")
        return finish(rows, draws, drawing, drawn)

    run.worker.runner.machine.sampler.finish = short_of_memory
    for name in "ab":
        run.add(make_request(name, [1, 2], 6, params=GREEDY))
    run.drain()
    assert {run.finished[name] for name in "ab"} == {("error", None)}
    run.add(make_request("c", [1, 2], 6, params=GREEDY))
    run.drain()
    assert run.outputs["c"] == says([1, 2], 6)
    assert all(run.outputs[name] == says([1, 2], 6)[: len(run.outputs[name])] for name in "ab")


@modes
@pytest.mark.parametrize(("start", "first"), [(0, 1), (1, 1), (4, 4), (8, 8)])
@pytest.mark.parametrize("budget", [4, 7, 1024])
def test_prompt_scores_come_once_and_whole(sizes, start, first, budget):
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    params = SamplingParams(
        temperature=0, max_tokens=3, prompt_logprobs=2, prompt_logprobs_start=start
    )
    run = make_run(1, sizes, max_num_batched_tokens=budget, max_num_seqs=2)
    run.add(make_request("a", prompt, 3, params=params))
    delivered = []
    while run.scheduler.has_unfinished_requests():
        plan = run.scheduler.schedule()
        result = run.worker.execute(plan)
        for out in run.scheduler.update_from_output(plan, result).values():
            delivered += [out.prompt_logprobs[0]] if out.prompt_logprobs else []
    (scores,) = delivered
    assert [entry.token_ids[0] for entry in scores] == prompt[first:]
    for position, entry in enumerate(scores, start=first):
        assert (entry.rank == 1) == (sum(prompt[:position]) % 40 == prompt[position])


@modes
def test_prompt_logprobs_survive_a_step_that_is_run_again(sizes):
    """Out of memory the first time more than one row is drawn."""
    run = make_run(1, sizes)
    sampler, raised = run.worker.runner.machine.sampler, []
    prepare = sampler.prepare

    def forgetful(rows, draws, *masks, **options):
        if len(draws.rows) > 1 and not raised:
            raised.append(True)
            raise MemoryError("too many rows")
        return prepare(rows, draws, *masks, **options)

    sampler.prepare = forgetful
    results, collect = [], run.worker.collect
    run.worker.collect = lambda ticket: results.append(collect(ticket)) or results[-1]
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1)
    for name in "ab":
        run.add(make_request(name, [1, 2, 3], 2, params=params))
    run.drain()
    assert raised
    assert {row: len(scores) for row, scores in results[0].prompt_logprobs.items()} == {0: 2, 1: 2}
    assert not any(result.prompt_logprobs for result in results[1:])
    assert all(run.outputs[name] == says([1, 2, 3], 2) for name in "ab")


def test_what_a_failed_request_wrote_is_not_found_again():
    run = make_run()
    run.add(make_request("bad", [1] * 8 + [NAN], 6, params=GREEDY))
    run.drain()
    run.add(make_request("good", [1] * 9, 6, params=GREEDY))
    req = run.scheduler.roster.by_id["good"]
    assert run.scheduler.kv.lookup(req).num_tokens == 0
    run.drain()
    assert run.outputs["good"] == says([1] * 9, 6)


def test_halving_asks_no_more_often_than_it_must():
    run = make_run()
    for i in range(16):
        run.add(make_request(str(i), [POISON if i == 11 else i], 1, params=GREEDY))
    run.drain()
    assert run.worker.runner.machine.model.calls <= 1 + 2 * 4


class SlowCopies(HostPlatform):
    """A device that copies a staging buffer only when somebody waits for it, or for its results."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def mark(self):
        mark = super().mark()
        mark.synchronize = self.waited
        return mark

    def waited(self) -> None:
        self.waits += 1


def test_a_buffer_is_filled_again_only_when_its_copy_is_done():
    platform = SlowCopies()
    staging = Staging(platform, max_num_seqs=4, max_num_tokens=8, num_buffers=2)
    filled = []
    for step in range(4):
        host = staging.open(2)
        assert platform.waits == step + 1
        host.slots[:2] = step
        filled.append(host.slots)
        staging.send()
        assert staging.device.slots[:2].tolist() == [step, step]
    assert filled[0] is filled[2] and filled[1] is filled[3] and filled[0] is not filled[1]


def test_what_is_sent_along_lies_where_kernels_want_it_and_large_things_go_by_themselves():
    staging = Staging(HostPlatform(), max_num_seqs=4, max_num_tokens=8, num_buffers=1)
    staging.open(3)
    values = [np.arange(5, dtype=np.int32), np.linspace(0, 1, 7), np.arange(3, dtype=np.int64)]
    values.append(np.arange(EXTRA_BYTES, dtype=np.int32))
    sent = [staging.add(column) for column in values]
    staging.send()
    for column, there in zip(values, sent, strict=True):
        assert there.tolist() == column.tolist()
        assert (there.data_ptr() - staging.device.slots.data_ptr()) % ALIGNMENT == 0


def test_a_graph_reads_new_data_at_old_addresses():
    runs, place = [], torch.zeros(2)
    graph = RerunGraph()
    graph.capture(lambda: runs.append(place.tolist()))
    place += 3
    graph.replay()
    assert runs == [[0, 0], [3, 3]]


def test_a_step_takes_the_smallest_graph_that_holds_it():
    """Above the largest it runs without one, and without padding."""
    run, num_rows = make_run(sizes=(8, 2, 4), mixed_sizes=()), []
    for num_decodes in range(1, 10):
        for index in range(num_decodes):
            run.add(make_request(f"{num_decodes}/{index}", [1 + index], 3, params=GREEDY))
        run.drain()
        num_rows.append(run.worker.runner.machine.model.num_rows[-1])
    assert num_rows == [2, 2, 4, 4, 8, 8, 8, 8, 9]


def test_sizes_of_graphs():
    assert graph_sizes(GPUConfig(), 1) == [1]
    assert graph_sizes(GPUConfig(), 20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(GPUConfig(), 10_000)[-3:] == [480, 496, 512]
    assert graph_sizes(GPUConfig(enforce_eager=True), 256) == []
    assert graph_sizes(GPUConfig(cudagraph_capture_sizes=(300, 7, 7, 2)), 256) == [2, 7]


def test_steps_with_prompts_take_the_smallest_graph_that_holds_their_tokens() -> None:
    said = []
    for sizes in ((), (6, 16)):
        run = make_run(sizes=(2,), mixed_sizes=sizes)
        run.worker.runner.machine.model.num_rows.clear()
        for length in (5, 11, 30):
            prompt = [(length + place) % 38 for place in range(length)]
            run.add(make_request(str(length), prompt, 1, params=GREEDY))
            run.drain()
        said.append((run.worker.runner.machine.model.num_rows, run.outputs))
    assert said[0][0] == [5, 11, 30] and said[1][0] == [6, 16, 30]
    assert said[0][1] == said[1][1]


def test_a_recorded_step_has_any_number_of_chunks_and_tokens() -> None:
    said = []
    for sizes in ((), (1400,)):
        options = {"max_num_batched_tokens": 1400, "max_num_seqs": 50, "num_blocks": 600}
        run = make_run(sizes=(2,), mixed_sizes=sizes, **options)
        run.worker.runner.machine.model.num_rows.clear()
        for index in range(40):
            prompt = [(index + place) % 38 for place in range(20 + index % 30)]
            run.add(make_request(str(index), prompt, 1, params=GREEDY))
        run.drain()
        said.append((run.worker.runner.machine.model.num_rows, run.outputs))
    assert 1024 < said[0][0][0] < 1400 and said[1][0] == [1400]
    assert said[0][1] == said[1][1]


def test_steps_with_prompts_are_recorded_for_so_many_tokens() -> None:
    assert mixed_sizes(GPUConfig(), 60) == [8, 16, 32, 48, 60]
    sizes = mixed_sizes(GPUConfig(), 8192)
    assert sizes[-1] == 8192 and mixed_sizes(GPUConfig(), 20_000) == sizes and len(sizes) == 39
    larger = [size for size in sizes if size >= 1024]
    assert all(size * 9 >= more * 8 for size, more in pairwise(larger))
    assert mixed_sizes(GPUConfig(enforce_eager=True), 256) == []
    assert mixed_sizes(GPUConfig(cudagraph_capture_sizes=(300, 7, 7, 2)), 256) == [2, 7]


@pytest.mark.parametrize(
    ("device", "options", "decided"),
    [
        ("cuda", {}, (8192, 2, 64)),
        ("cuda", {"enable_chunked_prefill": False, "max_num_seqs": 9000}, (9000, 2, 64)),
        (
            "cuda",
            {"max_num_batched_tokens": 300, "block_size": 16, "async_scheduling": False},
            (300, 1, 16),
        ),
        ("cpu", {}, (512, 1, 16)),
        ("cpu", {"max_num_seqs": 4000, "async_scheduling": True}, (4000, 2, 16)),
        ("cpu", {"enable_chunked_prefill": False}, (8192, 1, 16)),
        ("cpu", {"max_num_batched_tokens": 300, "block_size": 8}, (300, 1, 8)),
    ],
)
def test_what_is_left_open_is_decided_for_the_device(device, options, decided):
    asked = EngineArgs(**options).create_config()
    info = ModelInfo(path=Path("m"), architecture="", model_type="", hf={})
    found = resolve(asked, info, device)
    if device == "cpu" and not options:
        for products, most in (("wide pairs", 1024), ("tiles", 2048)):
            fast = resolve(asked, info, device, products=products)
            assert fast.scheduler.max_num_batched_tokens == most
    sched = found.scheduler
    sizes = (sched.max_num_batched_tokens, sched.num_steps_in_flight, found.block_size)
    assert sizes == decided and found.device == device
    assert sched.max_model_len == info.max_position_embeddings


@pytest.mark.parametrize("name", ["triton", "TRITON_ATTN"])
def test_attention_of_a_gpu_is_refused_on_a_cpu(name):
    asked = EngineArgs(attention_backend=name).create_config()
    info = ModelInfo(path=Path("m"), architecture="", model_type="", hf={})
    with pytest.raises(ConfigError, match=f"attention_backend is '{name}' and .* a CPU.*leave it"):
        resolve(asked, info, "cpu")
    assert resolve(asked, info, "cuda").gpu.attention_backend == name


@pytest.mark.parametrize("name", ["flashinfer", "FLASH_ATTN"])
def test_an_unknown_attention_is_refused_with_those_there_are(name):
    with pytest.raises(ConfigError, match=f"attention_backend is '{name}', .*triton.*TRITON_ATTN"):
        EngineArgs(attention_backend=name).create_config()


GIB = 1 << 30


def test_the_pool_gets_what_the_rest_leaves():
    use = MemoryUse(total=80 * GIB, loaded=15 * GIB, activations=2 * GIB, others=GIB)
    assert kv_budget(use, 0.9, one_request=54 * GIB) == 54 * GIB
    assert kv_budget(use, 0.5, one_request=0) == 22 * GIB


@pytest.mark.parametrize("share", [0.9, 1.0])
def test_a_lack_of_memory_is_told_with_numbers_and_ways_out(share):
    use = MemoryUse(total=16 * GIB, loaded=13 * GIB, activations=2 * GIB, others=GIB // 2)
    with pytest.raises(ConfigError) as caught:
        kv_budget(use, share, one_request=GIB)
    numbers = ("16.00", "13.00", "2.00", "0.50", "1.00", "-1.10" if share < 1 else "0.50")
    ways = ("gpu_memory_utilization", "max_model_len", "max_num_batched_tokens", "max_num_seqs")
    for part in (*numbers, *ways):
        assert part in str(caught.value)
    assert "12.00 GiB of 16.00 GiB" in shortage("tried", free=12 * GIB, total=16 * GIB)


def test_graphs_are_estimated_from_the_few_that_were_tried():
    trial = GraphTrial(before=100, one=60, several=54, num_several=4)
    assert graphs_bytes(trial, num_sizes=4) == 46
    assert graphs_bytes(trial, num_sizes=10) == 46 + 6 * 2
    # Another process has given something back meanwhile.
    given_back = GraphTrial(before=100, one=60, several=75, num_several=4)
    assert graphs_bytes(given_back, num_sizes=10) == 40
    assert graphs_bytes(GraphTrial(before=100, one=110, several=110, num_several=1), 1) == 0


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_a_lack_of_memory_is_known_whoever_names_it(error):
    loading = "the weights were loaded"
    with (
        pytest.raises(ConfigError, match=f"out of GPU memory while {loading}"),
        explain_shortage(HostPlatform(), loading),
    ):
        raise error
    with (
        pytest.raises(RuntimeError, match="another thing"),
        explain_shortage(HostPlatform(), loading),
    ):
        raise RuntimeError("another thing")


@pytest.mark.parametrize("context", [0, 7, LONGEST - 8])
def test_a_profile_run_leaves_nothing_behind(context):
    run = make_run()
    run.worker.runner.profile_run(8, 1, context)
    run.worker.runner.profile_run(12, 3, context)
    run.add(make_request("a", [1, 2, 3], 9, params=GREEDY))
    run.drain()
    assert run.outputs["a"] == says([1, 2, 3], 9)


@pytest.mark.parametrize("share", [0, -0.5, 1.01, float("nan")])
def test_impossible_shares_of_the_memory_are_refused(share):
    with pytest.raises(ConfigError, match="gpu_memory_utilization is"):
        GPUConfig(gpu_memory_utilization=share)


@pytest.mark.parametrize("round_", range(8))
def test_random_lives(round_: int, seed: int) -> None:
    """Arrivals, aborts, bad tokens, preemption, shared prefixes: who ends well said his sums."""
    dice = random.Random(f"{seed} {round_}")
    depth, sizes = dice.randint(1, 3), dice.choice([CPU, (), (1, 2, 4, 8), (3, 8)])
    room = {"num_blocks": dice.randint(18, 40), "max_num_seqs": 8}
    run = make_run(depth, sizes, max_num_batched_tokens=dice.choice([8, 13, 40]), **room)
    shared = [dice.randrange(40) for _ in range(20)]
    prompts: dict[str, list[int]] = {}
    asked: dict[str, int] = {}
    for turn in range(120):
        if turn < 80 and dice.random() < 0.4:
            name = str(turn)
            prompt = [*shared[: dice.randint(0, 20)], dice.randrange(40)]
            if dice.random() < 0.1:
                prompt[-1] = dice.choice([POISON, NAN])
            prompts[name], asked[name] = prompt, dice.randint(1, 12)
            scores = 1 if dice.random() < 0.2 else None
            params = SamplingParams(
                temperature=0, max_tokens=asked[name], ignore_eos=True, prompt_logprobs=scores
            )
            run.add(make_request(name, prompt, asked[name], params=params))
        if prompts and dice.random() < 0.05:
            gone = dice.choice(list(prompts))
            if gone not in run.finished:
                run.scheduler.finish_requests(gone, "abort")
                run.finished[gone] = ("abort", None)
        run.step()
    run.drain()
    reasons = [run.finished[name][0] for name in prompts]
    assert reasons.count("length") > 5, reasons
    for name, prompt in prompts.items():
        reason = run.finished[name][0]
        is_bad = bool({POISON, NAN} & set(prompt))
        assert reason in (("error", "abort") if is_bad else ("length", "abort")), name
        if not is_bad:
            said = says(prompt, asked[name])
            assert run.outputs[name] == said[: len(run.outputs[name])], name
            assert reason == "abort" or run.outputs[name] == said, name

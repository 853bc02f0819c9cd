"""The GPU's worker on a made-up device that checks order, memory and graphs, next to the CPU's.

Each kind of fault that the made-up device reports is shown to be found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from e2e.tiny_models import CASES, CONV, FULL, LINEAR, Case, config_of, random_model, save
from support import triton_interpreter
from support.fake_cuda import FakeCuda

from engine import LLM, RequestOutput, SamplingParams
from engine.sample.sampler import Sampler
from engine.worker.platform.cuda import CudaPlatform
from kernels import slots as on_slots

pytestmark = pytest.mark.skipif(
    not triton_interpreter.IS_INTERPRETING, reason="takes the place of a device"
)
Patch = pytest.MonkeyPatch

PROMPTS = ([5, 6, 7], [9] * 18, [3, 4], [8] * 5, [7] * 9, [3])  # the second in two chunks
SHAPE = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 200}
ENGINE = {"max_model_len": 32, "num_threads": 1, "max_num_seqs": 4, "num_kv_blocks": 40}
ENGINE |= {"block_size": 8, "max_num_batched_tokens": 16, "log_level": "error"}
RECORDED = {"device": "cuda", "cudagraph_capture_sizes": [4, 16]}
MODES = {
    "recorded": RECORDED,
    "call by call": {"device": "cuda", "enforce_eager": True},
    "preempted": {**RECORDED, "num_kv_blocks": 5},
    "drafts": {
        **RECORDED,
        "speculative_config": {
            "method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2
        },
    },
}  # fmt: skip


def asked(num_tokens: int) -> list[SamplingParams]:
    """Parameters of each prompt: greedy and random, with edits, penalties and log-probabilities."""
    common = {"max_tokens": num_tokens, "ignore_eos": True}
    return [
        SamplingParams(temperature=0, **common),
        SamplingParams(temperature=0.8, top_p=0.9, seed=4, logprobs=2, **common),
        SamplingParams(temperature=1.5, seed=5, **common),
        SamplingParams(temperature=0, presence_penalty=0.7, logit_bias={9: 1.0}, **common),
        SamplingParams(temperature=1.5, top_k=9, seed=5, prompt_logprobs=1, **common),
        SamplingParams(temperature=0, allowed_token_ids=[3, 4, 50, 60], **common),
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    case = CASES["llama"]
    save(random_model(config_of(Case(case.family, {**case.options, **SHAPE})), seed=0), path)
    return path


def llm_for(path: Path, **options) -> LLM:
    return LLM(path, skip_tokenizer_init=True, **{**ENGINE, **options})


def run(llm: LLM, num_prompts: int = len(PROMPTS), num_tokens: int = 5) -> list[RequestOutput]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:num_prompts]]
    return llm.generate(prompts, asked(num_tokens)[:num_prompts], use_tqdm=False)


def tokens(outs: list[RequestOutput]) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in outs]


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[list[int]]:
    with llm_for(model, device="cpu") as llm:
        return tokens(run(llm))


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: Patch) -> None:
    """So there is no need to meet every shape of a launch at the start."""
    monkeypatch.setattr(CudaPlatform, "compiles", False)


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_the_cpu_worker_and_nothing_is_out_of_order(mode, model, wanted):
    with FakeCuda() as cuda, llm_for(model, **MODES[mode]) as llm:
        assert tokens(run(llm)) == wanted
        if mode == "preempted":
            assert llm.llm_engine.stats().num_preemptions > 0
        assert (cuda.num_replays > 5) == (mode != "call by call")
    assert not cuda.faults


def test_a_draft_model_is_in_order_too(model):
    """The model drafts for itself: every draft stands."""
    drafting = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
    with llm_for(model, device="cpu", speculative_config=drafting) as llm:
        expected = tokens(run(llm, 4, 3))
    with FakeCuda() as cuda, llm_for(model, **RECORDED, speculative_config=drafting) as llm:
        assert tokens(run(llm, 4, 3)) == expected
    assert not cuda.faults


@pytest.mark.parametrize("mode", ["recorded", pytest.param("drafts", marks=pytest.mark.slow)])
def test_a_model_of_several_kv_groups_is_in_order_too(mode, tmp_path):
    """Its blocks leave their windows while it decodes."""
    sizes = {**SHAPE, "num_hidden_layers": 3, "sliding_window": 7}
    case = CASES["gemma3"]
    save(random_model(config_of(Case(case.family, {**case.options, **sizes})), seed=0), tmp_path)
    with llm_for(tmp_path, device="cpu") as llm:
        expected = tokens(run(llm, 3, 7))
    with FakeCuda() as cuda, llm_for(tmp_path, **MODES[mode]) as llm:
        assert len(llm.llm_engine.stats().kv_groups) == 3
        assert tokens(run(llm, 3, 7)) == expected
    assert not cuda.faults


@pytest.mark.parametrize("mode", ["recorded", pytest.param("drafts", marks=pytest.mark.slow)])
def test_a_model_with_recurrent_states_is_in_order_too(mode, tmp_path):
    """They are read and written by the steps in flight, one after the other, and copied to
    snapshots, from which a second request with the same prompt starts."""
    sizes = {**SHAPE, "num_hidden_layers": 2, "layer_types": [LINEAR, FULL]}
    sizes |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    case = CASES["qwen3.5"]
    save(random_model(config_of(Case(case.family, {**case.options, **sizes})), seed=0), tmp_path)
    with llm_for(tmp_path, device="cpu") as llm:
        expected = tokens(run(llm, 3, 5))
    with FakeCuda() as cuda, llm_for(tmp_path, **MODES[mode]) as llm:
        assert tokens(run(llm, 3, 5)) == expected
        again = run(llm, 2, 2)
        assert tokens(again) == [one[:2] for one in expected[:2]]
        assert again[1].num_cached_tokens == 16
        assert llm.llm_engine.stats().counters["snapshots.loaded"] == 1
        assert cuda.num_replays > 5
    assert not cuda.faults


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3.5", "bamba"])
def test_prompts_in_chunks_are_in_order_too(family, tmp_path):
    """A recorded step computes the same as its launches one by one."""
    sizes = {**SHAPE, "num_hidden_layers": 2, "layer_types": [LINEAR, FULL]}
    sizes |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    if family == "bamba":
        sizes = {"num_hidden_layers": 2, "attn_layer_indices": [1], "vocab_size": 200}
    case = CASES[family]
    save(random_model(config_of(Case(case.family, {**case.options, **sizes})), seed=0), tmp_path)
    got = []
    for mode in ("recorded", "call by call"):
        options = {**MODES[mode], "dtype": "bfloat16", "max_num_batched_tokens": 32}
        options |= {"max_num_seqs": 2}
        with FakeCuda() as cuda, llm_for(tmp_path, **options) as llm:
            got.append(tokens(run(llm, 2, 3)))
        assert not cuda.faults
    assert got[0] == got[1]


@pytest.mark.parametrize(
    "mode",
    [
        *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("recorded", "draft model")),
        *("drafts", "preempted"),
    ],
)
def test_short_convolutions_are_in_order_too(mode, tmp_path):
    sizes = {**SHAPE, "num_hidden_layers": 2, "layer_types": [CONV, FULL]}
    case = CASES["lfm2"]
    save(random_model(config_of(Case(case.family, {**case.options, **sizes})), seed=0), tmp_path)
    with llm_for(tmp_path, device="cpu") as llm:
        expected = tokens(run(llm, 4))
    drafting = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2}
    options = MODES.get(mode) or {**RECORDED, "speculative_config": drafting}
    with FakeCuda() as cuda, llm_for(tmp_path, **options) as llm:
        assert tokens(run(llm, 4)) == expected
        if mode == "preempted":
            assert llm.llm_engine.stats().num_preemptions > 0
    assert not cuda.faults


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with FakeCuda() as cuda:
        yield cuda
    assert not cuda.faults


def test_the_host_waits_for_no_running_step_while_requests_decode(cuda, model):
    """It sleeps until a step is done, but always has queued the next one before."""
    with llm_for(model, **RECORDED) as llm:
        engine = llm.llm_engine
        for number in range(4):
            prompt = {"prompt_token_ids": PROMPTS[number]}
            engine.add_request(str(number), prompt, asked(20)[number])
        for _ in range(6):
            engine.step()
        cuda.waits.clear()
        before = cuda.num_replays
        for _ in range(4):
            engine.step()
        assert cuda.num_replays == before + 8  # two for each step
        assert len(cuda.waits) >= 4
        assert not [wait for wait in cuda.waits if wait.is_drained]


def test_steps_that_are_run_again_are_in_order_too(cuda, model, monkeypatch):
    """Halves of a step take a staging buffer each, before any of them is collected."""
    prepare = Sampler.prepare

    def failing(self, rows, draws, *args, **kwargs):
        if 1 in draws.slots.tolist():
            raise RuntimeError("asked for")
        return prepare(self, rows, draws, *args, **kwargs)

    with llm_for(model, **RECORDED) as llm:
        monkeypatch.setattr(Sampler, "prepare", failing)
        outs = run(llm, 4, 3)
    assert "error" in [out.outputs[0].finish_reason for out in outs]


# -- the device itself


WORKS: dict[str, Callable[[CudaPlatform, torch.Tensor], object]] = {
    "item": lambda platform, x: x.sum().item(),
    "tolist": lambda platform, x: x.tolist(),
    "cpu": lambda platform, x: x.cpu(),
    "nonzero": lambda platform, x: x.nonzero(),
    "a mask": lambda platform, x: x[x > 0],
    "upload": lambda platform, x: platform.upload(np.ones(3)),
    "memory of the host": lambda platform, x: x.copy_(torch.ones(4)),
    "synchronize": lambda platform, x: torch.cuda.synchronize(),
    "an event": lambda platform, x: platform.mark().synchronize(),
    "the default stream": lambda platform, x: add_elsewhere(x),
}


def add_elsewhere(x: torch.Tensor) -> None:
    with torch.cuda.stream(torch.cuda.default_stream()):
        x.add_(1)


@pytest.mark.parametrize("what", WORKS)
def test_what_a_capture_must_not_do_is_found(what):
    with FakeCuda() as cuda:
        platform = CudaPlatform()
        x = platform.zeros((4,), torch.float32)
        platform.graph().capture(lambda: x.add_(1))
        assert not cuda.faults
        platform.graph().capture(lambda: WORKS[what](platform, x))
    assert any("captur" in text for text in cuda.faults), cuda.faults


def test_a_graph_repeats_what_was_recorded_and_its_memory_is_poison_to_others():
    given, made = [1.0], []
    with FakeCuda() as cuda:
        platform = CudaPlatform()
        x, y = (platform.zeros((4,), torch.float32) for _ in range(2))
        first, second = platform.graph(), platform.graph()
        first.capture(lambda: made.append(x.add_(given[0]) + 1))
        second.capture(lambda: y.copy_(made[-1]))
        given[0] = 5.0
        first.replay()
        second.replay()
        assert (x.tolist(), y.tolist()) == ([2.0] * 4, [3.0] * 4)  # the warm run added one, too
        assert not cuda.faults
        made.clear()
        first.replay()
        second.replay()
        assert y.isnan().all()
    assert "copy_ touches memory that was freed since" in cuda.faults[0]


def test_work_beside_steps_has_one_stream_in_each_thread():
    """torch has few streams, and keeps freed memory for each of them."""
    with FakeCuda():
        platform = CudaPlatform()

        def stream():
            with platform.aside():
                return torch.cuda.current_stream().name

        own = [stream() for _ in range(40)]
        with ThreadPoolExecutor(1) as other:
            theirs = [other.submit(stream).result() for _ in range(2)]
        assert len({*own, torch.cuda.current_stream().name}) == 2
        assert len({*theirs, *own}) == 2


def test_two_streams_may_touch_parts_of_a_tensor_but_not_the_same():
    with FakeCuda() as cuda:
        x, side = torch.zeros(8, device="cuda"), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x[4:].add_(1)
            x[:4].sum()
        x[:4].sum()
        assert not cuda.faults
        x[3:5].mul_(2)
    for earlier in ("add_ on stream 1", "sum on stream 1"):
        assert any("mul_ on the default stream" in text and earlier in text for text in cuda.faults)


def test_freed_memory_is_its_streams_again_at_once_unless_another_uses_it():
    with FakeCuda():
        place = torch.zeros(8, device="cuda").data_ptr()
        x, side = torch.zeros(8, device="cuda"), torch.cuda.Stream()
        assert x.data_ptr() == place
        x.record_stream(side)
        with torch.cuda.stream(side):
            x.sum()
            assert torch.zeros(8, device="cuda").data_ptr() != place
        del x
        assert torch.zeros(8, device="cuda").data_ptr() != place
        torch.cuda.synchronize()
        again = [torch.zeros(8, device="cuda") for _ in range(2)]
        assert place in [one.data_ptr() for one in again]


def test_what_a_launch_reads_and_what_it_writes_is_known():
    with FakeCuda() as cuda:
        table = torch.zeros((2, 4), dtype=torch.int32, device="cuda")
        slots, side = torch.zeros(2, dtype=torch.int32, device="cuda"), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            on_slots.grow_block_tables(table, slots, slots, slots)
        slots.sum()
        table[1].sum()
        assert not cuda.faults
        slots.add_(1)
        table[0].sum()
    for later in ("add_", "sum"):
        assert any(later in text and "and grow_kernel on stream 1" in text for text in cuda.faults)


def test_a_launch_that_leaves_its_tensors_is_found():
    with FakeCuda() as cuda:
        table = torch.zeros((2, 4), dtype=torch.int32, device="cuda")
        slots, too_few = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (5, 4))
        on_slots.grow_block_tables(table, slots, slots, too_few)
    assert any("grow_kernel touches memory of no tensor" in text for text in cuda.faults)

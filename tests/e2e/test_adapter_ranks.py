"""All ranks have the same LoRA adapters, each its part, and answer as one worker does."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.adapter_cases import EXPERTS, HYBRIDS, KINDS, AdapterCase, make
from e2e.references import engine_for, prompts
from e2e.test_adapter_api import GREEDY, OPTIONS, PROMPT, tokens
from e2e.tiny_models import TinyModels
from support import adapter_files
from support.adapted import Adapted, random_adapter, run
from support.box_adapters import make_adapter, write_adapter
from support.live_core import is_running, wait_until
from support.patience import SOON_SECONDS
from support.processes import children, ranks_of

from engine import LLM, LoRARequest, RequestError, SamplingParams
from engine.assets import BOX_MODEL
from engine.core.replay import replay
from engine.errors import ConfigError, EngineDeadError

TWO: dict[str, Any] = {"tensor_parallel_size": 2}
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2}
CORES: dict[str, Any] = {"data_parallel_size": 2, "multiprocess": True}
LORA: dict[str, Any] = {**OPTIONS, "enable_lora": True, "max_loras": 2, "max_cpu_loras": 2}
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llms() -> Iterator[tuple[LLM, LLM]]:
    """One worker, and two ranks."""
    with LLM(BOX_MODEL, **LORA) as alone, LLM(BOX_MODEL, **LORA, **TWO) as together:
        yield alone, together


def adapter(root: Path, name: str, number: int) -> LoRARequest:
    return LoRARequest(name, number, str(write_adapter(root / name, number)))


def failure(llm: LLM, which: LoRARequest) -> str:
    """Why a request with an adapter fails, next to one without."""
    outs = llm.generate([PROMPT] * 2, GREEDY, use_tqdm=False, lora_request=[None, which])
    assert len(outs[0].outputs[0].token_ids) == GREEDY.max_tokens
    assert outs[1].outputs[0].error
    return str(outs[1].outputs[0].error)


def test_adapters_come_go_and_are_replaced(llms: tuple[LLM, LLM], tmp_path: Path) -> None:
    x, y, z = (adapter(tmp_path, name, number) for number, name in enumerate("xyz", 1))
    config, tensors = make_adapter(7)
    here = LoRARequest("here", 8, tensors=tensors, config=config)
    found = []
    for llm in llms:
        write_adapter(tmp_path / "z", 3)
        got = tokens(llm, None, x, y, x, None)
        got += tokens(llm, z, y, here)  # x is no longer in the host's memory
        write_adapter(tmp_path / "z", 4)
        replaced = LoRARequest("z", 3, z.lora_path, load_inplace=True)
        got += tokens(llm, replaced, x, None)
        mixed = llm.generate([PROMPT] * 3, SAMPLED, use_tqdm=False, lora_request=[x, None, y])
        got += [each.outputs[0].token_ids for each in mixed]
        assert llm.llm_engine.remove_lora(1)
        with pytest.raises(RequestError, match="adapter 'x' is not loaded"):
            llm.llm_engine.add_request("x", PROMPT, GREEDY, adapter="x")
        got += tokens(llm, y, LoRARequest("x", 1, y.lora_path))
        found.append(got)
    assert found[0] == found[1]
    assert len({tuple(each) for each in found[0]}) == 9


def test_an_adapter_that_cannot_be_used_is_refused_as_by_one_worker(
    llms: tuple[LLM, LLM], tmp_path: Path
) -> None:
    config, tensors = make_adapter(22)
    narrow = {name: each[:, :24].contiguous() for name, each in tensors.items()}
    bad = LoRARequest("bad", 22, str(adapter_files.write(tmp_path / "bad", config, narrow)))
    nothing = LoRARequest("nothing", 23, str(tmp_path / "nothing"))
    alone, together = ([failure(llm, which) for which in (bad, nothing)] for llm in llms)
    assert alone == together
    assert "has the shape" in alone[0] and "does not exist" in alone[1]


def test_an_adapter_that_one_rank_cannot_read_hurts_nobody(
    llms: tuple[LLM, LLM], tmp_path: Path
) -> None:
    good, (_, llm) = adapter(tmp_path, "one", 31), llms
    directory = os.open(good.lora_path, os.O_RDONLY)
    only_here = fcntl.fcntl(directory, fcntl.F_DUPFD_CLOEXEC, 300)
    os.close(directory)
    try:
        before = tokens(llm, None, good)
        found = failure(llm, LoRARequest("mine", 32, f"/proc/self/fd/{only_here}"))
        for part in ("'mine' was read by rank 0, but not by rank 1", "does not exist", "load it"):
            assert part in found
        assert tokens(llm, None, good) == before
    finally:
        os.close(only_here)


@pytest.mark.slow
def test_a_rank_that_dies_during_a_load_is_named(tmp_path: Path) -> None:
    one, before = adapter(tmp_path, "one", 1), children()
    with LLM(BOX_MODEL, **LORA, **TWO) as llm:
        engine = llm.llm_engine
        (rank,) = set(ranks_of(os.getpid())) - before
        os.kill(rank, signal.SIGSTOP)
        engine.add_request("a", PROMPT, GREEDY, lora_request=one)
        for _ in range(5):
            engine.step()  # which waits for nobody
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"rank 1 \(process \d+\) was killed by SIGKILL"):
            for _ in range(100_000):
                engine.step()
    assert wait_until(lambda: not is_running(rank), SOON_SECONDS) is not None


CASES = (
    *(AdapterCase(family, "plain", KINDS["plain"]) for family in ("phi3", "gemma3", "qwen3")),
    *(AdapterCase("llama", kind, KINDS[kind]) for kind in ("whole modules", "bias", "patterns")),
    AdapterCase("llama", "int8 base", KINDS["rslora"]),
    AdapterCase("gemma3", "embeddings", KINDS["embeddings"]),
    *(AdapterCase(family, "experts", EXPERTS) for family in ("qwen3-moe", "mixtral")),
    *(AdapterCase(family, "hybrid", HYBRIDS[family]) for family in ("falcon-h1", "qwen3.5")),
)


OF_STAGES = (
    *(AdapterCase("llama", kind, KINDS[kind]) for kind in ("dora", "whole modules")),
    AdapterCase("gemma3", "embeddings", KINDS["embeddings"]),
    AdapterCase("qwen3-moe", "experts", EXPERTS),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "sizes"),
    [*((case, TWO) for case in CASES), *((case, STAGES) for case in OF_STAGES)],
    ids=str,
)
def test_families_and_kinds(
    tiny_models: TinyModels, tmp_path: Path, case: AdapterCase, sizes: dict[str, Any]
) -> None:
    made = make(case, tiny_models, tmp_path)
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=12, ignore_eos=True)
    requests = [
        Adapted(ids, which, params) for ids in prompts(2)[2:5] for which in (None, made.adapter)
    ]
    found = []
    for more in ({}, sizes):
        options = {"dtype": "float32", "max_num_batched_tokens": 24, "enable_lora": True, **more}
        with engine_for(str(made.base), **options) as engine:
            found.append([run(engine, requests) for _ in range(2)])
    assert found[0] == found[1]
    assert any(one != other for one, other in zip(found[0][0][::2], found[0][0][1::2], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"max_loras": 1, "max_cpu_loras": 1, "num_kv_blocks": 30},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"async_scheduling": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_few_slots_drafts_and_steps_ahead(
    tiny_models: TinyModels, tmp_path: Path, options: dict[str, Any]
) -> None:
    model = tiny_models.reference("llama")
    each = [None, *(random_adapter(model, tmp_path / str(n), n, rank=n) for n in (1, 4, 9))]
    requests = [Adapted(ids, which) for ids in prompts(2)[2:5] for which in each]
    found = []
    for size in (1, 2):
        more = {"tensor_parallel_size": size, "dtype": "float32", "enable_lora": True, **options}
        with engine_for(str(tiny_models.path("llama")), **more) as engine:
            found.append([run(engine, requests) for _ in range(2)])
    assert found[0] == found[1]


@pytest.mark.slow
def test_modules_of_the_start_two_cores_and_a_step_log(tmp_path: Path) -> None:
    x, y = (adapter(tmp_path, name, number) for number, name in enumerate("xy", 1))
    modules = {"lora_modules": [f"x={x.lora_path}", json.dumps({"name": "y", "path": y.lora_path})]}
    log = tmp_path / "steps"
    found = []
    divided = ({**TWO, "step_log": log}, {**TWO, **CORES}, {**TWO, **STAGES})
    for more in ({}, *divided):
        with LLM(BOX_MODEL, **LORA, **modules, **more) as llm:
            assert {each.name for each in llm.llm_engine.lora_adapters()} == {"x", "y"}
            found.append(tokens(llm, x, None, y, x, y))
    assert found[0] == found[1] == found[2] == found[3]
    outcome = replay(log)
    assert outcome.difference is None and outcome.num_requests == 5
    wrong = {"lora_modules": [f"x={tmp_path / 'nothing'}"]}
    before = children()
    with pytest.raises(ConfigError, match=r"lora_modules: adapter 'x'.* does not exist"):
        LLM(BOX_MODEL, **LORA, **wrong, **TWO)
    assert wait_until(lambda: children() <= before, SOON_SECONDS) is not None


@pytest.mark.slow
def test_dora_that_needs_rows_of_all_ranks_is_refused(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    made = make(AdapterCase("llama", "dora", KINDS["dora"]), tiny_models, tmp_path)
    with LLM(
        str(made.base),
        dtype="float32",
        enable_lora=True,
        skip_tokenizer_init=True,
        max_model_len=64,
        num_threads=1,
        **TWO,
    ) as llm:
        prompt = {"prompt_token_ids": [5, 6, 7]}
        which = LoRARequest("one", 1, str(made.adapter))
        outs = llm.generate([prompt] * 2, GREEDY, use_tqdm=False, lora_request=[None, which])
        assert len(outs[0].outputs[0].token_ids) == GREEDY.max_tokens
        assert "DoRA" in str(outs[1].outputs[0].error) and "tensor_parallel_size=1" in str(
            outs[1].outputs[0].error
        )

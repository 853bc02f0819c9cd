"""The GPU's worker through the public API, its kernels interpreted, beside the CPU's worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from e2e.general_models import make_general_model
from e2e.tiny_models import CASES, Case, config_of, random_model, save
from support import made_tokenizers, triton_interpreter

from engine import LLM, RequestOutput, SamplingParams
from engine.config.env import INTERPRET_CUDA

FAMILIES = ("llama", "qwen3", "gemma2")
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 420,
}
LENGTHS = (6, 17, 3)
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
# Of the GPU's worker. The CPU's has one step in flight, whole prompts and room for everybody.
MODES = {
    "depth 1, call by call, chunks": {
        "async_scheduling": False,
        "enforce_eager": True,
        "max_num_batched_tokens": 9,
    },
    "depth 2, recorded, preempted": {"num_kv_blocks": 5, "cudagraph_capture_sizes": [3, 24]},
}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if triton_interpreter.IS_INTERPRETING:  # else on a GPU
        monkeypatch.setenv(INTERPRET_CUDA, "1")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each family, so small that an interpreter gets through it."""
    root = tmp_path_factory.mktemp("models")
    paths = {name: root / name for name in FAMILIES}
    for seed, (name, path) in enumerate(paths.items()):
        case = CASES[name]
        small = Case(case.family, {**case.options, **SMALL})
        save(random_model(config_of(small), seed=seed), path)
    return paths


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokenizer")
    return made_tokenizers.save(root, made_tokenizers.byte_level())


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 290, (n,), generator=generator).tolist() for n in LENGTHS]


def llm_for(path: Path, **options) -> LLM:
    defaults = {"max_model_len": 32, "num_threads": 1, "max_num_seqs": 4, "num_kv_blocks": 40}
    defaults |= {"block_size": 8, "max_num_batched_tokens": 64, "log_level": "error"}
    if "tokenizer" not in options:
        defaults["skip_tokenizer_init"] = True
    return LLM(path, **{**defaults, **options})


def run(llm: LLM, params: SamplingParams | list[SamplingParams] = GREEDY) -> list[RequestOutput]:
    """What becomes of the prompts with these parameters."""
    asked = [{"prompt_token_ids": ids} for ids in prompts()]
    return llm.generate(asked, params, use_tqdm=False)


def tokens(outs: list[RequestOutput]) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in outs]


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        pytest.param(family, mode, marks=[pytest.mark.slow] * (is_deep != (family == "gemma2")))
        for family in FAMILIES
        for is_deep, mode in enumerate(MODES)
    ],
)
def test_greedy_tokens_are_those_of_the_cpu_worker(family, mode, models):
    with llm_for(models[family], device="cpu") as llm:
        wanted = tokens(run(llm))
    with llm_for(models[family], device="cuda", **MODES[mode]) as llm:
        assert tokens(run(llm)) == wanted
        if "preempted" in mode:
            assert llm.llm_engine.stats().num_preemptions > 0


def test_models_of_transformers_own_run_beside_two_steps_in_flight(tmp_path):
    path = make_general_model("gpt-neox", tmp_path)
    found = []
    for options in ({"device": "cpu"}, {"device": "cuda", "max_num_batched_tokens": 9}):
        with llm_for(path, **options) as llm:
            found.append(tokens(run(llm)))
    assert found[1] == found[0]


def test_seeds_edits_and_logprobs_are_those_of_the_cpu_worker(models, tokenizer):
    """Two steps in flight, recorded: what is edited goes between the two halves of a step."""
    common = {"max_tokens": 5, "ignore_eos": True}
    asked = [
        SamplingParams(temperature=0.9, top_k=50, top_p=0.9, seed=11, **common),
        SamplingParams(
            temperature=0.7,
            seed=12,
            repetition_penalty=1.5,
            frequency_penalty=0.8,
            logprobs=3,
            prompt_logprobs=1,
            **common,
        ),
        SamplingParams(
            temperature=0,
            bad_words=["the", " dog", "x +"],
            logit_bias={7: 2.0},
            logprobs=0,
            **common,
        ),
    ]
    found = []
    for options in ({"device": "cpu"}, {"device": "cuda", "cudagraph_capture_sizes": [4, 32]}):
        with llm_for(models["llama"], tokenizer=tokenizer, **options) as llm:
            found.append(run(llm, asked))
    assert tokens(found[1]) == tokens(found[0])
    for here, there in zip(*found, strict=True):
        for mine, theirs in (
            (here.outputs[0].logprobs, there.outputs[0].logprobs),
            (here.prompt_logprobs, there.prompt_logprobs),
        ):
            assert (mine is None) == (theirs is None)
            for one, other in zip(mine or [], theirs or [], strict=True):
                assert one is other is None or one.keys() == other.keys()
                for token in one or {}:
                    assert one[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)


def third_token_fails(params: SamplingParams, prompt: list[int]):
    if not params.extra_args:
        return None

    def process(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output) == 2:
            raise RuntimeError("third token")
        return logits

    return process


def test_a_failing_request_does_not_disturb_the_others(models):
    """It ends with what it had; the others' tokens are what they are without it."""
    bad = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, extra_args={"fail": 1})
    with llm_for(models["qwen3"], device="cuda", logits_processors=[third_token_fails]) as llm:
        alone = tokens(run(llm))
        outs = run(llm, [GREEDY, bad, GREEDY])
    assert [out.outputs[0].finish_reason for out in outs] == ["length", "error", "length"]
    assert tokens(outs) == [alone[0], alone[1][:2], alone[2]]


def test_a_pool_is_sized_by_a_step_as_large_as_there_can_be(models):
    options = {"num_kv_blocks": None, "max_num_batched_tokens": 8, "enforce_eager": True}
    with llm_for(models["llama"], device="cuda", **options) as llm:
        assert len(tokens(run(llm))) == 3

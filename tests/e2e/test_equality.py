"""Greedy tokens equal transformers' generate, whatever the engine does meanwhile.

One random tiny model of every family, native and general. A request may differ only at a tie
(margin of the two best logits under 1e-4 of the largest); ties are counted and printed, and may
make up at most 0.1 % of all tokens compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
import transformers
from e2e.general_models import make_general_model
from e2e.tiny_models import TinyModels

from engine import EngineArgs, LLMEngine, SamplingParams

NUM_NEW = 14
LENGTHS = (9, 1, 23, 40, 40, 61)
LONG_ONLY = {"phi3-longrope", "olmo3-yarn"}  # transformers changes tables on the way from 1 token
NATIVE = [
    "llama-llama3",
    "mistral-window",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3-longrope",
    "olmo2",
    "granite",
    "smollm3",
    "mixtral",
    "qwen3-moe-mixed",
    "llama-bf16",
]
GENERAL = [
    "gpt2",
    "gpt-neox",
    "phi",
    "starcoder2-window",
    "cohere2-mixed",
    "gemma",
    "olmo3-yarn",
    "gpt-oss-sinks",
    "glm4",
    "deepseek-v3",
]
MODES = {
    "single": {"max_num_seqs": 1, "enable_prefix_caching": False},
    "batched": {"enable_prefix_caching": False},
    "depth-2": {"async_scheduling": True},
    "chunk-1": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "chunk-7": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "chunk-16": {"max_num_batched_tokens": 16, "max_num_seqs": 6, "async_scheduling": True},
    "preempted": {"num_kv_blocks": 24, "block_size": 4},
    "preempted-depth-2": {"num_kv_blocks": 24, "block_size": 4, "async_scheduling": True},
}


class Reference(NamedTuple):
    """What transformers says: tokens, and where its choice was close."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    margins: list[list[float]]


class Tally:
    """Tokens compared, and those that differ at a tie."""

    compared = 0
    ties = 0


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    counts = Tally()
    yield counts
    print(f"\n{counts.ties} ties in {counts.compared} tokens")
    assert counts.ties <= 0.001 * counts.compared


def prompts(shortest: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    lengths = [max(n, shortest) for n in LENGTHS]
    made = [torch.randint(3, 290, (n,), generator=generator).tolist() for n in lengths]
    made[4][:30] = made[3][:30]  # a shared beginning
    return made


def generate(model, ids: list[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens of transformers, and the margin of each choice (share of the largest)."""
    model.generation_config.eos_token_id = None
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
    )
    margins = []
    for logits in out.logits:
        best = logits[0].float().topk(2).values
        margins.append(float((best[0] - best[1]) / logits[0].abs().max()))
    return out.sequences[0, len(ids) :].tolist(), margins


@pytest.fixture(scope="module", params=[*NATIVE, *GENERAL])
def case(request, tiny_models: TinyModels, tmp_path_factory) -> tuple[str, Reference]:
    name = request.param
    if name in NATIVE:
        path, model = tiny_models.path(name), tiny_models.reference(name)
    else:
        path = make_general_model(name, tmp_path_factory.mktemp("general"))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    made = prompts(shortest=12 if name in LONG_ONLY else 1)
    answers = [generate(model, ids) for ids in made]
    reference = Reference(made, [a[0] for a in answers], [a[1] for a in answers])
    return str(path), reference


def engine_for(path: str, **options) -> LLMEngine:
    defaults = {
        "max_model_len": 128,
        "num_threads": 1,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "num_kv_blocks": 200,
        "block_size": 8,
    }
    args = EngineArgs(
        model=path, skip_tokenizer_init=True, log_level="error", **{**defaults, **options}
    )
    return LLMEngine.from_engine_args(args)


def run(engine: LLMEngine, made: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Tokens and cached tokens of each prompt."""
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, detokenize=False)
    for index, ids in enumerate(made):
        engine.add_request(str(index), ids, params)
    last = {}
    while engine.has_unfinished_requests():
        for out in engine.step():
            last[int(out.request_id)] = out
    outs = [last[index] for index in range(len(made))]
    assert all(out.finished for out in outs)
    return [out.outputs[0].token_ids for out in outs], [out.num_cached_tokens for out in outs]


def compare(reference: Reference, tokens: list[list[int]], tally: Tally) -> None:
    """Token for token, up to the first tie."""
    for right, margins, ours in zip(reference.tokens, reference.margins, tokens, strict=True):
        for position, (one, other) in enumerate(zip(right, ours, strict=True)):
            tally.compared += 1
            if one != other:
                assert margins[position] < 1e-4, (
                    f"token {position} is {other}, transformers says {one} by a margin of "
                    f"{margins[position]:.2e}"
                )
                tally.ties += 1
                break


@pytest.mark.parametrize("mode", MODES)
def test_same_tokens_as_transformers(case, mode, tally):
    path, reference = case
    with engine_for(path, **MODES[mode]) as engine:
        tokens, _ = run(engine, reference.prompts)
        compare(reference, tokens, tally)
        if mode.startswith("preempted"):
            assert engine.stats().num_preemptions > 0, "the pool was meant to be too small"


@pytest.mark.parametrize("depth", [1, 2])
def test_same_tokens_from_a_cold_a_warm_and_an_evicted_cache(case, depth, tally):
    path, reference = case
    made = reference.prompts
    with engine_for(path, num_kv_blocks=36, async_scheduling=depth == 2) as engine:
        tokens, cached = run(engine, made)
        compare(reference, tokens, tally)
        for ids, right in zip(made, tokens, strict=True):  # warm: each right behind itself
            run(engine, [ids])
            again, cached = run(engine, [ids])
            assert again == [right]
            assert cached[0] == (len(ids) - 1) // 8 * 8
        strangers = [[(i * 37 + j) % 290 + 5 for j in range(60)] for i in range(8)]
        run(engine, strangers)  # evicts
        tokens, cached = run(engine, made[3:4])
        assert cached == [0]
        compare(Reference(made[3:4], reference.tokens[3:4], reference.margins[3:4]), tokens, tally)

"""LoRA adapters of every kind compute what peft computes, together with others and without."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.adapter_cases import LINEARS, NUM_NEW, AdapterCase, Answers, answers, cases, make
from e2e.references import WHOLE, Tally, compare, engine_for, prompts
from e2e.tiny_models import Case, TinyModels, config_of, random_model, save
from support import adapter_files

from engine import LLMEngine, LoRARequest, RequestOutput, SamplingParams

TOP = 5  # log-probabilities that are compared
ALWAYS = (
    *("llama, plain", "phi3, patterns", "gemma3, expression", "qwen3, dora", "llama, bias"),
    *("llama, whole modules", "gemma3, embeddings", "llama, int8 base", "qwen3-moe, experts"),
    *("falcon-h1, hybrid", "qwen3.5, hybrid"),
)


def few(made: list[AdapterCase]) -> list[Any]:
    """All cases, of which only some are tested always."""
    assert {str(case) for case in made} >= set(ALWAYS)
    slow = [pytest.mark.slow]
    return [
        pytest.param(case, marks=[] if str(case) in ALWAYS else slow, id=str(case)) for case in made
    ]


def some_prompts() -> list[list[int]]:
    return [prompts()[index] for index in (0, 2, 5)]


def run(
    engine: LLMEngine, requests: list[tuple[list[int], LoRARequest | None]], **options: Any
) -> list[RequestOutput]:
    """The last output of each request, all added at once."""
    params = SamplingParams(**{"temperature": 0, "max_tokens": NUM_NEW, **WHOLE, **options})
    for number, (ids, adapter) in enumerate(requests):
        engine.add_request(str(number), ids, params, lora_request=adapter)
    last = {}
    while engine.has_unfinished_requests():
        for out in engine.step():
            last[int(out.request_id)] = out
    return [last[number] for number in range(len(requests))]


def check(outs: list[RequestOutput], expected: Answers, tally: Tally) -> None:
    """Tokens are equal but for ties, and log-probabilities within 1e-4 until then."""
    compare(expected.reference, [list(out.outputs[0].token_ids) for out in outs], tally)
    for out, own, all_logprobs in zip(
        outs, expected.reference.tokens, expected.logprobs, strict=True
    ):
        found = out.outputs[0].logprobs
        assert found is not None
        for position, right in enumerate(all_logprobs):
            if list(out.outputs[0].token_ids)[:position] != own[:position]:
                break  # after a tie
            for token, one in found[position].items():
                assert abs(one.logprob - float(right[token])) < 1e-4 * max(1, abs(one.logprob))


@pytest.mark.parametrize("case", few(list(cases())))
def test_what_peft_computes(
    tiny_models: TinyModels, tmp_path: Path, tally: Tally, case: AdapterCase
) -> None:
    made, given = make(case, tiny_models, tmp_path), some_prompts()
    plain, adapted = answers(made.plain, given), answers(made.adapted, given)
    pairs = zip(plain.reference.tokens, adapted.reference.tokens, strict=True)
    assert any(one != other for one, other in pairs), "the adapter changes answers"
    adapter = LoRARequest("one", 1, str(made.adapter))
    with engine_for(str(made.base), enable_lora=True, max_loras=2, dtype="float32") as engine:
        both = [(ids, which) for ids in given for which in (adapter, None)]
        outs = run(engine, both, logprobs=TOP)
        check(outs[::2], adapted, tally)
        check(outs[1::2], plain, tally)
        again = run(engine, both, logprobs=TOP)  # recorded, and from the prefix cache
        check(again[::2], adapted, tally)
        check(again[1::2], plain, tally)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["embed_tokens", "o_proj"]},
        {"target_modules": ["o_proj"], "modules_to_save": ["embed_tokens"]},
    ],
    ids=lambda options: next(reversed(options)),
)
@pytest.mark.parametrize("ties", [False, True])
def test_output_layers_tied_to_the_embedding(
    tiny_models: TinyModels, tmp_path: Path, tally: Tally, options: dict[str, Any], ties: bool
) -> None:
    case = AdapterCase("llama-mha-tied-biased", "", {**options, "ensure_weight_tying": ties})
    made, given = make(case, tiny_models, tmp_path), some_prompts()
    adapter = LoRARequest("one", 1, str(made.adapter))
    with engine_for(str(made.base), enable_lora=True, dtype="float32") as engine:
        outs = run(engine, [(ids, adapter) for ids in given], logprobs=TOP)
    check(outs, answers(made.adapted, given), tally)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_other_rows_change_no_bit(tmp_path: Path, quantization: str | None) -> None:
    """In bfloat16, with and without an adapter: products that apply activations, too."""
    options = {"intermediate_size": 128, "num_hidden_layers": 2}
    base = random_model(config_of(Case("Llama", options)), seed=3)
    made = adapter_files.trained(copy.deepcopy(base), target_modules=LINEARS)
    path = adapter_files.save(made, tmp_path / "adapter")
    save(base, tmp_path / "base", torch.bfloat16)
    adapter = LoRARequest("one", 1, str(path))
    both = [(ids, which) for ids in some_prompts() for which in (adapter, None)]
    settings = {"enable_prefix_caching": False, "quantization": quantization}
    with engine_for(str(tmp_path / "base"), enable_lora=True, **settings) as engine:
        for _ in range(2):  # the second time steps are recorded
            together = run(engine, both, logprobs=TOP)
            alone = [run(engine, [one], logprobs=TOP)[0] for one in both]
            assert list(map(exact, together)) == list(map(exact, alone))
    with engine_for(str(tmp_path / "base"), **settings) as engine:
        plain = run(engine, both[1::2], logprobs=TOP)
    assert list(map(exact, plain)) == list(map(exact, together[1::2]))


def exact(out: RequestOutput) -> list[dict[int, float]]:
    """Log-probabilities of the answer's tokens."""
    found = out.outputs[0].logprobs
    assert found is not None
    return [{token: one.logprob for token, one in each.items()} for each in found]

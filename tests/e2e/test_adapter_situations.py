"""Sixteen LoRA adapters of all kinds on one model, and none, in whatever situation."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from e2e.adapter_cases import Answers, answers
from e2e.references import WHOLE, Tally, compare, engine_for, prompts
from e2e.test_ngram import NGRAM
from e2e.tiny_models import TinyModels
from support import adapter_files

from engine import LLM, LoRARequest, RequestOutput, SamplingParams, StructuredOutputsParams
from engine.assets import BOX_MODEL
from engine.core.replay import replay

NAME = "qwen3-moe"
NUM_NEW = 10
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
KINDS: list[dict[str, Any]] = [
    {"target_modules": LINEARS},
    {"target_modules": ["q_proj"], "r": 1},
    {"target_modules": LINEARS, "r": 11, "use_rslora": True},
    {"target_modules": ["v_proj", "o_proj"], "use_dora": True},
    {"target_modules": ["v_proj"], "target_parameters": EXPERTS},
    {"target_modules": ["embed_tokens", "lm_head"]},
    {"target_modules": ["o_proj"], "modules_to_save": ["lm_head"]},
    {"target_modules": ["k_proj"], "target_parameters": ["gate.weight", EXPERTS[1]]},
]


class Adapters(NamedTuple):
    """A model, sixteen adapters of it and none, a prompt for each, and the answers."""

    base: str
    requests: list[LoRARequest | None]
    prompts: list[list[int]]
    expected: list[Answers]


@pytest.fixture(scope="module")
def many(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    plain, root = tiny_models.reference(NAME), tmp_path_factory.mktemp("adapters")
    requests: list[LoRARequest | None] = [None]
    given = [prompts()[2]]
    expected = [answers(plain, given, NUM_NEW)]
    for number in range(2 * len(KINDS)):
        options = KINDS[number % len(KINDS)]
        made = adapter_files.trained(copy.deepcopy(plain), number, **options)
        path = adapter_files.save(made, root / str(number))
        requests.append(LoRARequest(f"adapter {number}", number + 1, str(path)))
        # All begin alike, so that a prefix that another adapter has computed would be found.
        given.append([*prompts()[2], *range(5, 5 + number % 4)])
        expected.append(answers(made.get_base_model(), given[-1:], NUM_NEW))
    assert len({tuple(one.reference.tokens[0]) for one in expected}) > 13, "adapters differ"
    return Adapters(str(tiny_models.path(NAME)), requests, given, expected)


def outputs(engine: Any, many: Adapters, params: SamplingParams) -> list[RequestOutput]:
    for number, (adapter, ids) in enumerate(zip(many.requests, many.prompts, strict=True)):
        engine.add_request(str(number), ids, params, lora_request=adapter)
    last = {}
    while engine.has_unfinished_requests():
        for out in engine.step():
            last[int(out.request_id)] = out
    return [last[number] for number in range(len(many.requests))]


SITUATIONS: dict[str, dict[str, Any]] = {
    "together": {"max_num_seqs": 17},
    "chunks, two steps in flight": {"max_num_batched_tokens": 13, "async_scheduling": True},
    "few slots, preempted": {"max_loras": 3, "num_kv_blocks": 14, "max_num_seqs": 17},
    "drafts": {**NGRAM, "max_num_seqs": 17},
    "drafts of the base": {"drafts_of_base": 2, "max_num_seqs": 17},
    "core in a process": {"multiprocess": True, "max_num_seqs": 17},
}


OFTEN = [name for name in SITUATIONS if name != "core in a process"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=[pytest.mark.slow] * (name not in OFTEN))
        for name, options in SITUATIONS.items()
    ],
)
def test_sixteen_adapters_and_none(many: Adapters, tally: Tally, options: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, **WHOLE)
    defaults = {"enable_lora": True, "max_loras": 16, "dtype": "float32"}
    options = dict(options)
    if num := options.pop("drafts_of_base", 0):
        drafting = {"method": "draft_model", "model": many.base, "num_speculative_tokens": num}
        options["speculative_config"] = drafting
    with engine_for(many.base, **{**defaults, **options}) as engine:
        for _ in range(2):  # the second time from the prefix cache
            outs = outputs(engine, many, params)
            for out, expected in zip(outs, many.expected, strict=True):
                compare(expected.reference, [list(out.outputs[0].token_ids)], tally)
        stats = engine.stats()
        assert stats is not None
        if "num_kv_blocks" in options:
            assert stats.num_preemptions > 0
        else:
            assert max(out.num_cached_tokens for out in outs) > 0


def test_several_answers(many: Adapters) -> None:
    several = SamplingParams(n=3, top_k=1, max_tokens=NUM_NEW, **WHOLE)
    with engine_for(many.base, enable_lora=True, max_loras=16, dtype="float32") as engine:
        for out, expected in zip(outputs(engine, many, several), many.expected, strict=True):
            tokens = expected.reference.tokens[0]
            assert [list(one.token_ids) for one in out.outputs] == [tokens] * 3


def test_prompts_are_scored_with_their_adapters(many: Adapters) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, **WHOLE)
    options = {"max_num_batched_tokens": 16, "enable_prefix_caching": False, "dtype": "float32"}
    with engine_for(many.base, enable_lora=True, max_loras=16, **options) as engine:
        outs = outputs(engine, many, params)
    found = [scores(out) for out in outs]
    for number in range(1, len(outs)):
        assert found[number][:5] != found[0][:5], "no adapter scores as the base does"
    with engine_for(many.base, enable_lora=True, dtype="float32") as engine:
        alone = Adapters(many.base, many.requests[5:8], many.prompts[5:8], [])
        again = [scores(out) for out in outputs(engine, alone, params)]
    torch.testing.assert_close(torch.tensor(again[0]), torch.tensor(found[5]), rtol=1e-5, atol=1e-5)


def scores(out: RequestOutput) -> list[float]:
    assert out.prompt_logprobs is not None
    ids = out.prompt_token_ids
    return [one[ids[at]].logprob for at, one in enumerate(out.prompt_logprobs) if one is not None]


def test_a_run_replays_to_identical_plans(many: Adapters, tmp_path: Path) -> None:
    log = tmp_path / "steps.log"
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, **WHOLE)
    options = {"max_num_batched_tokens": 13, "async_scheduling": True, "num_kv_blocks": 14, **NGRAM}
    with engine_for(many.base, enable_lora=True, max_loras=3, step_log=log, **options) as engine:
        outputs(engine, many, params)
    outcome = replay(log)
    assert outcome.difference is None and outcome.num_steps > 20


def test_an_adapter_with_numbers_that_are_not_finite_fails_its_requests_only(
    many: Adapters, tiny_models: TinyModels, tmp_path: Path
) -> None:
    made = adapter_files.trained(copy.deepcopy(tiny_models.reference(NAME)), **KINDS[0])
    next(p for name, p in made.named_parameters() if "lora_B" in name).data.fill_(float("nan"))
    broken = LoRARequest("broken", 99, str(adapter_files.save(made, tmp_path)))
    requests = [*many.requests[:3], broken, *many.requests[3:6]]
    given = [*many.prompts[:3], many.prompts[0], *many.prompts[3:6]]
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, **WHOLE)
    with engine_for(many.base, enable_lora=True, max_loras=16, dtype="float32") as engine:
        outs = outputs(engine, Adapters(many.base, requests, given, []), params)
    assert outs[3].outputs[0].finish_reason == "error"
    for out, expected in zip(outs[:3] + outs[4:], many.expected, strict=False):
        assert list(out.outputs[0].token_ids) == expected.reference.tokens[0]


def test_grammars_seeds_and_penalties_meet_the_logits_of_the_adapter(tmp_path: Path) -> None:
    """They equal those of a model into which the adapter was merged."""
    base = transformers.AutoModelForCausalLM.from_pretrained(BOX_MODEL, dtype=torch.float32)
    made = adapter_files.trained(copy.deepcopy(base), target_modules="all-linear")
    adapter = LoRARequest("one", 1, str(adapter_files.save(made, tmp_path / "adapter")))
    merged = tmp_path / "merged"
    made.merge_and_unload().save_pretrained(merged)
    for file in BOX_MODEL.iterdir():
        if not (merged / file.name).exists():
            shutil.copy(file, merged)
    expression = StructuredOutputsParams(regex=r"[a-z]{3,9}( [a-z]{2,7}){2}\.")
    params = [
        SamplingParams(temperature=0, max_tokens=40, structured_outputs=expression),
        SamplingParams(temperature=0.8, seed=5, n=2, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=20, presence_penalty=1.5, frequency_penalty=0.5),
    ]
    texts = ["The cat", "Once upon a time", "A"]
    options = {"dtype": "float32", "max_model_len": 256, "num_kv_blocks": 64, "num_threads": 1}
    with LLM(str(merged), **options) as llm:
        wanted = [answered(out) for out in llm.generate(texts, params, use_tqdm=False)]
    with LLM(str(BOX_MODEL), enable_lora=True, **options) as llm:
        outs = llm.generate(
            [text for text in texts for _ in range(2)],
            [one for one in params for _ in range(2)],
            use_tqdm=False,
            lora_request=[adapter, None] * 3,
        )
    found = [answered(out) for out in outs]
    assert found[::2] == wanted
    assert all(one != other for one, other in zip(found[1::2], wanted, strict=True))


def answered(out: RequestOutput) -> list[list[int]]:
    return [list(one.token_ids) for one in out.outputs]

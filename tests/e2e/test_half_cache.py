"""A cache of smaller numbers: what transformers computes if its own cache rounds as ours does."""

from __future__ import annotations

import pytest
import torch
import transformers
from e2e.general_models import make_general_model
from e2e.paged import PagedRun
from e2e.test_forward import load, tokens_of
from e2e.tiny_models import TinyModels

from engine import EngineArgs, LLMEngine, SamplingParams
from engine.errors import ConfigError
from engine.worker.memory import choose_kv_dtype
from kernels.reference.kv_rows import decode_rows, encode_rows

NATIVE = ["gemma2", "phi3-partial-window"]
GENERAL = ["gpt-oss-sinks"]
NUM_NEW = 24


KINDS = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
HELD = {"bfloat16": 2, "fp8": 4, "int8": 4 * 16 / 20}
"""Tokens that the same bytes hold, times those of float32, for heads of 16 numbers."""


class RoundingCache(transformers.DynamicCache):
    """Keys and values as a cache of another type gives them back."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def update(self, key_states, value_states, *where, **options):
        rounded = (
            decode_rows(encode_rows(x, self._dtype)).float() for x in (key_states, value_states)
        )
        return super().update(*rounded, *where, **options)


@pytest.fixture(params=KINDS)
def kept(request) -> str:
    """A value of ``kv_cache_dtype``."""
    return request.param


@pytest.fixture(scope="module", params=[*NATIVE, *GENERAL])
def case(request, tiny_models: TinyModels, tmp_path_factory):
    """Path of a model, and transformers' own."""
    name = request.param
    if name in NATIVE:
        return tiny_models.path(name), tiny_models.reference(name)
    path = make_general_model(name, tmp_path_factory.mktemp("general"))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    return path, model.eval()


def off_by(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def test_logits_are_those_of_rounded_keys_and_values(case, kept: str, seed: int) -> None:
    path, reference = case
    tokens = tokens_of(seed)
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        exact = reference(ids, use_cache=False).logits[0].float()
        rounded = reference(ids, past_key_values=RoundingCache(KINDS[kept])).logits[0].float()
    lost = off_by(exact, rounded)
    for chunk in (None, 1, 7):
        run = PagedRun(load(path), seed=seed, kv_dtype=KINDS[kept])
        # A last bit that differs before rounding may be a step of the type after it, seldom.
        assert off_by(run.prefill("a", tokens, chunk), rounded) < 0.1 * lost, chunk


def engine_for(path, **options) -> LLMEngine:
    fixed = {"skip_tokenizer_init": True, "log_level": "error", "num_threads": 1, "block_size": 8}
    fixed["device"] = "cpu"  # a GPU keeps keys and values in the type that it computes in
    return LLMEngine.from_engine_args(
        EngineArgs(model=path, max_model_len=128, **{"max_num_seqs": 4, **fixed, **options})
    )


def greedy(engine: LLMEngine, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, detokenize=False)
    for index, ids in enumerate(prompts):
        engine.add_request(str(index), ids, params)
    found: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        found |= {out.request_id: out.outputs[0].token_ids for out in engine.step()}
    return [found[str(index)] for index in range(len(prompts))]


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 7}, {"num_kv_blocks": 20}, {"async_scheduling": True}],
    ids=["plain", "chunked", "preempted", "depth-2"],
)
def test_greedy_tokens_are_those_of_rounded_keys_and_values(tiny_models, kept, options) -> None:
    reference = tiny_models.reference("llama")
    prompts = [tokens_of(length, length) for length in (5, 40, 40, 61)]
    made = {"kv_cache_dtype": kept, "num_kv_blocks": 100, **options}
    with engine_for(tiny_models.path("llama"), **made) as engine:
        ours = greedy(engine, prompts)
    for ids, tokens in zip(prompts, ours, strict=True):
        with torch.inference_mode():
            whole = torch.tensor([ids + tokens])
            cache = RoundingCache(KINDS[kept])
            logits = reference(whole, past_key_values=cache).logits[0].float()
        choices = logits[len(ids) - 1 : -1]
        best, chosen = choices.max(-1).values, choices[range(NUM_NEW), tokens]
        assert ((best - chosen) <= 1e-3 * choices.abs().amax(-1)).all(), "no token that is best"


def test_the_same_bytes_hold_more_blocks(tiny_models, kept: str) -> None:
    numbers = []
    for chosen in ("auto", kept):
        made = {"kv_cache_dtype": chosen, "kv_cache_memory_bytes": 1 << 17, "max_num_seqs": 16}
        with engine_for(tiny_models.path("llama"), **made) as engine:
            numbers.append(engine.session.client.decided.num_kv_blocks)
    assert 0 <= numbers[1] - HELD[kept] * numbers[0] < HELD[kept]


def test_a_cache_no_kernel_reads_is_refused(tiny_models) -> None:
    with pytest.raises(ConfigError, match="is 'bfloat16', but the model is computed in float16"):
        choose_kv_dtype("bfloat16", torch.float16, "cuda")
    for name in ("int8", "int8_per_token_head"):
        with pytest.raises(ConfigError, match=f"is '{name}', which needs device='cpu', got 'cuda'"):
            choose_kv_dtype(name, torch.bfloat16, "cuda")
    with pytest.raises(
        ConfigError, match="'fp8_e5m2', must be one of: auto, bfloat16, fp8, fp8_e4"
    ):
        engine_for(tiny_models.path("llama"), kv_cache_dtype="fp8_e5m2")

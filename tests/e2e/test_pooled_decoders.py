"""Pooled requests of decoders have transformers' hidden states: chunked, from the prefix cache, and
in a small pool that preempts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3Model

from engine import LLM, LoRARequest
from engine.config.args import EngineArgs
from engine.core.build import build_core
from engine.core.inproc_client import InprocClient
from engine.messages.params import SamplingParams
from engine.messages.pooling import PoolingParams
from engine.messages.requests import AddRequest
from engine.messages.vectors import Vectors, as_vectors

VOCAB = 200
LONGEST = 128
MODES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "LAST": lambda hidden: hidden[-1],
    "MEAN": lambda hidden: hidden.mean(0),
    "CLS": lambda hidden: hidden[0],
}
SMALL = {"max_num_batched_tokens": 16, "max_num_seqs": 3, "num_kv_blocks": 12}
"""Prompts are chunked, and running requests preempt each other."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Qwen3Model]:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=LONGEST,
    )
    made = Qwen3Model(config).eval()
    path = tmp_path_factory.mktemp("qwen3")
    made.save_pretrained(path)
    return path, made


def open_core(path: Path, **options: Any) -> InprocClient:
    args = EngineArgs(model=path, skip_tokenizer_init=True, dtype="float32", **options)
    core = build_core(args.create_config())
    assert isinstance(core, InprocClient)
    return core


def pooled(core: InprocClient, prompts: list[list[int]], params: PoolingParams) -> list[Vectors]:
    """The results of these prompts, submitted together."""
    names = [f"r{index}" for index in range(len(prompts))]
    refused = core.add_all(
        [
            AddRequest(name, prompt, SamplingParams(max_tokens=1), 0, 0.0, 1, pooling=params)
            for name, prompt in zip(names, prompts, strict=True)
        ]
    )
    assert not refused
    found: dict[str, Vectors] = {}
    while len(found) < len(names):
        for out in core.step():
            assert not out.token_ids
            assert [out.request_ids[end.index] for end in out.finished] == out.request_ids
            assert {end.reason for end in out.finished} == {"stop"}
            assert out.pooled is not None
            for row, width, values in out.pooled.entries():
                vectors = as_vectors(values, width, by_token=params.is_by_token)
                found[out.request_ids[row]] = vectors
    return [found[name] for name in names]


def made_prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (1, 2, 17, 40, 5, 64, LONGEST)]
    return [*prompts, [*prompts[-1][:100], 3, 4], prompts[-1][:48]]


def hidden_states(model: Qwen3Model, prompts: list[list[int]]) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]


def worst(found: list[Vectors], expected: list[torch.Tensor]) -> float:
    assert [each.shape for each in found] == [tuple(each.shape) for each in expected]
    pairs = zip(found, expected, strict=True)
    return max(float((torch.from_numpy(a) - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("options", [{}, SMALL], ids=["whole", "small"])
@pytest.mark.parametrize("mode", MODES)
def test_a_vector_is_pooled_from_transformers_hidden_states(
    model: tuple[Path, Qwen3Model], mode: str, options: dict[str, Any]
) -> None:
    path, reference = model
    prompts = made_prompts()
    core = open_core(path, pooler_config={"pooling_type": mode}, runner="pooling", **options)
    found = pooled(core, prompts, PoolingParams(task="embed"))
    again = pooled(core, prompts, PoolingParams(task="embed"))  # from the prefix cache, for LAST
    stats = core.stats()
    core.shutdown()
    expected = [MODES[mode](each) for each in hidden_states(reference, prompts)]
    assert worst(found, expected) < 1e-5
    assert worst(again, expected) < 1e-5
    assert stats is not None
    assert (stats.prefix_hits > 0) == (mode == "LAST")


@pytest.mark.parametrize("options", [{}, SMALL], ids=["whole", "small"])
def test_each_token_has_a_vector(model: tuple[Path, Qwen3Model], options: dict[str, Any]) -> None:
    path, reference = model
    prompts = made_prompts()
    core = open_core(path, runner="pooling", **options)
    pooled(core, prompts, PoolingParams(task="embed"))  # fills the prefix cache, which is not read
    found = pooled(core, prompts, PoolingParams(task="token_embed"))
    core.shutdown()
    assert worst(found, hidden_states(reference, prompts)) < 1e-5


def test_a_prompt_may_be_as_long_as_the_model(model: tuple[Path, Qwen3Model]) -> None:
    core = open_core(model[0], runner="pooling")
    request = AddRequest("a", [1] * (LONGEST + 1), SamplingParams(max_tokens=1), 0, 0.0, 1)
    (error,) = core.add_all([request]).values()
    assert "returns vectors or scores" in str(error)
    too_long = AddRequest(
        "a", [1] * (LONGEST + 1), SamplingParams(max_tokens=1), 0, 0.0, 1, pooling=PoolingParams()
    )
    (error,) = core.add_all([too_long]).values()
    assert f"it must have 1 to {LONGEST}" in str(error)
    core.shutdown()


def test_an_adapter_changes_the_vectors_of_its_requests(
    model: tuple[Path, Qwen3Model], tmp_path: Path
) -> None:
    torch.manual_seed(2)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    with warnings.catch_warnings():  # peft reads what transformers will rename
        warnings.simplefilter("ignore", FutureWarning)
        adapted = get_peft_model(Qwen3Model.from_pretrained(model[0]), config).eval()
    adapted.save_pretrained(tmp_path)
    adapter = LoRARequest("a", 1, str(tmp_path))
    prompts = made_prompts()[:5]
    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True}
    with LLM(model[0], enable_lora=True, max_loras=1, **options) as llm:
        every = llm.encode(
            [*prompts, *prompts],
            lora_request=[adapter] * len(prompts) + [None] * len(prompts),
            use_tqdm=False,
        )
    found = [each.outputs.data for each in every]
    with torch.inference_mode():
        right = [adapted(torch.tensor([p])).last_hidden_state[0, -1] for p in prompts]
    base = [hidden[-1] for hidden in hidden_states(model[1], prompts)]
    assert worst(found, [*right, *base]) < 1e-5
    assert worst(found[: len(prompts)], base) > 0.01

"""What the worker of one rank launches on an H100, of models in their real sizes.

A rank is driven as in `compile_keys`: nothing is computed, and other ranks are not there.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from e2e.tiny_models import FULL, LINEAR, Case, config_of

from engine import SamplingParams
from engine.core import ranks as of_core
from engine.core.ranks import RankOfModel
from engine.models.weights import RandomWeights
from kernels.triton.launch import Launch
from support.compile_keys import Keys, engine_of, recorded
from tools.shipped import Shipped, other_than_attention

HYBRID = {"layer_types": [LINEAR, FULL]}
MODELS = {
    "Llama 3 70B": Case(
        "Llama",
        {
            "hidden_size": 8192,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "intermediate_size": 28672,
            "vocab_size": 128256,
        },
    ),
    "Qwen3 32B": Case(
        "Qwen3",
        {
            "hidden_size": 5120,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 25600,
            "vocab_size": 151936,
        },
    ),
    "Qwen3 30B A3B": Case(
        "Qwen3Moe",
        {
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "vocab_size": 151936,
        },
    ),
    "Qwen3-Next 80B": Case(
        "Qwen3Next",
        {
            **HYBRID,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "partial_rotary_factor": 0.25,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "vocab_size": 151936,
        },
    ),
    "Granite 4 H Small": Case(
        "GraniteMoeHybrid",
        {
            **HYBRID,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "attention_multiplier": 0.0078125,
            "position_embedding_type": "nope",
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "num_local_experts": 72,
            "num_experts_per_tok": 10,
            "intermediate_size": 768,
            "shared_intermediate_size": 1536,
            "vocab_size": 100352,
        },
    ),
}
REQUESTS = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 2, "presence_penalty": 0.5},
)


class Alone:
    """The operations of a rank whose neighbours have zeros."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros((self.size, *x.shape))

    def barrier(self) -> None:
        pass

    def check(self) -> None:
        pass

    def limit(self, wait_seconds: float) -> None:
        pass

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


class LaunchesMet(Keys):
    """The first launch of each key."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []

    def meet(self, launch: Launch) -> None:
        known = len(self.first)
        super().meet(launch)
        if len(self.first) > known:
            self.launches.append(launch)


@contextmanager
def of_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> Iterator[LaunchesMet]:
    """Engines that start within it are this rank's; weights and products are zeros."""

    def make_workers(config, info, features, failures, pooling, make_features):
        one = Alone(rank, size)
        return RankOfModel(config, info, features, failures, pooling, one)

    monkeypatch.setattr(of_core, "make_workers", make_workers)
    # On sm_90, too, these prompts go token by token.
    delta_rule = importlib.import_module("kernels.triton.delta_rule")
    monkeypatch.setattr(delta_rule, "has_chunks", lambda x: False)
    monkeypatch.setattr(
        RandomWeights, "load", lambda self, target, dtype: torch.zeros(target.shape, dtype=dtype)
    )
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda x, w, bias=None: x.new_zeros((*x.shape[:-1], len(w)))
    )
    keys = LaunchesMet()
    with recorded(monkeypatch, keys):
        yield keys


def launches_of(
    name: str, size: int, rank: int, root: Path, monkeypatch: pytest.MonkeyPatch
) -> list[Shipped]:
    """What a rank launches at its start, and in steps with a prompt and with decodes."""
    case = MODELS[name]
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 8192}
    config = config_of(Case(case.family, {**case.options, **sizes}))
    config.architectures = [f"{case.family}ForCausalLM"]
    config.save_pretrained(root)
    with of_rank(monkeypatch, rank, size) as met:
        with engine_of(root, tensor_parallel_size=size) as engine:
            for number, params in enumerate(REQUESTS):
                ids = {"prompt_token_ids": [5] * 40}
                asked = SamplingParams(max_tokens=3, ignore_eos=True, **params)
                engine.add_request(str(number), ids, asked)
            while engine.has_unfinished_requests():
                engine.step()
        return [other_than_attention(one) for one in met.launches]

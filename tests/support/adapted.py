"""Requests with adapters, given to the core of an engine, and models with merged adapters."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine import LLMEngine
from engine.lora.adapter import Adapter
from engine.lora.files import read_adapter
from engine.messages.adapters import AdapterSource
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest
from support import adapter_files


class Adapted(NamedTuple):
    """A prompt, and the adapter to use."""

    ids: list[int]
    adapter: Path | None = None
    params: SamplingParams = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)


def random_adapter(
    model: Any, root: Path, seed: int, *, rank: int = 4, size: float = 1.0, only: str = ""
) -> Path:
    """Write an adapter of all linear modules of a model of transformers, but the output layer and
    experts, with random tensors. only: a part of the modules' names."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and only in path and "lm_head" not in path:
            if ".experts." in path:
                continue
            outs, ins = module.weight.shape
            a = torch.randn(rank, ins, generator=generator) / ins**0.5
            b = size * torch.randn(outs, rank, generator=generator) * module.weight.std()
            made[f"{adapter_files.PREFIX}{path}.lora_A.weight"] = a
            made[f"{adapter_files.PREFIX}{path}.lora_B.weight"] = b
    config = adapter_files.config_of(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    return adapter_files.write(root, config, made)


def merged_model(model: Any, adapter: Adapter | Path | None) -> Any:
    """A copy of a model of transformers into which an adapter is merged."""
    made = copy.deepcopy(model)
    if isinstance(adapter, Path):
        adapter = read_adapter(str(adapter), "one")
    if adapter is not None:
        state = {name: tensor.detach() for name, tensor in made.state_dict().items()}
        changed = adapter_files.merged(state, adapter)
        made.load_state_dict({name: changed[name].to(state[name].dtype) for name in state})
    return made.eval()


def run(engine: LLMEngine, requests: Sequence[Adapted]) -> list[list[int]]:
    """The tokens of requests that come at once. An adapter goes by the name of its directory."""
    client = engine.session.client
    for index, (ids, adapter, params) in enumerate(requests):
        named: Mapping[str, Any] = {}
        if adapter is not None:
            named = {"adapter": adapter.name, "adapter_source": AdapterSource(str(adapter))}
        most = params.max_tokens or 1
        client.add(AddRequest(str(index), ids, params, 0, 0.0, most, **named))
    tokens: list[list[int]] = [[] for _ in requests]
    while client.num_unfinished():
        for outputs in client.step():
            given = iter(outputs.token_ids)
            counts = outputs.counts or [1] * len(outputs.request_ids)
            for name, count in zip(outputs.request_ids, counts, strict=True):
                tokens[int(name)] += [next(given) for _ in range(count)]
            assert all(end.reason == "length" for end in outputs.finished), outputs.finished
    return tokens

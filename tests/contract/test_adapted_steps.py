"""Adapters in steps of every kind: eager, recorded and replayed, in graphs, two in flight."""

import json
from pathlib import Path

import pytest
import torch
from support.simulate import Run, make_request, make_scheduler
from support.sum_model import CPU, EAGER, GRAPHS

from engine.config.engine import ResolvedConfig
from engine.config.model import ModelConfig, read_model_info
from engine.kv.layout import one_group
from engine.lora.compute import Adapters
from engine.lora.decide import AdapterSlots
from engine.lora.products import AdapterProducts
from engine.lora.store import AdapterStore
from engine.messages.params import SamplingParams
from engine.models.decoder import NativeDecoder
from engine.models.load import load_model
from engine.worker.platform.host import CpuPlatform, HostPlatform
from engine.worker.runner import Driver, Runner
from engine.worker.worker import make_machine
from kernels.low_rank import LowRankProduct, in_panels

BLOCK, LONGEST = 4, 64
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "vocab_size": 97,
    "max_position_embeddings": LONGEST,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def products(model: NativeDecoder, name: str, seed: int) -> AdapterProducts:
    """An adapter of all layers; "a" changes the output layer, too."""
    rng, linears = torch.Generator().manual_seed(seed), {}
    for target, layer in model.adapted.linears.items():
        if target == "head" and name != "a":
            continue
        a = torch.randn(seed, layer.in_features, generator=rng) / layer.in_features**0.5
        b = torch.randn(layer.out_features, seed, generator=rng)
        product = LowRankProduct(0, layer.out_features, a, in_panels(b), 0.3)
        linears[target] = (product,)
    return AdapterProducts(name=name, digest=name, rank=seed, num_bytes=1, linears=linears)


def answers(directory: Path, sizes, depth: int = 1, **options) -> dict[str, list[int]]:
    """Requests of different lengths with two adapters and none, which come and go."""
    config = ModelConfig(model=str(directory), load_format="dummy", skip_tokenizer_init=True)
    info = read_model_info(str(directory))
    model = load_model(config, info, device="cpu", max_model_len=LONGEST, takes_adapters=True)
    assert isinstance(model, NativeDecoder)
    store: AdapterStore[AdapterProducts] = AdapterStore()
    for seed, name in enumerate("ab", start=2):
        store.add(products(model, name, seed))
    slots = AdapterSlots(2)
    scheduling = {"max_model_len": LONGEST, "num_steps_in_flight": depth, "max_num_seqs": 8}
    scheduler = make_scheduler(
        num_blocks=64, block_size=BLOCK, resources=[slots], **scheduling, **options
    )
    resolved = ResolvedConfig(
        model=ModelConfig(model="m"), scheduler=scheduler.config, block_size=BLOCK
    )
    platform = CpuPlatform() if sizes is CPU else HostPlatform()
    layers = model.cache_spec
    features = [Adapters(2, store)]
    machine = make_machine(model, platform, resolved, layers, one_group(layers, BLOCK), features)
    shape = (64, 2, layers[0].num_kv_heads, BLOCK, layers[0].head_dim)
    machine.kv.extend(torch.zeros(shape) for _ in layers)
    features[0].attach(machine)
    runner = Runner(machine, LONGEST)
    few, most = [size for size in sizes or () if size <= 8], machine.batches.max_num_tokens
    runner.capture(few, [size for size in (8, 40) if few and size <= most])
    run = Run(scheduler, Driver(runner), depth)
    for index in range(10):
        adapter = (None, "a", "b")[index % 3]
        prompt = [3 + index, 5, 7] * (1 + index % 4)
        fields = {"params": GREEDY, "adapter": adapter}
        run.add(make_request(str(index), prompt, 4 + index % 5, **fields))
        run.step()
    run.drain()
    return run.outputs


@pytest.fixture(scope="module")
def eager(directory: Path) -> dict[str, list[int]]:
    return answers(directory, EAGER)


@pytest.mark.parametrize("sizes", [CPU, GRAPHS], ids=["cpu", "graphs"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [64, 8])
def test_steps_of_every_kind(sizes, depth: int, chunk: int, directory: Path, eager) -> None:
    assert answers(directory, sizes, depth, max_num_batched_tokens=chunk) == eager


def test_adapters_change_tokens(directory: Path, eager) -> None:
    assert len({tuple(eager[str(index)][:4]) for index in range(10)}) > 5

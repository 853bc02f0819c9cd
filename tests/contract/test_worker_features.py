"""What the worker lends to a feature, used by one that is made up: layers, a request's beginning,
reports, the life of a worker."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.simulate import Run, make_request, make_scheduler
from support.sum_model import CPU, GRAPHS

from engine.config.engine import ResolvedConfig
from engine.config.model import ModelConfig, read_model_info
from engine.core.engine_core import EngineCore
from engine.errors import ConfigError
from engine.kv.layout import one_group
from engine.lora.decide import AdapterSlots
from engine.messages.kv_orders import KVOrders
from engine.messages.params import SamplingParams
from engine.models.load import load_model
from engine.sched.resource import Resource
from engine.worker.feature import Feature
from engine.worker.platform.host import CpuPlatform, HostPlatform
from engine.worker.runner import Driver, Runner
from engine.worker.worker import ModelWorker, make_machine

BLOCK, LONGEST, HIDDEN = 4, 64, 32
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
modes = pytest.mark.parametrize("sizes", [CPU, GRAPHS], ids=["cpu", "graphs"])
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
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


def load(directory: Path):
    config = ModelConfig(model=str(directory), load_format="dummy", skip_tokenizer_init=True)
    info = read_model_info(str(directory))
    return load_model(config, info, device="cpu", max_model_len=LONGEST)


def run_of(model, features=(), resources=(), sizes=CPU, depth: int = 1) -> Run:
    options = {"max_model_len": LONGEST, "num_steps_in_flight": depth, "max_num_seqs": 8}
    scheduler = make_scheduler(num_blocks=64, block_size=BLOCK, resources=resources, **options)
    config = ResolvedConfig(
        model=ModelConfig(model="m"), scheduler=scheduler.config, block_size=BLOCK
    )
    platform = CpuPlatform() if sizes is CPU else HostPlatform()
    layers = model.cache_spec
    layout = one_group(layers, BLOCK)
    machine = make_machine(model, platform, config, layers, layout, features)
    shape = (64, 2, layers[0].num_kv_heads, BLOCK, layers[0].head_dim)
    machine.kv.extend(torch.zeros(shape) for _ in layers)
    runner = Runner(machine, LONGEST)
    runner.capture([size for size in sizes or () if size <= 8])
    return Run(scheduler, Driver(runner), depth)


def answers(run: Run, requests) -> dict[str, list[int]]:
    for request in requests:
        run.add(request)
    run.drain()
    return run.outputs


# -- layers


class Taps(Feature):
    """Reads the outputs of some layers, as a proposer does."""

    part = "kv_transfer"

    def __init__(self, layers) -> None:
        self.aux_layers = layers
        self.read: list[tuple] = []

    def touches(self, rows):
        return True

    def drawn(self, rows, hidden, tokens):
        self.read.append((rows.counts.tolist(), hidden, tokens.tolist()))


@modes
@pytest.mark.parametrize("layers", [(1,), (0, 2), (2,)])
def test_a_feature_reads_the_outputs_of_layers_and_what_was_drawn(sizes, layers, directory):
    """It reads those of all tokens, and the outputs do not change."""
    model, taps = load(directory), Taps(layers)
    plain = answers(run_of(model), [make_request("a", [3, 4, 5, 6], 5, params=GREEDY)])
    run = run_of(model, [taps], sizes=sizes)
    assert answers(run, [make_request("a", [3, 4, 5, 6], 5, params=GREEDY)]) == plain
    assert [counts for counts, _, _ in taps.read] == [[4], [1], [1], [1], [1]]
    assert [drawn[0] for _, _, drawn in taps.read] == plain["a"]
    for counts, hidden, _ in taps.read:
        assert [aux.shape for aux in hidden.aux] == [(counts[0], HIDDEN)] * len(layers)
        if layers[-1] == 2:  # normalised, they are the hidden states
            last = model.final_norm(hidden.aux[-1][-1:], None)[0]
            torch.testing.assert_close(last, hidden.last)


class Picky(Feature):
    """Knows no adapter B, and breaks at C."""

    part = "adapters"

    def begin(self, plan, live):
        loaded = {} if plan.adapters is None else plan.adapters.load
        if "C" in loaded.values():
            raise FileNotFoundError("no C")
        bad = {adapter for adapter, name in loaded.items() if name == "B"}
        used = {} if plan.adapters is None else plan.adapters.used_by
        return {slot: "adapter 'B' is damaged" for slot, adapter in used.items() if adapter in bad}


@modes
@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_a_feature_cannot_begin_fails_alone(sizes, depth, directory):
    run = run_of(load(directory), [Picky()], [AdapterSlots(3)], sizes, depth)
    requests = [
        make_request(str(i), [3 + i, 5, 7 + i], 6, params=GREEDY, adapter=adapter)
        for i, adapter in enumerate([None, "A", "B", None])
    ]
    got = answers(run, requests)
    assert run.ends["2"].message == "adapter 'B' is damaged" and got["2"] == []
    assert all(len(got[name]) == 6 for name in "013")
    run.add(make_request("c", [1, 2], 3, params=GREEDY, adapter="C"))
    run.drain()
    assert run.ends["c"].message == "Picky raised FileNotFoundError: no C"
    run.add(make_request("d", [1, 2], 3, params=GREEDY))
    run.drain()
    assert len(run.outputs["d"]) == 3


# -- parts of plans: what a worker reads of them and reports


class Reporter(Feature):
    part = "kv_transfer"

    def __init__(self) -> None:
        self.told: list[list[bytes]] = []
        self.is_shut_down = False
        self.life: list[str] = []
        self.has_begun = False

    def attach(self, machine):
        self.life.append(f"model of {machine.model.vocab_size}, {len(machine.kv)} KV tensors")
        self.machine = machine

    def profile(self, batch):
        self.life.append("made up")

    def extend(self, batch, rows):
        assert self.has_begun, "extended before it has begun"

    def begin(self, plan, live):
        self.has_begun = True
        if plan.kv_transfer is not None:
            self.told.append(plan.kv_transfer.forget)

    def report(self, result):
        result.lost_snapshots = np.array([result.step], dtype=np.int32)

    def shutdown(self):
        self.is_shut_down = True


class Orders(Resource):
    name = "orders"
    needs = ("kv_transfer",)

    def __init__(self) -> None:
        self.reports: list[int] = []

    def watches(self, req):
        return False

    def describe(self, plan):
        plan.kv_transfer = KVOrders(forget=[b"order %d" % plan.step])

    def settle(self, plan, result):
        self.reports += result.lost_snapshots.tolist()


def test_a_feature_reads_its_part_and_reports_in_results(directory):
    feature, orders = Reporter(), Orders()
    run = run_of(load(directory), [feature], [orders])
    run.add(make_request("a", [3, 4], 3, params=GREEDY))
    for _ in range(3):
        run.step()
    assert feature.told == [[b"order 1"], [b"order 2"], [b"order 3"]]
    assert orders.reports == [1, 2, 3]


# -- the worker as a whole


def worker_of(directory: Path, *features: Feature, sizes=CPU) -> ModelWorker:
    config = ResolvedConfig(
        model=ModelConfig(model=str(directory), load_format="dummy", skip_tokenizer_init=True),
        scheduler=make_scheduler(max_model_len=LONGEST, max_num_seqs=8).config,
        block_size=BLOCK,
        device="cpu",
    )
    platform = CpuPlatform() if sizes is CPU else HostPlatform()
    return ModelWorker(config, read_model_info(str(directory)), platform, features)


@modes
def test_a_worker_loads_measures_allocates_computes_and_ends(sizes, directory):
    feature = Reporter()
    worker = worker_of(directory, feature, sizes=sizes)
    assert worker.capabilities == {"drafts", "masks", "block_groups", "kv_transfer"}
    facts = worker.load()
    assert facts.vocab_size == 97 and facts.block_bytes == 3 * 2 * 16 * BLOCK * 4
    assert worker.measure() > 1 << 20
    worker.allocate(40)
    scheduler = make_scheduler(
        num_blocks=40, block_size=BLOCK, max_model_len=LONGEST, max_num_seqs=8
    )
    core = EngineCore(scheduler, worker)
    scheduler.add_request(make_request("a", [3, 4, 5], 4, params=GREEDY))
    tokens = []
    while scheduler.has_unfinished_requests():
        for out in core.step().values():
            tokens += out.token_ids
    assert len(tokens) == 4
    assert feature.life[0] == "model of 97, 0 KV tensors" and len(feature.machine.kv) == 3
    if sizes is not CPU:
        assert "made up" in feature.life
    with pytest.raises(ConfigError, match="'sleep' is unknown; this worker has: profile"):
        worker.call("sleep")
    with pytest.raises(ConfigError, match="torch_profiler_dir is not set"):
        worker.call("profile", "start")
    with pytest.raises(ConfigError, match="profile 'pause' is not known"):
        worker.call("profile", "pause")
    worker.shutdown()
    worker.shutdown()
    assert feature.is_shut_down

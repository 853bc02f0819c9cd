"""Requests with LoRA adapters get the tokens of transformers' model into which their adapter was
merged, whoever shares their steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from e2e.general_models import make_general_model
from e2e.references import Reference, Tally, compare, engine_for, generate, prompts
from e2e.tiny_models import TinyModels
from support.adapted import Adapted, merged_model, random_adapter, run

from engine import SamplingParams
from engine.errors import ConfigError
from engine.layers.adapted_linear import AdaptedLinear
from kernels.cpu.recording import Recording

NAMES = ("llama", "qwen2", "phi3", "gemma3", "qwen3-next", "falcon-h1")


NUM_NEW = 10
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)


class Case:
    """A tiny model, adapters of different ranks, and what transformers says with each."""

    def __init__(self, models: TinyModels, name: str, root: Path, **ranks: int) -> None:
        """ranks: of each adapter, by name."""
        self.path = str(models.path(name))
        self.model = models.reference(name)
        self.prompts = prompts(2)[2:5]
        self.adapters: list[Path | None] = [
            None,
            *(
                random_adapter(self.model, root / key, seed=rank, rank=rank)
                for key, rank in ranks.items()
            ),
        ]
        self.references = [self._reference(adapter) for adapter in self.adapters]

    def _reference(self, adapter: Path | None) -> Reference:
        model = merged_model(self.model, adapter)
        tokens, margins = zip(*(generate(model, ids, NUM_NEW) for ids in self.prompts), strict=True)
        return Reference(self.prompts, list(tokens), list(margins))

    def mixed(self) -> list[Adapted]:
        """Each prompt with each adapter, and without one."""
        return [Adapted(ids, one, GREEDY) for ids in self.prompts for one in self.adapters]

    def check(self, tokens: list[list[int]]) -> None:
        tally, num = Tally(), len(self.adapters)
        for number, reference in enumerate(self.references):
            compare(reference, tokens[number::num], tally)
        assert tally.ties <= max(1, tally.compared // 1000)


@pytest.fixture(scope="module")
def llama(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Case:
    case = Case(tiny_models, "llama", tmp_path_factory.mktemp("adapters"), a=4, b=1, c=9)
    base, *others = case.references
    assert all(other.tokens[n] != base.tokens[n] for other in others for n in range(3))
    return case


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"max_num_batched_tokens": 16},  # chunks
        {"num_kv_blocks": 30},  # preemption
        {"max_loras": 2},
        {"max_loras": 1, "scheduling_policy": "adapter-clustering"},
        {"enable_prefix_caching": False, "max_num_seqs": 24},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=lambda options: "-".join(options) or "defaults",
)
def test_different_adapters_and_none_in_a_batch(llama: Case, options: dict) -> None:
    with engine_for(llama.path, enable_lora=True, **options) as engine:
        for _ in range(2):  # the second time some prompts are cached
            llama.check(run(engine, llama.mixed()))


def test_steps_with_adapters_are_replayed(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with and without adapters use different recordings, also as whole steps."""
    seen: Counter[int] = Counter()
    launch = Recording.launch

    def counted(self: Recording, *args) -> None:
        seen[id(self)] += 1
        launch(self, *args)

    monkeypatch.setattr(Recording, "launch", counted)
    requests = [Adapted(llama.prompts[0], adapter, GREEDY) for adapter in llama.adapters]
    with engine_for(llama.path, enable_lora=True) as engine:
        for one in (*requests, *requests):  # alone: one recording for all adapters, one for none
            assert run(engine, [one]) == [
                llama.references[llama.adapters.index(one.adapter)].tokens[0]
            ]
    assert len(seen) == 2
    # Steps that repeat the last one are replayed as a whole, without these launches.
    assert sum(seen.values()) < len(requests) * NUM_NEW


def test_an_engine_without_requests_for_adapters_computes_the_same(llama: Case) -> None:
    requests = [Adapted(ids, None, GREEDY) for ids in llama.prompts]
    with engine_for(llama.path, enable_lora=True) as engine:
        tokens = run(engine, requests)
    with engine_for(llama.path) as engine:
        assert tokens == run(engine, requests)


def test_slots_are_loaded_again(llama: Case) -> None:
    """One slot, through which all adapters go in turns; tables keep nothing of those before."""
    with engine_for(llama.path, enable_lora=True, max_loras=1) as engine:
        llama.check(run(engine, llama.mixed()))


def test_an_adapter_of_few_modules_follows_one_of_all(llama: Case, tmp_path: Path) -> None:
    few = random_adapter(llama.model, tmp_path / "few", seed=3, only="v_proj")
    ids = llama.prompts[0]
    wanted = generate(merged_model(llama.model, few), ids, NUM_NEW)[0]
    with engine_for(llama.path, enable_lora=True, max_loras=1) as engine:
        run(engine, [Adapted(ids, llama.adapters[1])])
        assert run(engine, [Adapted(ids, few, GREEDY)]) == [wanted]


@pytest.mark.parametrize("name", NAMES[1:])
def test_families(tiny_models: TinyModels, tmp_path: Path, name: str) -> None:
    """Fused, reordered and scaled projections, and those of recurrent layers."""
    case = Case(tiny_models, name, tmp_path, a=3, b=8)
    assert case.references[1].tokens != case.references[0].tokens
    with engine_for(case.path, enable_lora=True, max_num_batched_tokens=48) as engine:
        case.check(run(engine, case.mixed()))


@pytest.fixture
def adapted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Kinds of layers that took adapters."""
    kinds: Counter[str] = Counter()
    call = AdaptedLinear.__call__

    def counted(self: AdaptedLinear, x: torch.Tensor) -> torch.Tensor:
        kinds[type(self.base).__name__] += 1
        return call(self, x)

    monkeypatch.setattr(AdaptedLinear, "__call__", counted)
    yield kinds


def test_a_base_in_eight_bits(llama: Case, adapted: Counter[str]) -> None:
    """The adapter is not quantised: its tokens are nearer to those of the merged model than the
    base's, and none depend on other rows."""
    requests = llama.mixed()
    with engine_for(llama.path, enable_lora=True, quantization="int8") as engine:
        together = run(engine, requests)
        alone = [run(engine, [one])[0] for one in requests]
    assert together == alone
    assert set(adapted) & {"Int8Linear", "TorchInt8Linear"}
    wanted = llama.references[1].tokens
    right = sum(ours[:2] == theirs[:2] for ours, theirs in zip(together[1::4], wanted, strict=True))
    assert right >= 2


def test_models_of_transformers_are_refused(tmp_path: Path) -> None:
    path = make_general_model("gpt2", tmp_path)
    with pytest.raises(ConfigError, match="enable_lora needs a native family, and GPT2"):
        engine_for(str(path), enable_lora=True)

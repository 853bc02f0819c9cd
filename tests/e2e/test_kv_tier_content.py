"""What belongs to a block's key, and which way blocks go: adapters, pictures and roles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e.picture_cases import picture
from e2e.references import engine_for, run
from e2e.seeing_models import make_seeing_model
from e2e.tiny_models import TinyModels
from support import adapted
from support.adapted import Adapted, random_adapter
from support.kv_stores import counters, slow_profile

from engine import LLM, SamplingParams

PROMPTS = [[(n * k) % 281 + 3 for k in range(50 + 3 * n)] for n in (7, 11)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def test_blocks_of_an_adapter_serve_requests_for_its_content_alone(
    tiny_models: TinyModels, tmp_path: Path, store_options: dict[str, Any]
) -> None:
    path, model = str(tiny_models.path("llama")), tiny_models.reference("llama")
    one, two = (random_adapter(model, tmp_path / str(seed), seed) for seed in (1, 2))
    copy = random_adapter(model, tmp_path / "copy", 1)

    def asked(adapter: Path | None) -> list[Adapted]:
        return [Adapted(ids, adapter, GREEDY) for ids in PROMPTS]

    with engine_for(path, enable_lora=True, max_model_len=256) as engine:
        right = {each: adapted.run(engine, asked(each)) for each in (None, one, two)}
    assert right[None] != right[one] != right[two] != right[None]
    with engine_for(path, enable_lora=True, **store_options) as engine:
        assert adapted.run(engine, asked(one)) == right[one]
    with engine_for(path, enable_lora=True, **store_options) as engine:
        for other in (None, two):
            assert adapted.run(engine, asked(other)) == right[other]
        assert "blocks_loaded" not in counters(engine)
        assert adapted.run(engine, asked(copy)) == right[one]
        assert counters(engine)["blocks_loaded"] == sum(len(ids) // 8 for ids in PROMPTS)
    with engine_for(path, **store_options) as engine:  # which takes no adapters
        found, cached = run(engine, PROMPTS, 6)
        assert found == right[None] and all(cached)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_blocks_go_only_the_way_of_the_role(
    role: str, tiny_models: TinyModels, store_options: dict[str, Any]
) -> None:
    """A producer loads nothing, a consumer stores nothing."""
    path, both = str(tiny_models.path("llama")), store_options["kv_transfer_config"]
    one_way = {**store_options, "kv_transfer_config": {**both, "kv_role": role}}
    with engine_for(path, **one_way) as engine:
        right, _ = run(engine, PROMPTS, 6)
    with engine_for(path, **store_options) as engine:
        found, cached = run(engine, PROMPTS, 6)
        assert found == right and all(cached) == any(cached) == (role == "kv_producer")
    with engine_for(path, **one_way) as engine:
        found, cached = run(engine, PROMPTS, 6)
        assert found == right and all(cached) == any(cached) == (role == "kv_consumer")


@pytest.mark.slow
def test_pictures_are_read_by_prefill_cores(tmp_path: Path) -> None:
    """Blocks of a picture serve no prompt with another picture."""
    path = make_seeing_model(tmp_path / "smolvlm", "smolvlm")
    few = {"num_threads": 1, "num_kv_blocks": 300, "max_num_seqs": 8}
    text = "what is <image> this, and what is in the upper left corner of it?"
    prompts = [
        {"prompt": text, "multi_modal_data": {"image": [each]}}
        for each in (picture(128, 128), picture(128, 128, seed=1), picture(128, 128))
    ]
    with LLM(path, **few) as llm:
        right = [each.outputs[0].token_ids for each in llm.generate(prompts, GREEDY)]
    cores = {"prefill_cores": 1, "decode_cores": 1, "prefill_threshold": 16, "multiprocess": True}
    profile = slow_profile(tmp_path / "slow.json")
    with LLM(path, cost_profile=profile, **few, **cores) as llm:
        outputs = llm.generate(prompts, GREEDY)
        assert [each.outputs[0].token_ids for each in outputs] == right
        stats = llm.llm_engine.stats()
    assert stats is not None and stats.counters["prefill apart.done"] == 2
    assert stats.counters["kv load.blocks_loaded"] > 10

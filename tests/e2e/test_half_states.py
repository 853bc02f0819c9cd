"""States of 16 bits: half of the memory, and tokens that depend on nothing that the engine does
meanwhile."""

import pytest
from e2e.references import engine_for, prompts, run
from e2e.tiny_models import TinyModels

CUT = {"max_num_batched_tokens": 17, "num_kv_blocks": 36, "async_scheduling": True}


@pytest.mark.parametrize(
    "name",
    ["qwen3.5", *(pytest.param(n, marks=pytest.mark.slow) for n in ("bamba", "jamba-moe"))],
)
@pytest.mark.parametrize("kept", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_states_of_16_bits(name: str, kept: str, tiny_models: TinyModels) -> None:
    path, found, blocks = str(tiny_models.path(name)), [], {}
    for dtype, options in ((kept, {}), (kept, CUT), ("float32", {})):
        chosen = {"dtype": "bfloat16", "mamba_ssm_cache_dtype": dtype, **options}
        with engine_for(path, **chosen) as engine:
            found.append(run(engine, prompts(), 24)[0])
            blocks[dtype] = engine.session.client.decided.snapshot_blocks
    assert found[0] == found[1]
    assert blocks[kept] < blocks["float32"]

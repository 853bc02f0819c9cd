"""The dtype of recurrent states: chosen by an option, by config.json, or float32."""

import pytest

from engine.errors import ModelError
from engine.kv.layout import PagedKV, RecurrentState, StateTensor, state_bytes
from engine.worker.states import with_state_dtype

MATRIX = RecurrentState(
    tensors=(StateTensor((2, 64), "bfloat16"), StateTensor((4, 8, 8), "float32", is_sum=True))
)
WINDOW = RecurrentState(tensors=(StateTensor((2, 64), "float32"),))
LAYERS = [MATRIX, PagedKV(num_kv_heads=1, head_dim=8), WINDOW]


@pytest.mark.parametrize(
    ("requested", "hf", "expected"),
    [
        ("auto", {}, "float32"),
        ("auto", {"mamba_ssm_dtype": None}, "float32"),
        ("auto", {"mamba_ssm_dtype": "float32"}, "float32"),
        ("auto", {"mamba_ssm_cache_dtype": "torch.float16"}, "float16"),
        ("bfloat16", {"mamba_ssm_cache_dtype": "float32"}, "bfloat16"),
        ("float32", {"mamba_ssm_dtype": "int4"}, "float32"),
    ],
)
def test_only_what_sums_up_tokens_changes_its_dtype(requested, hf, expected):
    layers = with_state_dtype(LAYERS, requested, hf)
    matrix = MATRIX.tensors[1]._replace(dtype=expected)
    assert layers == [RecurrentState(tensors=(MATRIX.tensors[0], matrix)), *LAYERS[1:]]
    size = 4 if expected == "float32" else 2
    assert state_bytes(layers) == 2 * 64 * 2 + 4 * 8 * 8 * size + 2 * 64 * 4


def test_a_dtype_of_config_json_that_is_not_supported():
    with pytest.raises(ModelError, match=r"mamba_ssm_dtype is 'int4', supported: float32.*with"):
        with_state_dtype(LAYERS, "auto", {"mamba_ssm_dtype": "int4"})
    keeps_kv = LAYERS[1:2]
    assert with_state_dtype(keeps_kv, "auto", {"mamba_ssm_dtype": "int4"}) == keeps_kv

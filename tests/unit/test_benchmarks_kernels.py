"""The benchmark of kernels counts what it says."""

import json
from pathlib import Path

import cpu_kernels
import numpy as np
import pytest
import roofline
from numpy.typing import NDArray
from shapes import SHAPES, Step, model_directory

from engine.models.families import FAMILIES
from engine.models.work import num_pairs
from kernels import tuning


def test_shapes_count_the_weights_of_the_models_they_name() -> None:
    # Published: 8.03 and 0.60 billion, of which tables of 0.53 and none are not read by a step.
    assert SHAPES["llama-3.1-8b"].num_read == pytest.approx(7.50e9, rel=0.01)
    assert SHAPES["qwen3-0.6b"].num_read == pytest.approx(0.596e9, rel=0.01)
    assert SHAPES["qwen3-0.6b"].kv_bytes(2) == 112 * 1024
    assert SHAPES["llama-3.1-8b"].kv_bytes(2) == 128 * 1024


def test_a_dummy_model_has_the_shape_and_no_file_is_left() -> None:
    with model_directory(SHAPES["tiny"], 64) as root:
        config = json.loads((Path(root) / "config.json").read_text())
        assert config["num_hidden_layers"] == 2
    assert not Path(root).exists()


def test_steps_count_keys_and_pairs_and_write_where_they_read() -> None:
    step = Step([(1, 4), (3, 2)], block=4)
    assert (step.num_tokens, step.num_keys, step.num_pairs) == (4, 10, 5 + 3 + 4 + 5)
    meta = step.meta()
    assert meta.slots[0] == meta.block_tables[0, 1] * 4
    assert meta.slots[-1] == meta.block_tables[1, 1] * 4
    assert (meta.num_decodes, meta.max_query_len, meta.max_seq_len) == (1, 3, 5)


def test_floor_is_what_binds() -> None:
    most = cpu_kernels.Ceilings(bytes=100.0, operations=1000.0)
    assert most.floor(cpu_kernels.Work("", "", [], 200.0, 1000.0)) == 2.0
    assert most.floor(cpu_kernels.Work("", "", [], 200.0, 5000.0)) == 5.0


def test_a_tile_is_tried_and_then_forgotten() -> None:
    kind = tuning.Kind(2, 2, 128)
    before, of_more = (tuning.decode_tile("sm_90", kind, rows) for rows in (16, 32))
    with tuning.trying("decode", "sm_90", kind, tuning.Tile(16, 32, 2, 4)):
        assert tuning.decode_tile("sm_90", kind, 16) == (16, 32, 2, 4)
        assert tuning.decode_tile("sm_90", kind, 32) == of_more
    assert tuning.decode_tile("sm_90", kind, 16) == before


@pytest.mark.parametrize("name", ["mid", "qwen3-0.6b", "llama-3.1-8b"])
def test_floors_count_the_weights_that_shapes_count(name: str) -> None:
    """Of a step of one token: weights read once, in the type that is computed in, and KV."""
    shape = SHAPES[name]
    with model_directory(shape, 4096) as root:
        model = roofline.Model.of(root)
    work = model.decode(1, 99, "bfloat16")
    norms = (4 * shape.layers + 1) * max(shape.hidden, shape.head_dim)
    rest = work.bytes - 2 * shape.num_read - 101 * shape.kv_bytes(2) - 4 * shape.vocab
    assert 0 <= rest <= 2 * norms
    pairs = 4 * 100 * shape.heads * shape.head_dim * shape.layers
    assert work.operations == pytest.approx(2 * shape.num_read + pairs, rel=1e-3)


def columns(*chunks: tuple[int, int]) -> NDArray[np.int64]:
    return np.array(chunks, dtype=np.int64).T


def test_floors_of_windows_and_of_what_is_shared() -> None:
    with model_directory(SHAPES["tiny"], 64) as root:
        model = roofline.Model.of(root)
    layers = SHAPES["tiny"].layers
    assert model.attended(*columns((3, 2))) == (layers * (2 + 2 * 3), layers * (3 + 4 + 5))
    assert model.attended(*columns((1, 9), (1, 9)), shared=8) == (
        layers * (9 + 2 + 1 + 2),
        layers * 20,
    )
    assert list(num_pairs(*columns((4, 2), (2, 0)), window=3)) == [3 + 3 + 3 + 3, 1 + 2]
    assert list(num_pairs(*columns((2, 1)), window=9)) == [2 + 3]


def test_experts_count_as_often_as_tokens_take_them() -> None:
    config = {
        **SHAPES["tiny"].hf_config(64),
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    model = roofline.Model(FAMILIES["MixtralForCausalLM"](config))
    assert model.share_of_experts(1) == pytest.approx(0.25)
    assert 0.99 < model.share_of_experts(32) < 1.0
    one, many = model.decode(1, 0, "float32"), model.decode(32, 0, "float32")
    assert many.bytes < 4 * one.bytes and many.operations == pytest.approx(32 * one.operations)


def test_a_slow_bfloat16_is_not_what_arithmetic_allows() -> None:
    most = roofline.Ceilings(threads=2, bytes=1.0, float32=300.0, bfloat16=50.0)
    assert most.floor(roofline.Work(1.0, 600.0), "bfloat16") == 2.0
    assert most.floor(roofline.Work(5.0, 600.0), "float32") == 5.0


def test_ceilings_are_measured() -> None:
    found = roofline.measured(1, seconds=0.0, size=1 << 20)
    assert min(found.bytes, found.float32, found.bfloat16) > 0

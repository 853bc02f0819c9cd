"""The benchmark of kernels counts what it says."""

import json
from pathlib import Path

import cpu_kernels
import pytest
from shapes import SHAPES, Step, model_directory

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
    before = tuning.decode_tile("sm_90", kind, 16)
    with tuning.trying("decode", "sm_90", kind, tuning.Tile(16, 32, 2, 4)):
        assert tuning.decode_tile("sm_90", kind, 16) == (16, 32, 2, 4)
        assert tuning.decode_tile("sm_90", kind, 32) == (32, *before[1:])
    assert tuning.decode_tile("sm_90", kind, 16) == before

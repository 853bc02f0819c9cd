"""Checkpoints of every layout find their place; what is wrong with one is said by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config.model import ModelConfig, read_model_info
from engine.errors import ModelError
from engine.models.checkpoint import Checkpoint
from engine.models.decoder import NativeDecoder
from engine.models.families import FAMILIES
from engine.models.load import load_model
from engine.models.targets import Target, targets
from engine.models.weights import RandomWeights, StoredWeights, Weights

HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_bias": True,
}
Q = "model.layers.0.self_attn.q_proj.weight"


def stored_tensors(hf: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors under the names a checkpoint of this model has."""
    generator = torch.Generator().manual_seed(seed)
    parts = [part for t in targets(FAMILIES[hf["architectures"][0]](hf)) for part in t.ways[0]]
    return {part.name: torch.randn(part.shape, generator=generator) for part in parts}


def write(
    root: Path, tensors: dict[str, torch.Tensor], hf: dict[str, Any] = HF, shards: int = 1
) -> Path:
    root.mkdir(exist_ok=True)
    (root / "config.json").write_text(json.dumps(hf))
    if shards == 1:
        save_file(tensors, root / "model.safetensors")
        return root
    files = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({n: t for n, t in tensors.items() if files[n] == file}, root / file)
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return root


def read(
    root: Path, hf: dict[str, Any] = HF, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """All targets, by name."""
    wanted = list(targets(FAMILIES[hf["architectures"][0]](hf)))
    with (
        Checkpoint(root) as checkpoint,
        Weights(wanted, StoredWeights(checkpoint, wanted), dtype) as weights,
    ):
        return {target.name: weights.take(target.name) for target in wanted}


def load(root: Path, **options: Any) -> NativeDecoder:
    config = ModelConfig(model=str(root), **options)
    model = load_model(config, read_model_info(root), device="cpu", max_model_len=64)
    assert isinstance(model, NativeDecoder)
    return model


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_parts_lie_end_to_end_in_one_matrix(tmp_path: Path) -> None:
    stored = stored_tensors(HF)
    got = read(write(tmp_path, stored))
    heads = [stored[Q.replace("q_proj", f"{letter}_proj")] for letter in "qkv"]
    biases = [stored[f"model.layers.1.self_attn.{letter}_proj.bias"] for letter in "qkv"]
    halves = [stored[f"model.layers.0.mlp.{half}_proj.weight"] for half in ("gate", "up")]
    assert torch.equal(got["0.qkv"], torch.cat(heads))
    assert torch.equal(got["1.qkv_bias"], torch.cat(biases))
    assert torch.equal(got["0.gate_up"], torch.cat(halves))
    assert torch.equal(got["embed"], stored["model.embed_tokens.weight"])


def test_shards_and_fused_files_hold_the_same_model(tmp_path: Path) -> None:
    stored = stored_tensors({**HF, "attention_bias": False})
    hf = {**HF, "attention_bias": False}
    expected = read(write(tmp_path / "one", stored, hf), hf)
    assert equal(read(write(tmp_path / "shards", stored, hf, shards=3), hf), expected)
    fused = dict(stored)
    for i in range(2):
        for block, parts in (("self_attn", "q k v"), ("mlp", "gate up")):
            names = [f"model.layers.{i}.{block}.{part}_proj.weight" for part in parts.split()]
            joined = f"model.layers.{i}.{block}.{parts.replace(' ', '_')}_proj.weight"
            fused[joined.replace("q_k_v", "qkv")] = torch.cat([fused.pop(n) for n in names])
    assert equal(read(write(tmp_path / "fused", fused, hf), hf), expected)


MIXTRAL = {
    **HF,
    "architectures": ["MixtralForCausalLM"],
    "attention_bias": False,
    "num_local_experts": 3,
}


def test_experts_are_read_one_by_one_by_old_names_and_stacked(tmp_path: Path) -> None:
    plain = stored_tensors(MIXTRAL)
    expected = read(write(tmp_path / "plain", plain, MIXTRAL), MIXTRAL)

    renames = {"mlp.": "block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    old = {}
    for name, tensor in plain.items():
        for new_word, old_word in renames.items():
            name = name.replace(new_word, old_word)
        old[name] = tensor
    assert equal(read(write(tmp_path / "old", old, MIXTRAL), MIXTRAL), expected)

    stacked = {name: tensor for name, tensor in plain.items() if ".experts." not in name}
    for i in range(2):
        block = f"model.layers.{i}.mlp.experts."
        for name, parts in (
            ("gate_up_proj", ("gate_proj", "up_proj")),
            ("down_proj", ("down_proj",)),
        ):
            stacked[block + name] = torch.stack(
                [torch.cat([plain[f"{block}{e}.{p}.weight"] for p in parts]) for e in range(3)]
            )
    assert equal(read(write(tmp_path / "stacked", stacked, MIXTRAL), MIXTRAL), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_are_converted_on_the_way(tmp_path: Path, dtype: torch.dtype) -> None:
    stored = {name: tensor.to(dtype) for name, tensor in stored_tensors(HF).items()}
    root = write(tmp_path, stored)
    assert torch.equal(read(root)["0.out"], stored[Q.replace("q_proj", "o_proj")].float())
    narrow = read(root, dtype=torch.bfloat16)
    assert torch.equal(narrow["norm"], stored["model.norm.weight"].bfloat16())


def test_tensors_larger_than_the_staging_buffer_are_converted_whole(tmp_path: Path) -> None:
    big = torch.randn(3_000_017).bfloat16()
    save_file({"big": big}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        out = torch.empty(3_000_000)
        checkpoint.read("big", 17, out)
    assert torch.equal(out, big[17:].float())


def without(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {n: tensor for n, tensor in tensors.items() if n != name}


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    root = write(tmp_path, without(stored_tensors(HF), Q))
    with pytest.raises(ModelError, match=rf"lacks the tensor {Q} of shape \(32, 32\)"):
        load(root)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    root = write(tmp_path, {**stored_tensors(HF), Q: torch.zeros(16, 32)})
    with pytest.raises(ModelError, match=rf"{Q} in .*model.safetensors .*\(16, 32\).*\(32, 32\)"):
        load(root)


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    root = write(tmp_path, {**stored_tensors(HF), "model.vision.weight": torch.zeros(3)})
    with pytest.raises(ModelError, match=r"model.vision.weight of shape"):
        load(root)


def test_tensors_that_follow_from_the_configuration_may_lie_there(tmp_path: Path) -> None:
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    load(write(tmp_path, {**stored_tensors(HF), **inv_freq}))


def test_weights_of_a_type_that_is_not_read_are_refused(tmp_path: Path) -> None:
    stored = stored_tensors(HF)
    root = write(tmp_path, {**stored, Q: stored[Q].to(torch.float8_e4m3fn)})
    with pytest.raises(ModelError, match=rf"{Q} .* type F8_E4M3.*quantized"):
        load(root)


def cut(content: bytes) -> bytes:
    return content[:-100]


def stub(content: bytes) -> bytes:
    return content[:5]


def garble(content: bytes) -> bytes:
    return content[:8] + b"\xff" * 40 + content[48:]


def overlong(content: bytes) -> bytes:
    return (1 << 60).to_bytes(8, "little") + content[8:]


def listed(content: bytes) -> bytes:
    return (2).to_bytes(8, "little") + b"[]" + content


@pytest.mark.parametrize("damage", [cut, stub, garble, overlong, listed])
def test_a_damaged_file_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    file = write(tmp_path, stored_tensors(HF)) / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ModelError, match=r"model.safetensors is damaged or truncated.*again"):
        load(tmp_path)


def test_a_file_cut_short_while_it_is_read_is_named(tmp_path: Path) -> None:
    root = write(tmp_path, stored_tensors(HF))
    with Checkpoint(root) as checkpoint:
        with (root / "model.safetensors").open("r+b") as stream:
            stream.truncate(3000)
        with pytest.raises(ModelError, match="ended while it was read"):
            for name, stored in checkpoint.tensors.items():
                checkpoint.read(name, 0, torch.empty(stored.shape))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    root = write(tmp_path, stored_tensors(HF), shards=3)
    (root / "model-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"index.json names model-1.safetensors"):
        load(root)


@pytest.mark.parametrize("content", ["{", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_a_damaged_index_is_named(tmp_path: Path, content: str) -> None:
    root = write(tmp_path, stored_tensors(HF), shards=2)
    (root / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=r"index.json"):
        load(root)


def test_pickles_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF))
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    with pytest.raises(ModelError, match=r"pytorch_model.bin.*safe_serialization=True"):
        load(tmp_path)


def test_a_directory_without_weights_is_refused_unless_they_are_made_up(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF))
    with pytest.raises(ModelError, match=r"no \*.safetensors files.*dummy"):
        load(tmp_path)
    load(tmp_path, load_format="dummy")


def test_made_up_weights_depend_on_name_and_seed_alone() -> None:
    target = Target("0.out", (64, 64), ())

    def made(seed: int, name: str = "0.out") -> torch.Tensor:
        return RandomWeights(seed).load(replaced(target, name), torch.float32)

    assert torch.equal(made(1), made(1))
    assert not torch.equal(made(1), made(2))
    assert not torch.equal(made(1), made(1, "1.out"))
    assert made(1).std() == pytest.approx(1 / 8, rel=0.1)


def replaced(target: Target, name: str) -> Target:
    return target._replace(name=name)


def test_made_up_norms_are_near_one_and_long_tensors_repeat_no_row() -> None:
    norm = RandomWeights(0).load(Target("0.attention_in", (64,), ()), torch.float32)
    assert norm.mean() == pytest.approx(1.0, abs=0.05)
    long = RandomWeights(0).load(Target("0.out", (2100, 1024), ()), torch.float32)
    assert len(long.unique(dim=0)) == 2100


def test_a_tied_file_that_holds_both_tables_is_believed(tmp_path: Path) -> None:
    hf = {**HF, "tie_word_embeddings": True}
    stored = stored_tensors(hf)
    table = stored["model.embed_tokens.weight"]
    hidden = torch.randn(2, 32)
    for name, head in (("same", table.clone()), ("differs", torch.randn(40, 32))):
        root = write(tmp_path / name, {**stored, "lm_head.weight": head}, hf)
        assert torch.allclose(load(root).logits(hidden), hidden @ head.T, atol=1e-5)
    only_head = {"lm_head.weight": table, **without(stored, "model.embed_tokens.weight")}
    model = load(write(tmp_path / "head", only_head, hf))
    assert torch.equal(model.embedding(torch.arange(len(table))), table)


def test_the_dtype_asked_for_is_computed_with(tmp_path: Path) -> None:
    """Auto is the checkpoint's; float16 is kept so, and computed with in float32."""
    for stored, asked, computed in (
        ("bfloat16", "auto", torch.bfloat16),
        ("bfloat16", "float32", torch.float32),
        ("float32", "auto", torch.float32),
        ("float32", "bfloat16", torch.bfloat16),
        ("float16", "auto", torch.float32),
        ("float16", "bfloat16", torch.bfloat16),
        ("float32", "float16", torch.float32),
    ):
        tensors = {name: t.to(getattr(torch, stored)) for name, t in stored_tensors(HF).items()}
        write(tmp_path, tensors)
        assert load(tmp_path, dtype=asked).dtype == computed, "without a word in config.json"
        root = write(tmp_path, tensors, {**HF, "dtype": stored})
        model = load(root, dtype=asked)
        assert model.dtype == computed
        assert model.cache_spec[0].dtype_bytes == computed.itemsize
        assert model.logits(torch.randn(3, 32).to(computed)).dtype == torch.float32


def test_files_are_closed_and_readers_end_when_loading_fails(tmp_path: Path) -> None:
    root = write(tmp_path, stored_tensors(HF))
    checkpoint = Checkpoint(root)
    with checkpoint, pytest.raises(KeyError):
        checkpoint.read("no such tensor", 0, torch.empty(1))
    with pytest.raises(KeyError):
        checkpoint.read(Q, 0, torch.empty(32, 32))
    assert load_file(root / "model.safetensors").keys() == stored_tensors(HF).keys()


def test_targets_above_a_limit_are_not_read_in_advance() -> None:
    """Else several weights are in memory while the first is packed."""
    wanted = [Target(str(number), (4, 8), ()) for number in range(5)]
    read: list[str] = []

    class Source:
        def load(self, target: Target, dtype: torch.dtype) -> torch.Tensor:
            read.append(target.name)
            return torch.full(target.shape, float(target.name), dtype=dtype)

    with Weights(wanted, Source(), torch.float32, most_ahead=40) as weights:
        for number in range(5):
            taken = weights.take(str(number))
            assert read == [str(done) for done in range(number + 1)]
            assert bool((taken == number).all())

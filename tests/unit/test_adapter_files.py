"""Adapters in peft's format: what is read, and what is refused with which message."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support import adapter_files
from support.adapter_files import PREFIX, config_of, product, write, write_raw

from engine.errors import ConfigError
from engine.lora.adapter import Adapter, AdapterError, is_other_model
from engine.lora.files import Limits, adapter_of, read_adapter

Q = "model.layers.0.self_attn.q_proj"
V = "model.layers.0.self_attn.v_proj"
EXPERTS = "model.layers.0.mlp.experts"


def of(tensors: adapter_files.Tensors, **config: Any) -> Adapter:
    return adapter_of(tensors, config_of(**config), "one")


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(AdapterError) as caught:
        read_adapter(path, "one", **options)
    assert isinstance(caught.value, ConfigError)
    assert str(caught.value).startswith(f"adapter 'one' at {path}: ")
    return str(caught.value).removeprefix(f"adapter 'one' at {path}: ")


def test_a_plain_adapter(tmp_path: Path) -> None:
    tensors = {**product(Q), **product(V, outs=3)}
    adapter = read_adapter(write(tmp_path, tensors=tensors), "one")
    assert list(adapter.modules) == [Q, V]
    part = adapter.modules[V]
    assert torch.equal(part.a, tensors[f"{PREFIX}{V}.lora_A.weight"])
    assert torch.equal(part.b, tensors[f"{PREFIX}{V}.lora_B.weight"])
    assert (part.scale, part.rank, part.bias, part.magnitude) == (2.0, 4, None, None)
    assert (adapter.name, adapter.path, adapter.base) == ("one", str(tmp_path), "somewhere/base")
    assert (adapter.rank, adapter.num_bytes) == (4, 4 * (40 + 24 + 40 + 12))
    assert adapter.digest == adapter_of(tensors, config_of(), "other").digest


def test_the_scale_of_rslora_and_of_patterns() -> None:
    assert of(product(Q), use_rslora=True).modules[Q].scale == 4.0
    patterns = {"rank_pattern": {"self_attn.q_proj": 2, "q_proj": 1}, "r": 4}
    assert of(product(Q, rank=2), **patterns).modules[Q].scale == 4.0  # the first key that matches
    by_alpha = of({**product(Q), **product(V)}, alpha_pattern={r"layers\.\d+\.self_attn\.q.*": 1})
    assert (by_alpha.modules[Q].scale, by_alpha.modules[V].scale) == (0.25, 2.0)
    assert of(product(Q), alpha_pattern={"proj": 1}).modules[Q].scale == 2.0  # not after a dot


@pytest.mark.parametrize(
    ("targets", "is_adapted"),
    [
        ({"target_modules": [Q]}, True),
        ({"target_modules": ["self_attn.q_proj"]}, True),
        ({"target_modules": ["proj"]}, False),
        ({"target_modules": r".*\.self_attn\.(q|k)_proj"}, True),
        ({"target_modules": r"self_attn\.q_proj"}, False),  # the whole name must match
        ({"target_modules": "all-linear"}, True),
        ({"exclude_modules": ["v_proj"]}, True),
        ({"exclude_modules": ["q_proj"]}, False),
        ({"exclude_modules": r".*layers\.0\..*"}, False),
        ({"modules_to_save": ["self_attn"]}, False),
        ({"layers_to_transform": 0}, True),
        ({"layers_to_transform": [0, 3]}, True),
        ({"layers_to_transform": [1]}, False),
        ({"layers_to_transform": []}, True),
        ({"layers_to_transform": [0], "layers_pattern": "layers"}, True),
        ({"layers_to_transform": [0], "layers_pattern": ["blocks", "layers"]}, True),
        ({"layers_to_transform": [0], "layers_pattern": ["blocks"]}, False),
    ],
)
def test_modules_that_the_configuration_adapts(targets: dict[str, Any], is_adapted: bool) -> None:
    if is_adapted:
        assert list(of(product(Q), **targets).modules) == [Q]
    else:
        saved = {f"{PREFIX}{Q.replace('q_proj', 'o')}.weight": torch.zeros(2, 2)}
        with pytest.raises(AdapterError, match=f"products for {re.escape(Q)}"):
            of({**product(Q), **(saved if "modules_to_save" in targets else {})}, **targets)


def test_names_as_peft_and_transformers_write_them() -> None:
    plain = of(product(Q))
    for change in (
        lambda name: name.removeprefix(PREFIX),
        lambda name: name.replace(".weight", ".default.weight"),
    ):
        renamed = {change(name): tensor for name, tensor in product(Q).items()}
        assert list(of(renamed).modules) == list(plain.modules)


def test_dora_and_biases() -> None:
    magnitude = {f"{PREFIX}{Q}.lora_magnitude_vector": torch.rand(6)}
    found = of({**product(Q), **magnitude}, use_dora=True).modules[Q].magnitude
    assert found is not None and torch.equal(found, *magnitude.values())
    renamed = {f"{name}.weight": tensor for name, tensor in magnitude.items()}
    assert of({**product(Q), **renamed}, use_dora=True).modules[Q].magnitude is not None
    bias = {f"{PREFIX}{Q}.lora_B.bias": torch.rand(6)}
    assert of({**product(Q), **bias}, lora_bias=True).modules[Q].bias is not None
    with pytest.raises(AdapterError, match=r"no lora_magnitude_vector \(use_dora is true\) for"):
        of(product(Q), use_dora=True)
    with pytest.raises(AdapterError, match=r"lora_magnitude_vector, which does not agree"):
        of({**product(Q), **magnitude})
    with pytest.raises(AdapterError, match=r"no lora_B.bias \(lora_bias is true\) for"):
        of(product(Q), lora_bias=True)
    with pytest.raises(AdapterError, match=r"has the shape \[5\], should be \[6\]"):
        of({**product(Q), f"{PREFIX}{Q}.lora_B.bias": torch.rand(5)}, lora_bias=True)


def test_embeddings_and_output_layers() -> None:
    table = {
        f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.rand(4, 30),
        f"{PREFIX}model.embed_tokens.lora_embedding_B": torch.rand(8, 4),
        f"{PREFIX}model.embed_tokens.base_layer.weight": torch.rand(30, 8),
        f"{PREFIX}lm_head.base_layer.weight": torch.rand(30, 8),
    }
    made = of({**table, **product("lm_head")}, target_modules=["embed_tokens", "lm_head"])
    assert (list(made.tables), list(made.modules)) == (["model.embed_tokens"], ["lm_head"])
    assert made.num_bytes == 4 * (120 + 32 + 40 + 24), "the base's own tables are not kept"


def test_whole_modules() -> None:
    head = {f"{PREFIX}lm_head.weight": torch.rand(30, 8)}
    made = of({**product(Q), **head}, modules_to_save=["lm_head"])
    assert torch.equal(made.replaced["lm_head.weight"], *head.values())
    old = {f"{PREFIX}lm_head.modules_to_save.default.weight": torch.rand(30, 8)}
    assert list(of(old, modules_to_save=["lm_head"]).replaced) == ["lm_head.weight"]
    resized = {f"{PREFIX}model.embed_tokens.weight": torch.rand(32, 8)}
    assert list(of({**product(Q), **resized}).replaced) == ["model.embed_tokens.weight"]
    with pytest.raises(AdapterError, match="lists 'embed_tokens', of which the tensors has no"):
        of({**product(Q), **head}, modules_to_save=["lm_head", "embed_tokens"])
    with pytest.raises(AdapterError, match=r"layers\.0\.norm\.weight, which is neither a product"):
        of({**product(Q), f"{PREFIX}model.layers.0.norm.weight": torch.rand(8)})


def test_experts_in_one_parameter() -> None:
    def both(rank: int) -> adapter_files.Tensors:
        inner = product(f"{EXPERTS}.base_layer", rank=3 * rank, outs=10, ins=6)
        return {**inner, **product(EXPERTS, rank=3 * rank, outs=6, ins=5)}

    names = {"target_modules": [], "target_parameters": ["down_proj", "experts.gate_up_proj"]}
    made = of(both(4), **names).experts
    assert {path: tuple(one.a.shape) for path, one in made.items()} == {
        f"{EXPERTS}.gate_up_proj": (3, 4, 6),
        f"{EXPERTS}.down_proj": (3, 4, 5),
    }
    assert made[f"{EXPERTS}.gate_up_proj"].b.shape == (3, 10, 4)
    for change, words in (
        ({"r": 5}, "12 rows and 12 columns; both should be the rank 5"),
        ({"target_parameters": ["gate_up_proj"]}, "2 parameters of .*names gate_up_proj"),
        ({"target_parameters": ["experts.one", "experts.two"]}, "is not known for one"),
    ):
        with pytest.raises(AdapterError, match=words):
            of(both(4), **{**names, **change})


def test_a_router_as_a_parameter() -> None:
    gate = "model.layers.0.mlp.gate"
    made = of(
        product(gate, rank=2), target_parameters=["gate.weight"], rank_pattern={"gate.weight": 2}
    )
    assert made.modules[gate].scale == 4.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'; only adapters of type 'LORA'"),
        ({"peft_type": None}, "peft_type None"),
        ({"alora_invocation_tokens": [1]}, "activated LoRA"),
        ({"use_qalora": True}, "QALoRA"),
        ({"layer_replication": [[0, 2]]}, "replicated"),
        ({"trainable_token_indices": [5]}, "trained rows of the embedding table"),
        ({"use_bdlora": {"nblocks": 2}}, "block-diagonal"),
        ({"kasa_config": {"x": 1}}, "KaSA"),
        ({"arrow_config": {"top_k": 2}}, "Arrow"),
        ({"megatron_config": {"a": 1}}, "Megatron"),
        ({"bias": "all"}, "bias 'all': biases of the base were trained"),
        ({"init_lora_weights": "pissa_niter_16"}, "'pissa_niter_16', which changes the weights"),
        ({"init_lora_weights": "olora"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "corda"}, "changes the weights of the base"),
        ({"init_lora_weights": "loftq"}, "changes the weights of the base"),
        ({"init_lora_weights": "lora_ga"}, "changes the weights of the base"),
        ({"init_lora_weights": "own"}, "init_lora_weights 'own'; known are"),
        ({"some_new_key": 3}, "some_new_key = 3, which is not known and may change results"),
        ({"r": 0}, "r = 0, must be an integer above 0"),
        ({"r": True}, "r = True, must be"),
        ({"r": 8}, r"lora_A.weight in .* has rank 4, but r of adapter_config.json is 8"),
        ({"rank_pattern": {"q_proj": 3}}, r"but rank_pattern\['q_proj'\] of .* is 3"),
        ({"rank_pattern": {"q_proj": "3"}}, r"rank_pattern\['q_proj'\] = '3', must be"),
        ({"rank_pattern": [4]}, r"rank_pattern = \[4\], must be an object"),
        ({"lora_alpha": float("nan")}, "lora_alpha = nan, must be a finite number"),
        ({"lora_alpha": 10**400}, "must be a finite number"),
        ({"lora_alpha": "8"}, "lora_alpha = '8', must be a number"),
        ({"use_dora": "yes"}, "use_dora = 'yes', must be true or false"),
        ({"target_modules": [1]}, r"target_modules = \[1\], must be a list of names"),
        ({"target_modules": "(q_proj"}, r"'\(q_proj', not a regular expression"),
        ({"target_modules": "(?e)(?:abcabcabcdefghijkl){e<=18}(?<=k)"}, "takes more than 1 s"),
        ({"layers_to_transform": ["0"]}, "must be a list of indices"),
    ],
)
def test_configurations_that_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(AdapterError, match=words) as caught:
        of(product(Q), **change)
    assert str(caught.value).startswith("adapter 'one': ")


def test_keys_without_effect_are_ignored() -> None:
    plain = of(product_of_ones())
    for change in (
        {"lora_dropout": 0.1, "inference_mode": True, "revision": "main", "lora_dtype": "float32"},
        {"some_new_key": None, "other_new_key": [], "third_new_key": False, "use_qalora": False},
        {"init_lora_weights": "gaussian", "eva_config": {"rho": 2.0}, "fan_in_fan_out": True},
        {"base_model_name_or_path": "elsewhere"},
    ):
        assert of(product_of_ones(), **change).digest == plain.digest
    for change in ({"lora_alpha": 9}, {"use_rslora": True}):
        assert of(product_of_ones(), **change).digest != plain.digest


def product_of_ones() -> adapter_files.Tensors:
    return {name: torch.ones_like(tensor) for name, tensor in product(Q).items()}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "no tensors of an adapter"),
        ({f"{PREFIX}{Q}.lora_A.weight": (4, 10)}, f"no lora_B for {Q}"),
        ({f"{PREFIX}{Q}.lora_down.weight": (4, 10)}, "names of other trainers"),
        ({f"{PREFIX}{Q}.hada_w1_a": (4, 10)}, "LoHa, which is not supported"),
        ({f"{PREFIX}{Q}.bias": (4,)}, "which is neither a product of LoRA nor"),
        (
            {f"{PREFIX}{Q}.lora_A.weight": (4, 10, 3), f"{PREFIX}{Q}.lora_B.weight": (6, 4, 1)},
            "products of convolutions",
        ),
        (
            {f"{PREFIX}{Q}.lora_A.weight": (0,), f"{PREFIX}{Q}.lora_B.weight": (6, 4)},
            r"shape \[0\], not that of a matrix: the trainer saved it before",
        ),
        (
            {f"{PREFIX}{Q}.lora_A.weight": (4, 10), f"{PREFIX}{Q}.lora_B.weight": (6, 3)},
            "lora_B.weight in the tensors has rank 3, but r of adapter_config.json is 4",
        ),
        (
            {f"{PREFIX}{Q}.lora_A.weight": (4, 10), f"{Q}.lora_A.weight": (4, 10)},
            "which are the same",
        ),
    ],
)
def test_tensors_that_are_refused(tensors: dict[str, tuple[int, ...]], words: str) -> None:
    with pytest.raises(AdapterError, match=words):
        of({name: torch.zeros(shape) for name, shape in tensors.items()})


def test_numbers_that_are_not_finite_are_read(tmp_path: Path) -> None:
    made = {name: torch.full_like(one, float("nan")) for name, one in product(Q).items()}
    assert read_adapter(write(tmp_path, tensors=made), "one").modules[Q].a.isnan().all()


def test_types_of_tensors(tmp_path: Path) -> None:
    made = product(Q)
    made[f"{PREFIX}{Q}.lora_A.weight"] = made[f"{PREFIX}{Q}.lora_A.weight"].bfloat16()
    adapter = read_adapter(write(tmp_path, tensors=made), "one")
    assert (adapter.modules[Q].a.dtype, adapter.modules[Q].b.dtype) == (
        torch.bfloat16,
        torch.float32,
    )
    made = {name: tensor.to(torch.int8) for name, tensor in product(Q).items()}
    assert "is of type I8; tensors must be one of F64, F32" in refusal(
        write(tmp_path, tensors=made)
    )


def test_limits(tmp_path: Path) -> None:
    root = write(tmp_path)
    words = refusal(root, limits=Limits(rank=2))
    assert f"it has rank 4 (in {Q}), above max_lora_rank = 2" in words
    assert "256 bytes, 100 bytes are left" in refusal(root, limits=Limits(num_bytes=100))
    assert read_adapter(root, "one", limits=Limits(rank=4, num_bytes=256)).rank == 4


def test_directories_that_are_refused(tmp_path: Path) -> None:
    assert "does not exist; name a directory with adapter_config.json" in refusal(tmp_path / "no")
    file = tmp_path / "file"
    file.write_text("")
    assert "is a file; name a directory" in refusal(file)
    assert "adapter_config.json is missing" in refusal(tmp_path)
    root = write(tmp_path / "one")
    (root / "adapter_model.safetensors").rename(root / "adapter_model.bin")
    words = refusal(root)
    assert "only pickled weights (adapter_model.bin), which can run code when loaded" in words
    (root / "adapter_model.bin").unlink()
    assert "adapter_model.safetensors is missing" in refusal(root)
    os.mkfifo(root / "adapter_model.safetensors")
    assert "is not a regular file" in refusal(root)


def test_configurations_that_are_no_json(tmp_path: Path) -> None:
    root = write(tmp_path)
    for text, words in (
        ("{", "adapter_config.json is not valid JSON"),
        ("[]", "holds list, not an object"),
        ('{"r": 4, "r": 8}', "'r' is repeated"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"r": ' + "9" * 5000 + "}", "is not valid JSON"),
        (" " * (1 << 21), "has 2097152 bytes, the limit is 1048576"),
        ("\udcff", "is not valid JSON"),
    ):
        (root / "adapter_config.json").write_text(text, errors="surrogateescape")
        assert words in refusal(root)


def test_links_that_leave_the_directory(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside") / "adapter_model.safetensors"
    root = write(tmp_path / "all" / "one")
    (root / "adapter_model.safetensors").unlink()
    (root / "adapter_model.safetensors").symlink_to(outside)
    assert f"adapter_model.safetensors is a link to {outside}, which is not in" in refusal(root)
    assert read_adapter(root, "one", within=tmp_path).rank == 4
    linked = tmp_path / "all" / "two"
    linked.symlink_to(tmp_path / "outside")
    assert read_adapter(linked, "one").rank == 4, "the user named it"
    assert "only adapters in that directory are read" in refusal(linked, within=tmp_path / "all")
    up = tmp_path / "all" / ".." / "outside"
    assert "only adapters in that directory are read" in refusal(up, within=tmp_path / "all")


def test_links_of_a_hub_are_followed(tmp_path: Path) -> None:
    repository = tmp_path / "models--someone--adapter"
    blobs, root = repository / "blobs", repository / "snapshots" / "abc"
    write(root)
    blobs.mkdir()
    for file in list(root.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(Path("..") / ".." / "blobs" / file.name)
    assert read_adapter(root, "one").rank == 4


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


A, B = f"{PREFIX}{Q}.lora_A.weight", f"{PREFIX}{Q}.lora_B.weight"


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ("{}{", b"", "the header of adapter_model.safetensors is not valid"),
        ("{" * 15_000, b"", "describes more than tensors"),
        ("[" * 100_000, b"", "describes more than tensors"),
        ('{"a": [' + "[]," * 30_000 + "[]]}", b"", "describes more than tensors"),
        ("{" + '"a": 0, ' * 50_000 + '"a": 0}', b"", "describes more than tensors"),
        ({A: entry("F32", [1], 0, 4), "__metadata__": {"a": "b"}}, b"0000", "no lora_B"),
        ({A: 3}, b"", "is not valid: Expected `object`, got `int`"),
        ({A: entry("I64", [1], 0, 8)}, b"00000000", "is of type I64"),
        ({A: entry("F32", [4, "x"], 0, 4)}, b"0000", "is not valid: Expected `int`"),
        ({A: entry("F32", [4, -1], 0, 4)}, b"0000", "no valid entry"),
        ({A: entry("F32", [2**70], 0, 4)}, b"0000", "no valid entry"),
        ({A: entry("F32", [2**60], 0, 4)}, b"0000", "no valid entry"),
        ({A: entry("F32", [2**40, 2**40, 2**40], 0, 0)}, b"", "has 0 bytes, its shape"),
        ({A: entry("F32", [True], 0, 4)}, b"0000", "is not valid: Expected `int`"),
        ({A: entry("F32", [1], 4, 8)}, b"00000000", "begins at byte 4, should at 0"),
        ({A: entry("F32", [1], 0, 4), B: entry("F32", [1], 0, 4)}, b"0000", "should at 4"),
        ({A: entry("F32", [4], 0, 16)}, b"0000", "it is truncated or damaged"),
        ({A: entry("F32", [1], 0, 4)}, b"0000111", "it is truncated or damaged"),
    ],
)
def test_damaged_weights(tmp_path: Path, header: Any, data: bytes, words: str) -> None:
    text = header if isinstance(header, str) else json.dumps(header)
    assert words in refusal(write_raw(tmp_path, text, data))


def test_headers_of_wrong_sizes(tmp_path: Path) -> None:
    assert "no valid header: it is truncated" in refusal(write_raw(tmp_path, "{}", length=1 << 62))
    big = write_raw(tmp_path, "{}", length=(16 << 20) + 1)
    os.truncate(big / "adapter_model.safetensors", 64 << 20)
    assert "the limit is 16777216" in refusal(big)
    (big / "adapter_model.safetensors").write_bytes(b"")
    assert "has 0 bytes and no valid header" in refusal(big)
    root = write(tmp_path)
    weights = root / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "it is truncated or damaged" in refusal(root)


def test_names_of_other_models() -> None:
    assert not is_other_model("meta/Llama-3.2-1B", "/models/llama-3.2-1b/")
    assert is_other_model("meta/Llama-3.2-1B", "meta/Llama-3.2-3B")
    assert not is_other_model("", "meta/Llama-3.2-3B")

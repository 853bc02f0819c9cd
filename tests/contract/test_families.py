"""What config.json says, in whichever words, becomes the spec transformers would compute."""

import copy
import math
import random
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.config.model import ModelInfo
from engine.errors import ModelError
from engine.layers.rope import RopeSpec
from engine.layers.rotary import cos_sin_table, frequencies
from engine.models.families import FAMILIES
from engine.models.hf_config import rope
from engine.models.load import native_spec
from engine.models.mamba_families import MAMBA_FAMILIES
from engine.models.spec import DecoderSpec

# Families whose class of configuration is not named as the model's: those with images, too.
TEXT = ("Gemma3", "Qwen3_5")
ALL = {**FAMILIES, **MAMBA_FAMILIES}
CONFIG_CLASSES = {
    name: getattr(
        transformers,
        re.sub("(Vl)?For[A-Za-z]*$", "TextConfig" if name.startswith(TEXT) else "Config", name),
    )
    for name in ALL
}
SIZES = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8}
# Other sizes that a file must have, since the class's default belongs to a larger hidden size.
SIZES_OF_MAMBA: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"mamba_n_heads": 8, "num_attention_heads": 8},
    "FalconMambaForCausalLM": {},
    "GraniteMoeHybridForCausalLM": {"mamba_n_heads": 8, "num_attention_heads": 8},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 16},
    "MambaForCausalLM": {},
    "NemotronHForCausalLM": {"num_hidden_layers": 4, "num_attention_heads": 8},
}


def comparable(spec: DecoderSpec) -> dict[str, Any]:
    """A spec as plain values; of a rotary embedding, the frequencies it comes to."""
    content = asdict(replace(spec, layers=()))
    content["layers"] = [
        (replace(layer, rope=None), layer.rope and summary(layer.rope)) for layer in spec.layers
    ]
    return content


def summary(table: RopeSpec) -> tuple[Any, ...]:
    inv_freq, factor = frequencies(table, 64)
    return table.rope_type, table.rotary_dim, factor, inv_freq.tolist()


def hf_of(name: str, **options: Any) -> dict[str, Any]:
    """config.json as transformers 5 writes it."""
    config = CONFIG_CLASSES[name](**{**SIZES, **copy.deepcopy(options)})
    return dict(config.to_dict())


def older(hf: dict[str, Any]) -> dict[str, Any]:
    """The same file in the words of transformers 4."""
    old = dict(hf)
    given = dict(old.pop("rope_parameters"))
    if "full_attention" in given:
        old["rope_local_base_freq"] = given["sliding_attention"]["rope_theta"]
        given = dict(given["full_attention"])
    old["rope_theta"] = given.pop("rope_theta")
    old["partial_rotary_factor"] = given.pop("partial_rotary_factor", 1.0)
    given["type"] = given.pop("rope_type")
    old["rope_scaling"] = None if given["type"] == "default" else given
    old["torch_dtype"] = old.pop("dtype", None)
    return old


@pytest.mark.parametrize("name", ALL)
def test_what_a_file_leaves_out_takes_the_familys_default(name: str) -> None:
    sizes = {**SIZES, "num_attention_heads": 8}
    if name in SIZES_OF_MAMBA:
        sizes = {**SIZES, **SIZES_OF_MAMBA[name]}
    if name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        # These classes' defaults (32 heads for keys) belong to sizes nobody publishes.
        sizes["num_key_value_heads"] = 4
    short = ALL[name]({"model_type": name, **sizes})
    full = ALL[name](CONFIG_CLASSES[name](**sizes).to_dict())
    assert comparable(short) == comparable(full)


@pytest.mark.parametrize("name", MAMBA_FAMILIES)
def test_other_activations_before_a_scan_are_refused(name: str) -> None:
    key = "mamba_hidden_act" if name.startswith("Nemotron") else "hidden_act"
    hf = CONFIG_CLASSES[name]().to_dict()
    MAMBA_FAMILIES[name]({**hf, key: "swish"})
    for value in ("gelu", "relu"):
        with pytest.raises(ModelError, match=f"{key} is '{value}', must be 'silu'"):
            MAMBA_FAMILIES[name]({**hf, key: value})


@pytest.mark.parametrize("name", FAMILIES)
def test_older_files_say_the_same(name: str) -> None:
    hf = hf_of(name, num_attention_heads=8, num_key_value_heads=4)
    assert comparable(FAMILIES[name](older(hf))) == comparable(FAMILIES[name](hf))


def test_older_llama3_scaling_says_the_same() -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    hf = hf_of("LlamaForCausalLM", num_attention_heads=4, rope_parameters=scaling)
    llama = FAMILIES["LlamaForCausalLM"]
    assert comparable(llama(older(hf))) == comparable(llama(hf))


def test_phi3_longrope_by_its_first_name() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    hf = {
        **SIZES,
        "num_attention_heads": 8,
        "max_position_embeddings": 131_072,
        "original_max_position_embeddings": 4096,
        "rope_theta": 10_000.0,
        "rope_scaling": {"type": "su", **factors},
    }
    table = FAMILIES["Phi3ForCausalLM"](hf).layers[0].rope
    assert table is not None and table.rope_type == "longrope"
    assert frequencies(table, 64).attention_factor == pytest.approx(
        math.sqrt(1 + math.log(32) / math.log(4096))
    )


def test_gemma3_turns_local_layers_at_their_own_base() -> None:
    hf = {
        **SIZES,
        "num_attention_heads": 4,
        "rope_theta": 1e6,
        "rope_local_base_freq": 5e3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    layers = FAMILIES["Gemma3ForCausalLM"](hf).layers
    ropes = [layer.rope for layer in layers]
    assert [bool(layer.window) for layer in layers] == [True] * 5 + [False] + [True] * 2
    assert all(table is not None for table in ropes)
    assert [(r.rope_type, r.theta) for r in ropes if r] == (
        [("default", 5e3)] * 5 + [("linear", 1e6)] + [("default", 5e3)] * 2
    )


def test_mistral_with_types_of_layers_is_ministral() -> None:
    types = ["sliding_attention", "full_attention"] * 4
    hf = {**SIZES, "num_attention_heads": 8, "sliding_window": 9, "layer_types": types}
    for name in ("MistralForCausalLM", "MinistralForCausalLM"):
        assert [layer.window for layer in FAMILIES[name](hf).layers] == [9, 0] * 4
    assert [layer.window for layer in FAMILIES["MixtralForCausalLM"](hf).layers] == [9] * 8


def random_rope(kind: str, dice: random.Random) -> dict[str, Any]:
    """Parameters of one kind, for heads of 32."""
    given: dict[str, Any] = {"rope_type": kind, "rope_theta": dice.choice([1e3, 1e4, 5e5])}
    share = dice.choice([0.5, 1.0])
    if share != 1.0:
        given["partial_rotary_factor"] = share
    if kind != "longrope":
        given["factor"] = dice.choice([1.0, 2.0, 3.7, 16.0])
    if kind in ("llama3", "yarn", "longrope"):
        given["original_max_position_embeddings"] = dice.choice([16, 64, 300])
    if kind == "llama3":
        given.update(low_freq_factor=dice.choice([1.0, 2.0]), high_freq_factor=4.0)
    if kind == "longrope":
        half = int(32 * share) // 2
        for key in ("short_factor", "long_factor"):
            given[key] = [dice.uniform(1, 9) for _ in range(half)]
        given["factor"] = dice.choice([None, 4.0])
    if kind in ("yarn", "longrope") and dice.random() < 0.3:
        given["attention_factor"] = 1.37
    if kind == "yarn":
        extras = {"beta_fast": 16, "beta_slow": 2, "mscale": 1.3, "mscale_all_dim": 0.6}
        given.update({key: v for key, v in extras.items() if dice.random() < 0.5})
        given["truncate"] = dice.random() < 0.5
    return given


@pytest.mark.parametrize("kind", ROPE_INIT_FUNCTIONS)
def test_frequencies_equal_transformers(kind: str, seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(30):
        given = random_rope(kind, dice)
        options = {
            "hidden_size": 128,
            "num_attention_heads": 4,
            "max_position_embeddings": dice.choice([128, 600]),
        }
        length = dice.choice([8, 64, 128, 700])
        config = transformers.LlamaConfig(**options, rope_parameters=copy.deepcopy(given))
        expected, factor = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length)
        ours = frequencies(rope({**options, "rope_parameters": given}), length)
        assert torch.equal(ours.inv_freq, expected), (given, options, length)
        assert ours.attention_factor == pytest.approx(factor)


def test_table_holds_scaled_cosines_then_sines() -> None:
    given = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    table = rope({"hidden_size": 64, "num_attention_heads": 4, "rope_scaling": given})
    inv_freq, factor = frequencies(table, 50)
    cos_sin = cos_sin_table(table, 50)
    assert cos_sin.shape == (50, 16) and factor > 1
    assert torch.equal(cos_sin[17, :8], torch.cos(17.0 * inv_freq) * factor)
    assert torch.equal(cos_sin[17, 8:], torch.sin(17.0 * inv_freq) * factor)


def test_longrope_and_dynamic_are_chosen_by_the_longest_sequence_there_can_be() -> None:
    """transformers looks at each call's longest sequence instead: see engine.layers.rotary."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 128}
    factors = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
    given = {"rope_type": "longrope", "original_max_position_embeddings": 64, **factors}
    longrope = rope({**sizes, "rope_parameters": given})
    short, long = (frequencies(longrope, n).inv_freq for n in (64, 65))
    assert torch.allclose(short, 3 * long)

    dynamic = rope({**sizes, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}})
    plain = rope(sizes)
    assert torch.equal(frequencies(dynamic, 128).inv_freq, frequencies(plain, 128).inv_freq)
    assert frequencies(dynamic, 256).inv_freq[-1] < frequencies(plain, 256).inv_freq[-1]


LLAMA = {**SIZES, "model_type": "llama", "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "4 attention heads"),
        ({"hidden_act": "relu"}, "'relu'"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "'spiral'"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "lacks long_factor"),
    ],
)
def test_a_file_that_cannot_be_computed_is_refused_by_name(change: dict, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        FAMILIES["LlamaForCausalLM"]({**LLAMA, **change})


@pytest.mark.parametrize(
    "types", [["full_attention"] * 3, ["chunked_attention"] * 8], ids=["too-few", "unknown"]
)
def test_layer_types_that_fit_no_layer_are_refused(types: list[str]) -> None:
    with pytest.raises(ModelError, match="layer_types"):
        FAMILIES["Gemma2ForCausalLM"]({**LLAMA, "layer_types": types})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ({"layer_types": ["conv"] * 8}, "linear_attention or full_attention"),
        ({"full_attention_interval": 0}, "full_attention_interval is 0"),
        ({"linear_num_key_heads": 3}, "multiple of its linear_num_key_heads, 3"),
        ({"linear_key_head_dim": "wide"}, "linear_key_head_dim is 'wide'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_gated_delta_rules_that_cannot_be_computed_are_refused(change: dict, says: str) -> None:
    for name in ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"):
        with pytest.raises(ModelError, match=says):
            FAMILIES[name]({**LLAMA, **change})


def test_decoders_that_see_later_tokens_only_pool(tmp_path: Path) -> None:
    hf = {**LLAMA, "use_bidirectional_attention": True}
    info = ModelInfo(
        path=tmp_path, architecture="Gemma3ForCausalLM", model_type="gemma3_text", hf=hf
    )
    with pytest.raises(ModelError, match="use_bidirectional_attention"):
        native_spec(info)
    spec = native_spec(info, pools=True)
    assert spec is not None and not spec.is_causal

"""transformers' own modules over our paged attention, against the same modules with theirs."""

import json
import logging
from pathlib import Path

import pytest
import torch
import transformers
from e2e.general_models import GENERAL_CASES, REFUSED, general_config, make_general_model
from e2e.paged import PagedRun
from e2e.test_equality import GENERAL, WITH_STATES
from e2e.tiny_models import VOCAB
from transformers.utils import is_kernels_available

import kernels
from engine.config.model import ModelConfig, read_model_info
from engine.errors import ModelError
from engine.kv.layout import SharedKV
from engine.models.general import GeneralModel
from engine.models.load import load_model

MAX_MODEL_LEN = 64
LENGTH = 41


def load(path: Path, max_model_len: int = MAX_MODEL_LEN, **options: object) -> GeneralModel:
    config = ModelConfig(model=str(path), **options)
    info = read_model_info(path)
    model = load_model(config, info, device="cpu", max_model_len=max_model_len)
    assert isinstance(model, GeneralModel)
    return model


def random_tokens(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count,), generator=generator).tolist()


@torch.inference_mode()
def reference_logits(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


def reference(path: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < 1e-4, f"{what}: off by {error:.2e} of the largest logit"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in GENERAL + WITH_STATES))
        for name in GENERAL_CASES
    ],
)
def test_logits_equal_transformers(tmp_path: Path, name: str, seed: int) -> None:
    path = make_general_model(name, tmp_path)
    model, theirs = load(path), reference(path)
    a, b = random_tokens(seed, LENGTH), random_tokens(seed + 1, 29)
    expected = {"a": reference_logits(theirs, a), "b": reference_logits(theirs, b)}
    if "dynamic" in name:  # transformers changes its frequencies with every longer sequence
        a = random_tokens(seed, MAX_MODEL_LEN)
        expected["a"] = reference_logits(theirs, a)
        padded = b + random_tokens(seed, MAX_MODEL_LEN - len(b))
        expected["b"] = reference_logits(theirs, padded)[: len(b)]
    for chunk in (None, 7, 16):
        run = PagedRun(model, seed=seed)
        assert_same(run.prefill("a", a, chunk), expected["a"], f"{name} in chunks of {chunk}")

    run = PagedRun(model, block_size=8, seed=seed)
    got: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
    done = {"a": 0, "b": 0}
    for counts in [(5, 0), (1, 11), (9, 1), (1, 1), (20, 7), (1, 1), (1, 8), (3, 0)]:
        chunks = {
            key: tokens[done[key] : done[key] + count]
            for key, tokens, count in zip("ab", (a, b), counts, strict=True)
            if count
        }
        for key, logits in run.step(chunks).items():
            got[key].append(logits)
            done[key] += len(chunks[key])
    for key, parts in got.items():
        ours = torch.cat(parts)
        assert_same(ours, expected[key][: len(ours)], f"{name}, two sequences mixed, {key}")


def test_cache_is_shaped_by_what_the_layers_keep(tmp_path: Path) -> None:
    """Windows come from the masks, head sizes from keys and values, MLA's unequal ones too."""
    mixed = load(make_general_model("cohere2-mixed", tmp_path)).cache_spec
    assert {(layer.num_kv_heads, layer.head_dim) for layer in mixed} == {(2, 16)}
    assert [layer.window for layer in mixed] == [7, 0, 7]
    latent = load(make_general_model("deepseek-v3", tmp_path)).cache_spec
    assert {(layer.head_dim, layer.value_dim) for layer in latent} == {(24, 12)}
    sizes = load(make_general_model("gemma4-two-head-sizes", tmp_path)).cache_spec
    assert [layer.head_dim for layer in sizes] == [16, 16, 32]
    heads = load(make_general_model("mimo-v2-flash", tmp_path)).cache_spec
    assert [(layer.num_kv_heads, layer.window) for layer in heads] == [(1, 0), (2, 6), (2, 6)]
    chunked = load(make_general_model("llama4-chunks", tmp_path)).cache_spec
    assert [(layer.window, layer.is_chunked) for layer in chunked] == [
        (8, True),
        (0, False),
        (8, True),
    ]
    shared = load(make_general_model("gemma3n-shared-kv", tmp_path)).cache_spec
    assert shared[2:] == (SharedKV(source=0), SharedKV(source=1))


def test_window_that_no_sequence_outgrows_is_none(tmp_path: Path) -> None:
    model = load(make_general_model("cohere2-mixed", tmp_path), max_model_len=7)
    assert [layer.window for layer in model.cache_spec] == [0, 0, 0]


def test_padding_writes_nothing_and_other_models_stay_apart(tmp_path: Path, seed: int) -> None:
    """Two models of one class, used in turns, and rows whose slot is -1."""
    path = make_general_model("glm", tmp_path)
    one, other = load(path), load(path, load_format="dummy", seed=seed)
    tokens = random_tokens(seed, 12)
    expected = PagedRun(one).prefill("a", tokens)
    run, elsewhere = PagedRun(one), PagedRun(other)
    parts = []
    for token in tokens:
        parts.append(run.step({"a": [token]})["a"])
        elsewhere.step({"a": [token]})
    assert_same(torch.cat(parts), expected, "in turns")

    before = [layer.clone() for layer in run.kv]
    batch = run.batch(["a"], {"a": [5]})
    batch.attn[0].slots[:] = -1
    one.forward(batch, run.kv)
    assert all(torch.equal(x, y) for x, y in zip(before, run.kv, strict=True))


def test_dummy_weights_are_seeded(tmp_path: Path, seed: int) -> None:
    config = general_config("GlmConfig", {"head_dim": 16})
    config.architectures = ["GlmForCausalLM"]
    config.save_pretrained(tmp_path)
    tokens = random_tokens(seed, 9)

    def logits(seed: int) -> torch.Tensor:
        state = torch.get_rng_state()
        model = load(tmp_path, load_format="dummy", seed=seed)
        assert torch.equal(torch.get_rng_state(), state), "loading must not move torch's dice"
        return PagedRun(model).prefill("a", tokens)

    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))


def test_bfloat16(tmp_path: Path, seed: int) -> None:
    """What is computed in bfloat16 is what transformers computes, up to rounding."""
    path = make_general_model("starcoder2-window", tmp_path)
    model = load(path, dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert {layer.dtype_bytes for layer in model.cache_spec} == {2}
    tokens = random_tokens(seed, 20)
    theirs = reference_logits(reference(path), tokens)
    ours = PagedRun(model).prefill("a", tokens, 7)
    assert ours.dtype == torch.float32
    assert (ours - theirs).norm() < 0.05 * theirs.norm()


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox", "gemma", "olmoe", "deepseek-v3"])
def test_float16_is_kept_and_computed_in_float32(tmp_path: Path, name: str, seed: int) -> None:
    """Tables shared with the output layer and not, scaled ones, transposed layers, experts."""
    path = make_general_model(name, tmp_path, torch.float16)
    model = load(path)
    assert model.dtype == torch.float32
    tokens = random_tokens(seed, 20)
    theirs = reference_logits(reference(path), tokens)
    assert_same(PagedRun(model).prefill("a", tokens, 7), theirs, name)


def test_the_choice_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="engine"):
        load(make_general_model("helium", tmp_path))
    assert "HeliumForCausalLM" in caplog.text
    assert "transformers" in caplog.text


@pytest.mark.behaviour(96)
@pytest.mark.parametrize("architecture", REFUSED)
def test_refused_by_name_and_reason(tmp_path: Path, architecture: str) -> None:
    config_class, options, reason = REFUSED[architecture]
    config = general_config(config_class, options)
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason) as caught:
        load(tmp_path, load_format="dummy")
    assert architecture in str(caught.value)


def test_positions_beyond_a_learned_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no position 599"):
        load(make_general_model("gpt2", tmp_path), max_model_len=600)


def test_quantization_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"int8.*GlmForCausalLM"):
        load(make_general_model("glm", tmp_path), quantization="int8")


def test_unknown_architecture_is_refused(tmp_path: Path) -> None:
    content = {"architectures": ["MarvinForCausalLM"], "model_type": "marvin", "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match="MarvinForCausalLM"):
        load(tmp_path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    path = make_general_model("glm", tmp_path)
    state = reference(path).state_dict()
    (path / "model.safetensors").unlink()
    torch.save(state, path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        load(path)


def test_code_in_the_directory_is_not_run_unasked(tmp_path: Path) -> None:
    content = {
        "architectures": ["MarvinForCausalLM"],
        "model_type": "marvin",
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelError, match="trust_remote_code"):
        load(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_missing_weights_are_named(tmp_path: Path) -> None:
    path = make_general_model("glm", tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["num_hidden_layers"] = 4
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"lacks weights of GlmForCausalLM.*layers\.3"):
        load(path)


def test_transformers_does_not_take_our_kernels_for_its_own() -> None:
    """A distribution called `kernels` switches transformers to downloaded code; ours must not."""
    assert not hasattr(kernels, "__version__")
    assert not is_kernels_available()

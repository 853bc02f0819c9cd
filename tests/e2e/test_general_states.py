"""Modules of transformers whose recurrent states do not work as this engine needs are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.general_models import (
    GENERAL_CASES,
    WITH_STATES,
    general_config,
    make_general_model,
)
from e2e.paged import PagedRun
from e2e.quantized_models import write_model
from e2e.test_general import assert_same, load, random_tokens, reference, reference_logits
from e2e.test_quantized import DIRECTORIES
from e2e.tiny_models import Case, random_model, save
from transformers import AutoModelForCausalLM
from transformers.models.olmo_hybrid import modeling_olmo_hybrid as olmo

from engine.errors import ModelError
from engine.kv.layout import PagedKV, RecurrentState

MIXER = olmo.OlmoHybridGatedDeltaNet
WHOLE = MIXER.forward
ATTEND = olmo.OlmoHybridAttention.forward


class Forgetful:
    """A cache that has no state for mixers that read it with several tokens, or with any."""

    def __init__(self, cache: Any, forgets: bool) -> None:
        self.cache, self.forgets = cache, forgets

    def __getattr__(self, name: str) -> Any:
        if self.forgets and name in ("get_conv_state", "get_recurrent_state"):
            return lambda *_, **__: None
        return getattr(self.cache, name)


def forgets_state_in_chunks(
    self: Any, hidden_states: torch.Tensor, cache_params: Any = None, **more: Any
) -> torch.Tensor:
    forgets = hidden_states.shape[1] > 1
    if cache_params is not None:
        cache_params = Forgetful(cache_params, forgets)
    return WHOLE(self, hidden_states, cache_params, **more)


def never_reads_its_state(
    self: Any, hidden_states: torch.Tensor, cache_params: Any = None, **more: Any
) -> torch.Tensor:
    out = WHOLE(self, hidden_states, None, **more)
    if cache_params is not None:
        WHOLE(self, hidden_states, Forgetful(cache_params, True), **more)
    return out


def ignores_the_cache(
    self: Any, hidden_states: torch.Tensor, cache_params: Any = None, **more: Any
) -> torch.Tensor:
    return WHOLE(self, hidden_states, None, **more)


def keeps_another_state_in_the_module(
    self: Any, hidden_states: torch.Tensor, cache_params: Any = None, **more: Any
) -> torch.Tensor:
    before = getattr(self, "last", torch.zeros_like(hidden_states[:1, -1:]))
    if cache_params is not None:
        self.last = hidden_states[:1, -1:]
    return WHOLE(self, hidden_states + before, cache_params, **more)


def mixes_the_sequences_of_a_batch(
    self: Any, hidden_states: torch.Tensor, cache_params: Any = None, **more: Any
) -> torch.Tensor:
    mean = hidden_states.mean(0, keepdim=True)
    return WHOLE(self, 0.5 * (hidden_states + mean), cache_params, **more)


def shifts_tokens_in_attention(self: Any, hidden_states: torch.Tensor, *args: Any, **more: Any):
    return ATTEND(self, hidden_states + hidden_states.roll(1, dims=1), *args, **more)


BROKEN: list[tuple[type, Callable[..., Any], str]] = [
    (MIXER, forgets_state_in_chunks, "OlmoHybridGatedDeltaNet depend on how tokens are divided"),
    (MIXER, never_reads_its_state, "OlmoHybridGatedDeltaNet depend on how tokens are divided"),
    (MIXER, ignores_the_cache, "layer 0 stores no state"),
    (MIXER, keeps_another_state_in_the_module, "depend on how|are not those without"),
    (MIXER, mixes_the_sequences_of_a_batch, "depend on how tokens are divided"),
    (olmo.OlmoHybridAttention, shifts_tokens_in_attention, "other tokens or their order"),
]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("cls", "forward", "reason"), BROKEN, ids=[f.__name__ for _, f, _ in BROKEN]
)
def test_modules_with_other_states_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cls: type,
    forward: Callable[..., Any],
    reason: str,
    dtype: str,
) -> None:
    path = make_general_model("olmo-hybrid", tmp_path)
    load(path, dtype=dtype)
    monkeypatch.setattr(cls, "forward", forward)
    with pytest.raises(ModelError, match=reason):
        load(path, dtype=dtype)


def test_layers_keep_states_and_keys(tmp_path: Path) -> None:
    spec = load(make_general_model("olmo-hybrid", tmp_path)).cache_spec
    assert [type(layer) for layer in spec] == [PagedKV, RecurrentState, RecurrentState]
    shapes = [[(one.shape, one.dtype) for one in layer.tensors] for layer in spec[1:]]
    assert shapes == [[((192, 4), "float32"), ((4, 12, 24), "float32")]] * 2


def test_a_step_can_be_run_again(tmp_path: Path, seed: int) -> None:
    """A step that is run again reads the states from before it."""
    path = make_general_model("olmo-hybrid", tmp_path)
    model, tokens = load(path), random_tokens(seed, 20)
    expected = reference_logits(reference(path), tokens)
    run = PagedRun(model)
    assert_same(run.prefill("a", tokens[:7]), expected[:7], "first tokens")
    run.grow("a", 4)
    batch = run.batch(["a"], {"a": tokens[7:11]})
    for _ in range(2):
        logits = model.logits(model.forward(batch, run.kv).last)
        assert_same(logits, expected[7:11], "a step run twice")
    assert_same(run.step({"a": tokens[11:12]})["a"], expected[11:12], "one token")


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_STATES)
def test_bfloat16_errors_are_those_of_transformers(tmp_path: Path, name: str, seed: int) -> None:
    path, tokens = make_general_model(name, tmp_path), random_tokens(seed, 30)
    right = reference_logits(reference(path), tokens)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    allowed = 1.5 * (reference_logits(theirs.eval(), tokens) - right).norm()
    model = load(path, dtype="bfloat16")
    for chunk in (None, 7, 1):
        assert (PagedRun(model).prefill("a", tokens, chunk) - right).norm() < allowed


def test_time_steps_are_limited_in_prompts_and_later(tmp_path: Path, seed: int) -> None:
    """transformers' own steps with a cache leave out the limits."""
    config_class, options = GENERAL_CASES["zamba2"]
    config = general_config(config_class, {**options, "time_step_min": 0.7})
    save(random_model(config, seed), tmp_path)
    tokens = random_tokens(seed, 20)
    model, expected = load(tmp_path), reference_logits(reference(tmp_path), tokens)
    for chunk in (1, 3):
        assert_same(PagedRun(model).prefill("a", tokens, chunk), expected, f"chunks of {chunk}")


QUANTISED = [
    ("olmo-hybrid", "gptq"),
    *(
        pytest.param(name, form, marks=pytest.mark.slow)
        for name, form in (
            ("olmo-hybrid", "fp8-blocks"),
            ("kimi-linear", "gptq"),
            ("kimi-linear", "ct-w8a8"),
            ("zamba2", "fp8-blocks"),
            ("zamba2", "ct-w8a8"),
        )
    ),
]


@pytest.mark.parametrize(("name", "form"), QUANTISED)
def test_quantised_directories(tmp_path: Path, name: str, form: str, seed: int) -> None:
    config_class, options = GENERAL_CASES[name]
    case = Case(config_class.removesuffix("Config"), {**options, "pad_token_id": 0})
    written = DIRECTORIES[form]
    made = write_model(tmp_path / form, case, written.write, written.stated, keep=keeps_small)
    tokens = random_tokens(seed, 23)
    expected = reference_logits(made.reference, tokens)
    got = PagedRun(load(made.path, dtype="float32")).prefill("a", tokens, 5)
    assert_same(got, expected, f"{name}, {form}")


def keeps_small(module: str) -> bool:
    """The output layer, routers and projections to few numbers are not quantised."""
    return module.endswith(("lm_head", "gate", "a_proj", "b_proj"))

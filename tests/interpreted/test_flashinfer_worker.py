"""attention_backend through the public API, on the CPU in a GPU's place: FlashInfer's stand-in
computes the attention, interpreted kernels everything else."""

from __future__ import annotations

import importlib.abc
import json
import sys
from pathlib import Path

import pytest
from e2e.tiny_models import CASES, Case, config_of, random_model, save
from interpreted.test_cuda_worker import SMALL, interpreted, llm_for, run, tokens
from support import fake_flashinfer, triton_interpreter

from engine.errors import ConfigError

__all__ = ["interpreted"]  # a fixture
HEAD_DIM = {"head_dim": 64}  # the least that FlashInfer serves
BF16 = {"dtype": "bfloat16"}

pytestmark = pytest.mark.skipif(
    not triton_interpreter.IS_INTERPRETING, reason="the stand-in computes on the CPU"
)


def make_model(root: Path, family: str, **options: object) -> Path:
    case = CASES[family]
    small = Case(case.family, {**case.options, **SMALL, **HEAD_DIM, **options})
    save(random_model(config_of(small), seed=5), root)
    return root


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"num_kv_blocks": 5}),  # preempted
        ("gemma2", {"max_num_batched_tokens": 9}),  # chunks; windows, and capped scores
    ],
)
def test_tokens_are_those_of_the_cpu_worker(family, options, tmp_path, monkeypatch):
    path = make_model(tmp_path, family)
    with llm_for(path, device="cpu", **BF16) as llm:
        wanted = tokens(run(llm))
    fake = fake_flashinfer.install(monkeypatch)
    asked = {"attention_backend": "FLASHINFER", **BF16, **options}
    with llm_for(path, device="cuda", **asked) as llm:
        assert tokens(run(llm)) == wanted
        assert (llm.llm_engine.stats().num_preemptions > 0) == ("num_kv_blocks" in options)
    assert {call.wrapper for call in fake.named("run")} == {"decode", "prefill"}
    num_forms = 2 if family == "gemma2" else 1  # layers with a window, and without
    assert len(fake.named("run")) * num_forms == len(fake.named("plan")) * 2  # layers


class Watching(importlib.abc.MetaPathFinder):
    """Finds nothing, and notes what was looked for."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def find_spec(self, name, path, target=None):
        self.names.append(name)


@pytest.mark.parametrize("named", [None, "triton", "TRITON_ATTN"])
def test_flashinfer_is_not_looked_for_unless_it_is_named(named, tmp_path, monkeypatch):
    for name in ("flashinfer", "kernels.flashinfer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    watching = Watching()
    monkeypatch.setattr(sys, "meta_path", [watching, *sys.meta_path])
    path = make_model(tmp_path, "llama")
    with llm_for(path, device="cuda", attention_backend=named) as llm:
        assert len(tokens(run(llm))) == 3
    assert not [name for name in watching.names if "flashinfer" in name]


@pytest.mark.parametrize(
    ("family", "options", "changed", "why"),
    [
        ("llama", {}, {}, r"bfloat16 and float16, and this model in float32; use dtype="),
        ("llama", BF16, {"head_dim": 32}, r"64, 128, 256, and this model's are of 32; use "),
        ("llama", {**BF16, "batch_invariant": True}, {}, r"not serve batch_invariant; leave it"),
        ("llama", {**BF16, "kv_cache_dtype": "fp8"}, {}, r"float8_e4m3fn; use kv_cache_dtype="),
    ],
)
def test_what_it_does_not_serve_is_said_before_weights_are_read(
    family, options, changed, why, tmp_path, monkeypatch
):
    fake_flashinfer.install(monkeypatch)
    with pytest.raises(ConfigError, match=f"attention_backend is 'flashinfer'.*{why}"):
        llm_for(without_weights(make_model(tmp_path, family, **changed)), **cuda(options))


def test_a_missing_package_is_said_before_weights_are_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    path = without_weights(make_model(tmp_path, "llama"))
    with pytest.raises(ConfigError, match=r"cannot be imported.*pip install flashinfer-python"):
        llm_for(path, **cuda(BF16))


def test_models_of_transformers_own_are_refused(tmp_path, monkeypatch):
    fake_flashinfer.install(monkeypatch)
    path = without_weights(make_model(tmp_path, "llama"))
    config = json.loads((path / "config.json").read_text())
    config["architectures"] = ["GPTNeoXForCausalLM"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="which is for native families, and GPTNeoX"):
        llm_for(path, **cuda(BF16))


def cuda(options: dict) -> dict:
    return {"device": "cuda", "attention_backend": "flashinfer", **options}


def without_weights(path: Path) -> Path:
    for file in path.glob("*.safetensors"):
        file.unlink()
    return path

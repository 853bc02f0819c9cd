"""The model directory that is made of a GGUF file."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from engine.assets import BOX_MODEL
from engine.config.model import ModelConfig, read_model_info
from engine.errors import ModelError
from engine.gguf.directory import directory_of
from engine.text.tokenizer import load_tokenizer
from tools.fuzz_gguf import Type, valid


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_an_unknown_tokenizer_matters_only_where_it_is_needed(tmp_path: Path):
    path = tmp_path / "x.gguf"
    content = valid("llama")
    content.metadata[:] = [
        (key, (Type.STRING, b"bert") if key == "tokenizer.ggml.model" else value)
        for key, value in content.metadata
    ]
    path.write_bytes(content.encode())
    root = str(directory_of(str(path)))
    assert read_model_info(root).architecture == "LlamaForCausalLM"
    with pytest.raises(ModelError, match=r"(?s)bert.*set tokenizer to the directory"):
        load_tokenizer(ModelConfig(model=root))
    assert load_tokenizer(ModelConfig(model=root, tokenizer=str(BOX_MODEL))).encode("a")


def test_directories_of_files_that_are_gone_are_removed(tmp_path: Path):
    def directory(name: str) -> Path:
        path = tmp_path / name
        path.write_bytes(valid("llama").encode())
        return Path(directory_of(str(path)))

    gone, changed, kept, recent = map(directory, ("gone", "changed", "kept", "recent"))
    unfinished = gone.parent / "new-unfinished"
    unfinished.mkdir()
    old = time.time() - 2 * 3600
    for root in (gone, changed, kept, unfinished):
        os.utime(root, (old, old))
    for name in ("gone", "recent"):
        (tmp_path / name).unlink()
    with (tmp_path / "changed").open("ab") as stream:
        stream.write(b"more")
    made = directory("another")
    assert set(made.parent.iterdir()) == {kept, recent, made}

"""Statistics tell how near steps come to what memory and arithmetic allow."""

from pathlib import Path

import pytest
import torch
from e2e.general_models import make_general_model
from e2e.gguf_models import GgufModels
from e2e.references import engine_for
from e2e.tiny_models import make_tiny_model

from engine import LLMEngine, SamplingParams
from engine.worker import roofline

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
SLOW = roofline.Ceilings(threads=1, bytes=1e6, float32=1e7, bfloat16=1e7)


def answered(engine: LLMEngine) -> None:
    engine.add_request("0", {"prompt_token_ids": list(range(1, 30))}, GREEDY)
    while engine.has_unfinished_requests():
        engine.step()


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_steps_have_a_floor(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that reads a megabyte a second would take a step's bytes, each weight once."""
    monkeypatch.setattr(roofline, "known_ceilings", lambda threads, is_quiet: SLOW)
    path = make_tiny_model(name, tmp_path, torch.bfloat16)
    with engine_for(str(path)) as engine:
        answered(engine)
        stats = engine.stats()
    assert stats.step_seconds > 0
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert stats.floor_seconds <= (64 * size + 64 * 2**20) / SLOW.bytes
    assert stats.floor_seconds >= 60 * size / 10 / SLOW.bytes


def test_a_model_of_which_shapes_are_not_known_has_none(tmp_path: Path) -> None:
    with engine_for(str(make_general_model("gpt-neox", tmp_path))) as engine:
        answered(engine)
        assert engine.stats().floor_seconds == 0 == engine.stats().step_seconds


def test_a_gguf_file_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "known_ceilings", lambda threads, is_quiet: SLOW)
    with engine_for(str(GgufModels(tmp_path).get("llama").file)) as engine:
        answered(engine)
        assert engine.stats().floor_seconds == 0


def test_ceilings_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not behind a start that compiled kernels, when the machine is busy, and anew if what was
    kept cannot be read."""
    monkeypatch.setattr(roofline, "kept_file", lambda name: tmp_path / name)
    monkeypatch.setattr(roofline, "measured", lambda *given: SLOW)
    assert roofline.known_ceilings(1, is_quiet=False) is None
    assert roofline.known_ceilings(1, is_quiet=True) == SLOW
    assert roofline.known_ceilings(1, is_quiet=False) == SLOW
    (tmp_path / "ceilings-1.json").write_text('{"threads": 1}')
    assert roofline.known_ceilings(1, is_quiet=True) == SLOW

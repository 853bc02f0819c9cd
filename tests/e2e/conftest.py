"""Fixtures of the end-to-end tests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from e2e.box_engine import SIZES, greedy, run_one
from e2e.references import Tally
from e2e.tiny_models import TinyModels
from support.kv_stores import connector, drop, slow_profile

from engine import EngineArgs, LLMEngine

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    counts = Tally()
    yield counts
    print(f"\n{counts.ties} ties in {counts.compared} tokens")
    assert counts.ties <= 0.001 * counts.compared


@pytest.fixture
def store_options(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Options of engines that share a store of KV blocks in memory, and prefer to load."""
    place = request.node.name
    yield {
        "kv_transfer_config": connector(place),
        "cost_profile": slow_profile(tmp_path / "slow.json"),
        "max_model_len": 256,
    }
    drop(place)


@pytest.fixture(scope="session")
def _box_engine() -> Iterator[LLMEngine]:
    with LLMEngine.from_engine_args(EngineArgs(**SIZES)) as started:
        yield started


@pytest.fixture
def llm_engine(_box_engine: LLMEngine) -> Iterator[LLMEngine]:
    """The model in the box, small; a test leaves no request and no block behind."""
    yield _box_engine
    stats = _box_engine.stats()
    assert not _box_engine.has_unfinished_requests()
    assert stats is not None
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)


@pytest.fixture(scope="session")
def answer(_box_engine: LLMEngine) -> tuple[str, list[int]]:
    """What the model says to the first prompt, greedily: text and token ids."""
    last = run_one(_box_engine, greedy(output_kind="final"))[-1].outputs[0]
    return last.text, last.token_ids

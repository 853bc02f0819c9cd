"""How many drafts a decode may have, if each needs a copy of the model's recurrent states."""

import logging

import pytest

from engine.config.cache import CacheConfig
from engine.config.decide import cap_drafts
from engine.config.engine import ResolvedConfig
from engine.config.model import ModelConfig
from engine.config.sched import SchedulerConfig
from engine.worker.states import most_drafts, num_copies

NGRAM = {"method": "ngram", "num_speculative_tokens": 6}


def config_of(speculative: dict[str, object] | None = NGRAM) -> ResolvedConfig:
    sched = SchedulerConfig(max_num_seqs=8, max_model_len=64, speculative_config=speculative)
    return ResolvedConfig(
        model=ModelConfig(model="m"), scheduler=sched, cache=CacheConfig(), block_size=16
    )


@pytest.mark.parametrize(
    ("free_bytes", "expected"), [(1e9, 6), (4 * 8 * 1000 * 6, 6), (4 * 8 * 1000 * 3.5, 3), (10, 1)]
)
def test_copies_for_drafts_take_at_most_a_quarter_of_the_memory(free_bytes, expected, caplog):
    with caplog.at_level(logging.INFO, "engine.worker"):
        assert most_drafts(config_of(), 1000, free_bytes) == expected
    assert f"Up to {expected} drafts per decode" in caplog.text
    assert ("num_speculative_tokens is 6, but" in caplog.text) == (expected < 6)


def test_only_models_with_states_and_drafts_are_limited():
    assert most_drafts(config_of(), 0, 0) == 6
    assert most_drafts(config_of(None), 1000, 0) == 0


def test_fewer_drafts_need_fewer_copies():
    sched = cap_drafts(config_of().scheduler, 2)
    assert sched.speculative_config == {"method": "ngram", "num_speculative_tokens": 2}
    assert num_copies(config_of(sched.speculative_config)) == 4
    assert cap_drafts(sched, None) is sched
    assert cap_drafts(config_of(None).scheduler, 0).speculative_config is None

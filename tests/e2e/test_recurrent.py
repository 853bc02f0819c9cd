"""Models with recurrent states give the same tokens whatever the engine does meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from e2e.references import engine_for, prompts
from e2e.test_ngram import NGRAM
from e2e.tiny_models import TinyModels

from engine import SamplingParams

FAMILIES = [pytest.param("lfm2"), pytest.param("lfm2-biased", marks=pytest.mark.slow)]
SEEDED = [
    SamplingParams(temperature=0.9, top_p=0.95, seed=seed, max_tokens=20, ignore_eos=True, n=n)
    for seed, n in ((1, 1), (2, 3), (3, 1), (4, 2), (5, 1), (6, 1))
]
WAYS: dict[str, dict[str, Any]] = {
    "one-by-one": {"max_num_seqs": 1, "enforce_eager": True},
    "together": {},
    "chunks-of-5": {"max_num_batched_tokens": 5, "max_num_seqs": 5},
    "two-in-flight": {"async_scheduling": True, "max_num_batched_tokens": 33},
    "preempted": {"num_kv_blocks": 30, "async_scheduling": True},
    "drafts": NGRAM,
    "drafts-preempted": {**NGRAM, "num_kv_blocks": 30, "max_num_batched_tokens": 17},
    "own-process": {"multiprocess": True},
}


def texts() -> list[list[int]]:
    """Prompts that repeat themselves, so that drafts are found."""
    return [(ids * 3)[:45] for ids in prompts()]


def told(path: str, **options: Any) -> list[list[list[int]]]:
    """The tokens of each answer of each seeded request, all added at once."""
    with engine_for(path, dtype="float32", **options) as engine:
        for number, (ids, params) in enumerate(zip(texts(), SEEDED, strict=True)):
            engine.add_request(str(number), ids, params)
        last = {}
        while engine.has_unfinished_requests():
            for out in engine.step():
                last[int(out.request_id)] = out
        return [[list(one.token_ids) for one in last[n].outputs] for n in sorted(last)]


@pytest.mark.parametrize("name", FAMILIES)
def test_seeded_requests_sample_the_same_in_every_way(name: str, tiny_models: TinyModels) -> None:
    path = str(tiny_models.path(name))
    first, *others = WAYS
    right = told(path, **WAYS[first])
    assert [len(answers) for answers in right] == [params.n for params in SEEDED]
    for way in others:
        assert told(path, **WAYS[way]) == right, way

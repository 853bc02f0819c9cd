"""Prefix hits of a model with recurrent states: same tokens as transformers, and as many hits as a
model with full attention has."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.general_models import GENERAL_CASES, WITH_STATES, general_config
from e2e.references import WHOLE, Reference, compare, engine_for, finished, generate, run
from e2e.test_drafts_everywhere import drafting
from e2e.tiny_models import CASES, TinyModels, config_of, random_model, reference, save

from engine import LLMEngine, SamplingParams
from engine.core.replay import replay
from engine.sched.policies import FCFS

A = [(7 * k) % 281 + 3 for k in range(3000)]
B = [(11 * k + 5) % 277 + 3 for k in range(3000)]
NUM_NEW = 8
FAMILIES = [
    *("lfm2", "lfm2-moe", "granite-hybrid-moe", "bamba", "falcon-h1", "nemotron-h-moe"),
    *("jamba-moe", "mamba2", "mamba", "falcon-mamba", "qwen3-next", "qwen3.5", "qwen3.5-moe"),
]
OPTIONS = {"dtype": "float32", "block_size": 16, "max_model_len": 3200, "num_kv_blocks": 1200}


@pytest.fixture(
    scope="module",
    params=[
        *FAMILIES[:1],
        *(pytest.param(n, marks=pytest.mark.slow) for n in [*FAMILIES[1:], *WITH_STATES]),
    ],
)
def path(request, tmp_path_factory) -> str:
    """A tiny model with recurrent states, for sequences of up to 4,096 tokens."""
    length = {"max_position_embeddings": 4096}
    if request.param in CASES:
        case = CASES[request.param]
        config = config_of(case._replace(options={**case.options, **length}))
    else:
        config_class, options = GENERAL_CASES[request.param]
        config = general_config(config_class, {**options, **length})
    directory = tmp_path_factory.mktemp("states")
    save(random_model(config, seed=3), directory)
    return str(directory)


@pytest.fixture(scope="module")
def answer(path):
    """Returns what transformers generates after a prompt; each prompt is computed once."""
    model = reference(Path(path))
    known: dict[tuple[int, ...], Reference] = {}

    def generated(prompt: list[int]) -> Reference:
        key = tuple(prompt)
        if key not in known:
            tokens, margins = generate(model, prompt, NUM_NEW)
            known[key] = Reference([prompt], [tokens], [margins])
        return known[key]

    return generated


class Served:
    """Serves prompts alone, compares each answer with transformers', and returns the hits."""

    def __init__(self, engine: LLMEngine, answer, tally) -> None:
        self.engine, self.answer, self.tally = engine, answer, tally

    def __call__(self, *prompts: list[int]) -> list[int]:
        hits = []
        for prompt in prompts:
            tokens, cached = run(self.engine, [prompt], NUM_NEW)
            compare(self.answer(prompt), tokens, self.tally)
            hits += cached
        return hits


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True, "max_num_batched_tokens": 100},
        {"block_size": 8},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    ],
    ids=["plain", "two steps in flight", "blocks of 8", "drafts"],
)
def test_as_many_tokens_are_hit_as_with_full_attention(path, answer, tally, options):
    with engine_for(path, **{**OPTIONS, **options}) as engine:
        serve = Served(engine, answer, tally)
        size = engine.session.client.decided.block_size
        assert serve(A[:544], A[:544]) == [0, 543 // size * size]
        turn = A[:544] + answer(A[:544]).tokens[0]
        assert serve(turn + B[: 592 - len(turn)]) == [551 // size * size]
        shared = [A[1000:1512] + B[32 * k : 32 * k + 32] for k in range(4)]
        assert serve(*shared) == [0, 0, 512, 512]
        assert engine.stats().prefix_missed["no snapshot there"] == 543 // size * size
    with engine_for(path, **{**OPTIONS, **options}) as engine:
        assert Served(engine, answer, tally)(B[:3000], B[:3000]) == [0, 2992]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_starts_from_snapshots(name: str, tiny_models: TinyModels) -> None:
    """At the end of a prompt, of an answer, and of what two prompts have in common."""
    path = str(tiny_models.path(name))
    options = {"dtype": "float32", "block_size": 16, "num_kv_blocks": 600}
    hits = []
    with (
        engine_for(path, **options, enable_prefix_caching=False, max_num_seqs=1) as plain,
        engine_for(path, **options) as engine,
    ):
        asked = [A[:52], A[:52], A[:33] + B[:19], A[:33] + B[19:50], A[:33] + B[50:70], A[:48]]
        for prompt in asked:
            (right,), _ = run(plain, [prompt], 20)
            (found,), (hit,) = run(engine, [prompt], 20)
            assert found == right
            hits.append(hit)
        (turn,), (hit,) = run(engine, [[*A[:48], *right]], 20)
        assert [turn] == run(plain, [[*A[:48], *right]], 20)[0]
    assert hits == [0, 48, 0, 32, 32, 32]
    assert hit == 64


@pytest.mark.parametrize(
    "name",
    [*FAMILIES[:1], *(pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES[1:])],
)
def test_answers_are_continued_where_a_block_ended_among_drafts(
    name: str, tiny_models: TinyModels
) -> None:
    """All drafts are right, so a step of four tokens passes the end of a block by up to three, and
    the snapshot is not of the last token's state."""
    path = str(tiny_models.path(name))
    options = {"dtype": "float32", "block_size": 16, "num_kv_blocks": 600}
    asked = [A[:53], A[100:154], A[200:255], A[300:352]]
    with engine_for(path, **options, enable_prefix_caching=False) as plain:
        answers, _ = run(plain, asked, 30)
        turns = [[*ids, *said] for ids, said in zip(asked, answers, strict=True)]
        right, _ = run(plain, turns, 20)
    with engine_for(path, **options, **drafting("draft_model", path)) as engine:
        assert run(engine, asked, 30)[0] == answers
        found, hits = run(engine, turns, 20)
        assert engine.stats().counters["drafts.num_accepted_tokens"] > 120
    assert found == right
    assert hits == [80] * 4


def test_hits_in_a_batch_of_all_kinds(path, answer, tally):
    prompts = [A[:100], A[:100], A[:64] + B[:30], A[:64] + B[30:77], B[:17], A[:96], A[:97]]
    with engine_for(path, **OPTIONS, max_num_batched_tokens=64) as engine:
        for _ in range(3):
            tokens, cached = run(engine, prompts, NUM_NEW)
            for prompt, found in zip(prompts, tokens, strict=True):
                compare(answer(prompt), [found], tally)
        assert cached == [96, 96, 80, 96, 16, 80, 96]


def test_an_interval_gives_further_places_to_start_from(path, answer, tally):
    with engine_for(path, **OPTIONS, state_snapshot_interval=48) as engine:
        serve = Served(engine, answer, tally)
        assert serve(A[:300], A[:200] + B[:50]) == [0, 192]


class EvictsOnce(FCFS):
    """Preempts all running requests once in the run, after some steps."""

    def __init__(self, after: int) -> None:
        self.left = after

    def evict(self, view):
        self.left -= 1
        return list(view.running) if self.left == 0 else []


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("after", [3, 9, 14])
def test_preempted_requests_continue_from_a_snapshot_or_from_the_start(
    path, answer, tally, after, caching
):
    options = {**OPTIONS, "max_num_batched_tokens": 64, "enable_prefix_caching": caching}
    prompts = [A[:200], B[:150], A[100:330]]
    with engine_for(path, **options, scheduling_policy=EvictsOnce(after)) as engine:
        tokens, _ = run(engine, prompts, NUM_NEW)
        stats = engine.stats()
    for prompt, found in zip(prompts, tokens, strict=True):
        compare(answer(prompt), [found], tally)
    assert stats.num_preemptions > 0
    assert (stats.preempted_hits > 0) == caching


def test_several_seeded_answers_are_those_of_an_engine_without_prefix_cache(path):
    params = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=20, **WHOLE)
    found = []
    for caching in (True, True, False):
        with engine_for(path, **OPTIONS, enable_prefix_caching=caching) as engine:
            for _ in range(2):
                outs = finished(engine, [A[:100], A[:70]], params)
                found.append([one.token_ids for out in outs for one in out.outputs])
    assert all(each == found[-1] for each in found)


def test_blocks_of_snapshots_leave_nothing_to_later_keys_and_values(path, answer, tally):
    """In a small pool each block holds states, then KV, then states again."""
    with engine_for(path, **{**OPTIONS, "num_kv_blocks": 20, "block_size": 8}) as engine:
        serve = Served(engine, answer, tally)
        for start in range(0, 1000, 50):
            serve(A[start : start + 93], B[start : start + 60])


def test_a_run_with_hits_replays_to_identical_plans(path, tmp_path: Path):
    log = tmp_path / "steps.log"
    options = {**OPTIONS, "step_log": log, "state_snapshot_interval": 64}
    with engine_for(path, **options, async_scheduling=True) as engine:
        for _ in range(2):
            run(engine, [A[:200], A[:100] + B[:90], B[:300]], 30)
    outcome = replay(log)
    assert outcome.difference is None and outcome.num_requests == 6


def test_an_interval_that_is_no_multiple_of_the_block_size_is_refused(path):
    with pytest.raises(ValueError, match=r"state_snapshot_interval is 40.*\(16\): use 32"):
        engine_for(path, **OPTIONS, state_snapshot_interval=40)

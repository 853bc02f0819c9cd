"""Layers with sliding windows give blocks back, and the tokens stay those of transformers.

Prompts of about one, two and five windows, long answers, and whatever the engine does meanwhile.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.general_models import model_and_reference
from e2e.references import Reference, compare, engine_for, generate, run, tightest
from e2e.tiny_models import TinyModels

from engine import SamplingParams
from policylab.sim.kv_groups import layout_of

WINDOWS = {
    "mistral-window": 9,
    "ministral": 7,
    "smollm3-window-by-type": 6,
    "gemma2": 10,
    "gemma3": 7,
    "qwen3-moe-mixed": 10,
    "cohere2-mixed": 7,
    "gpt-oss-sinks": 6,
    "gemma3n-shared-kv": 8,
    "gemma4-two-head-sizes": 8,
    "gemma4-shared-kv": 8,
    "mimo-v2-flash": 6,
    "llama4-chunks": 8,
}
QUICK = {  # one of each kind: native, general, sinks, chunks, shared keys, layers that differ
    *("mistral-window", "gemma3", "gpt-oss-sinks", "llama4-chunks", "gemma4-shared-kv"),
    "mimo-v2-flash",
}
NUM_NEW = 40
BUDGET = 16
TIGHT = {"block_size": 4, "max_num_batched_tokens": BUDGET, "max_num_seqs": 6}
MODES: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"max_num_batched_tokens": 5, "max_num_seqs": 5},
    "two steps in flight": {"async_scheduling": True, "block_size": 4},
    "preempted": TIGHT,
    "preempted, two steps in flight": {**TIGHT, "async_scheduling": True},
    "n-grams": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        "block_size": 4,
    },
}


def each_with_a_third_of_the_modes() -> list[Any]:
    """Every quick family with two modes and every mode with two of them; all others are slow."""
    quick = [name for name in WINDOWS if name in QUICK]
    return [
        pytest.param(
            *(name, mode),
            marks=[]
            if name in QUICK and (quick.index(name) + place) % 3 == 0
            else [pytest.mark.slow],
        )
        for name in WINDOWS
        for place, mode in enumerate(MODES)
    ]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in WINDOWS
    ],
)
def case(request, tiny_models: TinyModels, tmp_path_factory) -> tuple[str, int, Reference]:
    name = request.param
    path, model = model_and_reference(name, tiny_models, tmp_path_factory.mktemp("general"))
    window, generator = WINDOWS[name], torch.Generator().manual_seed(3)
    lengths = (1, window - 1, window, window + 1, 2 * window, 2 * window + 3, 5 * window + 2)
    made = [torch.randint(3, 290, (n,), generator=generator).tolist() for n in lengths]
    made.append(made[-1][: 3 * window] + made[4])  # a shared beginning longer than the window
    answers = [generate(model, ids, NUM_NEW) for ids in made]
    return str(path), window, Reference(made, [a[0] for a in answers], [a[1] for a in answers])


@pytest.mark.parametrize(
    ("case", "mode"), each_with_a_third_of_the_modes(), indirect=["case"], scope="module"
)
def test_same_tokens_as_transformers(case, mode, tally):
    path, _, reference = case
    options = dict(MODES[mode])
    if mode.startswith("preempted"):
        longest = max(map(len, reference.prompts)) + NUM_NEW
        with engine_for(path, dtype="float32", **options) as engine:
            options |= {"num_kv_blocks": tightest(engine, longest)}
    with engine_for(path, dtype="float32", **options) as engine:
        tokens, _ = run(engine, reference.prompts, NUM_NEW)
        compare(reference, tokens, tally)
        if mode.startswith("preempted"):
            assert engine.stats().num_preemptions > 0, "the pool was meant to be too small"


@pytest.mark.slow
@pytest.mark.parametrize("case", WINDOWS, indirect=True)
def test_same_tokens_from_a_core_in_a_process_of_its_own(case, tally):
    path, _, reference = case
    with engine_for(path, dtype="float32", multiprocess=True) as engine:
        tokens, _ = run(engine, reference.prompts, NUM_NEW)
        compare(reference, tokens, tally)


@pytest.mark.parametrize("name", ["gemma3", "mistral-window"])
@pytest.mark.parametrize("options", [{"batch_invariant": True}, {"method": "draft_model"}])
def test_same_tokens_in_native_families(name, options, tiny_models: TinyModels, tally):
    """A draft model goes by the blocks of the first group, which here keeps all tokens."""
    model, generator = tiny_models.reference(name), torch.Generator().manual_seed(5)
    made = [torch.randint(3, 290, (n,), generator=generator).tolist() for n in (5, 11, 48)]
    answers = [generate(model, ids, NUM_NEW) for ids in made]
    if "method" in options:
        drafting = {"model": str(tiny_models.path("gemma2")), "num_speculative_tokens": 3}
        options = {"speculative_config": options | drafting}
    path = str(tiny_models.path(name))
    with engine_for(path, dtype="float32", block_size=4, **options) as engine:
        tokens, _ = run(engine, made, NUM_NEW)
    compare(Reference(made, [a[0] for a in answers], [a[1] for a in answers]), tokens, tally)


def test_a_prefix_is_found_as_long_as_its_last_window_is_there(case, tally):
    """A hit needs of windowed layers only what the next token sees."""
    path, _, reference = case
    prompt = reference.prompts[6]
    with engine_for(path, dtype="float32", block_size=4, enable_prefix_caching=True) as engine:
        first, cached = run(engine, [prompt], NUM_NEW)
        assert cached == [0]
        again, cached = run(engine, [prompt], NUM_NEW)
        assert again == first and cached == [(len(prompt) - 1) // 4 * 4]
        answer = prompt + first[0]
        _, cached = run(engine, [answer], 3)
        assert cached == [(len(answer) - 1) // 4 * 4]
        compare(Reference([prompt], [reference.tokens[6]], [reference.margins[6]]), first, tally)
        # The beginning alone, whose last window may be gone by now: computed again, and right.
        shorter = reference.prompts[7]
        tokens, _ = run(engine, [shorter], NUM_NEW)
        compare(Reference([shorter], [reference.tokens[7]], [reference.margins[7]]), tokens, tally)


def test_several_answers_share_a_prompt(case):
    path, _, reference = case
    params = SamplingParams(n=4, max_tokens=NUM_NEW, temperature=1.0, top_k=1, ignore_eos=True)
    with engine_for(path, dtype="float32", block_size=4) as engine:
        engine.add_request("n", reference.prompts[6], params)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += [output for output in engine.step() if output.finished]
        assert [list(one.token_ids) for one in outputs[-1].outputs] == [reference.tokens[6]] * 4


def test_blocks_that_left_every_window_are_free(case):
    """A long request holds little more of its windowed layers than the window."""
    path, window, reference = case
    with engine_for(path, dtype="float32", block_size=4, max_num_batched_tokens=BUDGET) as engine:
        decided = engine.session.client.decided
        groups = decided.kv_groups
        simulated = layout_of(
            Path(path),
            block_size=4,
            max_num_batched_tokens=BUDGET,
            max_model_len=decided.max_model_len,
        )
        assert simulated.groups == groups, "the simulator reads other groups from config.json"
        params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
        engine.add_request("long", reference.prompts[6], params)
        num_blocks = engine.session.client.decided.num_kv_blocks - 1
        held = []
        while engine.has_unfinished_requests():
            engine.step()
            held.append(round(engine.stats().kv_usage * num_blocks))
    longest = len(reference.prompts[6]) + NUM_NEW
    decoding = sum(
        -(-longest // 4) if not group.window else -(-(window - 1) // 4) + 2 for group in groups
    )
    assert 0 < held[-2] <= decoding

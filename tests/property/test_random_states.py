"""Random models with recurrent states in random situations: the tokens of transformers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.references import (
    NUM_NEW,
    Reference,
    Tally,
    compare,
    engine_for,
    run,
    run_several,
    tightest,
)
from e2e.test_drafts_everywhere import drafting
from e2e.tiny_models import Case, config_of, random_model, reference
from property.test_random_decoders import Heads, random_case
from transformers import PreTrainedModel

from engine import LLMEngine

FAMILIES = [
    *("Bamba", "FalconH1", "FalconMamba", "GraniteMoeHybrid", "Jamba", "Lfm2", "Lfm2Moe"),
    *("Mamba", "Mamba2", "NemotronH", "Qwen3Next", "Qwen3_5MoeText", "Qwen3_5Text"),
]
HEADS = [Heads(16, 2), Heads(16, 1), Heads(8, 4), Heads(40, 2)]
NUM_CONFIGURATIONS = 12
Options = dict[str, Any]


def in_chunks(dice: random.Random, path: str) -> Options:
    size = dice.choice([1, 3, 5, 7, 13, 17, 29])
    return {"max_num_batched_tokens": size, "max_num_seqs": min(size, 6)}


def ahead(dice: random.Random, path: str) -> Options:
    return {"async_scheduling": True, "max_num_batched_tokens": dice.choice([19, 33, 256])}


def with_interval(dice: random.Random, path: str) -> Options:
    return {"block_size": 16, "state_snapshot_interval": dice.choice([16, 32])}


def preempted(dice: random.Random, path: str) -> Options:
    caching = {"enable_prefix_caching": dice.choice([True, False])}
    return {"num_kv_blocks": 0, "block_size": 4, "async_scheduling": dice.random() < 0.5, **caching}


def with_drafts(dice: random.Random, path: str) -> Options:
    method = dice.choice(["ngram", "suffix", "draft_model"])
    options = {**dice.choice(SITUATIONS[:4])(dice, path), **drafting(method, path)}
    if "max_num_batched_tokens" in options:  # room for a token and its drafts
        options["max_num_batched_tokens"] = max(options["max_num_batched_tokens"], 7)
    return options


def in_a_process(dice: random.Random, path: str) -> Options:
    return {"multiprocess": True, **in_chunks(dice, path)}


SITUATIONS: list[Callable[[random.Random, str], Options]] = [
    in_chunks,
    ahead,
    with_interval,
    preempted,
    with_drafts,
    in_a_process,
]


def prompts(dice: random.Random, vocab_size: int) -> list[list[int]]:
    """Prompts of any length, some with the beginning of others, some of which repeat themselves."""
    made: list[list[int]] = []
    for _ in range(6):
        ids = dice.choices(range(3, vocab_size), k=dice.choice([1, 9, 24, 41, 57, 64]))
        if made and dice.random() < 0.5:
            ids = made[-1][: dice.randrange(len(made[-1]) + 1)] + ids
        made.append((ids * 2 if dice.random() < 0.3 else ids)[:100])
    return made


def told(model: PreTrainedModel, made: list[list[int]]) -> Reference:
    """The greedy tokens of transformers, of whole sequences each: its steps with a cache leave out
    the limits of Mamba's time steps."""
    tokens, margins = [], []
    for ids in made:
        whole, near = list(ids), []
        for _ in range(NUM_NEW):
            with torch.inference_mode():
                logits = model(torch.tensor([whole]), use_cache=False).logits[0, -1]
            best = logits.topk(2)
            near.append(float((best.values[0] - best.values[1]) / logits.abs().max()))
            whole.append(int(best.indices[0]))
        tokens.append(whole[len(ids) :])
        margins.append(near)
    return Reference(made, tokens, margins)


def serve(path: str, right: Reference, options: Options, tally: Tally) -> None:
    """Compare the tokens of requests that start from nothing, from snapshots, and between them."""
    if options.get("num_kv_blocks") == 0:
        with engine_for(path, **{**options, "num_kv_blocks": 200}) as engine:
            longest = max(map(len, right.prompts)) + NUM_NEW
            options = {**options, "num_kv_blocks": tightest(engine, longest) + 2}
    with engine_for(path, dtype="float32", **options) as engine:
        compare(right, run(engine, right.prompts)[0], tally)
        for answers in run_several(engine, right.prompts, count=2):
            compare(right, answers, tally)
        compare(right, run(engine, right.prompts)[0], tally)
        alone_again(engine, right, tally)


def alone_again(engine: LLMEngine, right: Reference, tally: Tally) -> None:
    """A prompt that goes on from an answer of before: what is left of it must be said again."""
    for ids, tokens, margins in zip(*right, strict=True):
        longer = [*ids, *tokens[: NUM_NEW // 2]]
        found, _ = run(engine, [longer], NUM_NEW - NUM_NEW // 2)
        rest = Reference([longer], [tokens[NUM_NEW // 2 :]], [margins[NUM_NEW // 2 :]])
        compare(rest, found, tally)


def check_family(family: str, directory: Path, seed: int, count: int) -> None:
    dice, tally = random.Random(seed), Tally()
    for number in range(count):
        case = random_case(dice, dice.choice(HEADS), family)
        path = directory / str(number)
        random_model(config_of(case), seed=dice.randrange(10**6)).save_pretrained(path)
        right = told(reference(path), prompts(dice, vocab_of(case)))
        for make in (SITUATIONS[(seed + number) % len(SITUATIONS)], dice.choice(SITUATIONS)):
            options = make(dice, str(path))
            try:
                serve(str(path), right, options, tally)
            except Exception as error:
                raise AssertionError(f"{case} with {options}") from error
    assert tally.ties <= 0.01 * tally.compared


def vocab_of(case: Case) -> int:
    return int(case.options["vocab_size"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", FAMILIES)
def test_random_models_in_random_situations(tmp_path: Path, seed: int, family: str) -> None:
    check_family(family, tmp_path, seed, NUM_CONFIGURATIONS)

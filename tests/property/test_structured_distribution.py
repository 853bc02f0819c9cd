"""Texts under a grammar are drawn as if each token were drawn from the model's probabilities, cut
to the tokens that the grammar allows: chi-squared, fixed seeds.

The tokens that are allowed are found here by trying all of the vocabulary, so that every way to
spell a text has its own probability.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine import EngineArgs, LLMEngine, SamplingParams, StructuredOutputsParams
from engine.assets import BOX_MODEL

PROMPT = "The level is "
ASKED = {
    "choice": (["no", "none", "level", "lever"], {}),
    "expression": (["ab", "abab", "b", "abb", "ababb", ""], {"regex": "(ab){0,2}b?"}),
    "schema": (["true", "false", "null", "7"], {"json": {"enum": [True, False, None, 7]}}),
}
NUM_DRAWS = 1_500
ALPHA = 1e-4  # a right engine fails once in ten thousand choices of seeds; they are fixed


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    args = EngineArgs(
        model=str(BOX_MODEL),
        dtype="float32",
        max_model_len=64,
        max_num_seqs=128,
        num_kv_blocks=600,
        num_threads=1,
        log_level="error",
    )
    with LLMEngine.from_engine_args(args) as made:
        yield made


def expected(texts: list[str]) -> dict[tuple[int, ...], float]:
    """The probability of every sequence of tokens that spells one of the texts and ends."""
    tokenizer = AutoTokenizer.from_pretrained(BOX_MODEL)
    model = AutoModelForCausalLM.from_pretrained(BOX_MODEL, dtype=torch.float32)
    prompt = tokenizer.encode(PROMPT)
    ends = np.atleast_1d(model.generation_config.eos_token_id).tolist()
    words = {token: tokenizer.decode([token]) for token in range(model.config.vocab_size)}
    special = set(tokenizer.all_special_ids)
    found: dict[tuple[int, ...], float] = {}

    def go_on(tokens: list[int], text: str, probability: float) -> None:
        allowed = [
            token
            for token, word in words.items()
            if token not in special and word and any(one.startswith(text + word) for one in texts)
        ]
        last = ends if text in texts else []
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, -1].double()
        weights = torch.softmax(logits[[*allowed, *last]], 0).tolist()
        for token, weight in zip(allowed, weights, strict=False):
            go_on([*tokens, token], text + words[token], probability * weight)
        if last:
            found[tuple(tokens)] = probability * sum(weights[len(allowed) :])

    go_on([], "", 1.0)
    return found


@pytest.mark.parametrize("name", ASKED)
def test_texts_are_drawn_as_the_masked_model_draws_them(engine: LLMEngine, name: str) -> None:
    texts, fields = ASKED[name]
    form = StructuredOutputsParams(**(fields or {"choice": texts}))
    for seed in range(NUM_DRAWS):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=12, structured_outputs=form)
        engine.add_request(str(seed), PROMPT, params)
    drawn: Counter[tuple[int, ...]] = Counter()
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                (one,) = output.outputs
                assert one.finish_reason == "stop"
                ends = output.outputs[0].token_ids[-1:]
                drawn[tuple(one.token_ids[:-1] if ends and ends[0] <= 2 else one.token_ids)] += 1
    right = expected(texts)
    assert drawn.keys() <= right.keys()
    assert abs(sum(right.values()) - 1) < 1e-9
    # Cells of fewer than five expected draws become one.
    large = [tokens for tokens, share in right.items() if share * NUM_DRAWS >= 5]
    rest = 1 - sum(right[tokens] for tokens in large)
    observed = [*(drawn[tokens] for tokens in large), NUM_DRAWS]
    observed[-1] -= sum(observed[:-1])
    wanted = [*(right[tokens] * NUM_DRAWS for tokens in large), rest * NUM_DRAWS]
    if wanted[-1] < 5:  # too few for a cell: into the smallest of the others
        smallest = min(range(len(large)), key=lambda at: wanted[at])
        observed[smallest] += observed.pop()
        wanted[smallest] += wanted.pop()
    assert len(wanted) >= 4
    assert stats.chisquare(observed, wanted).pvalue > ALPHA

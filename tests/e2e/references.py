"""What transformers says to some prompts, an engine on the same model, and the two compared."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from engine import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from engine.config.kv_groups import request_blocks

NUM_NEW = 14
WHOLE: dict[str, Any] = {"ignore_eos": True, "detokenize": False}
LENGTHS = (9, 1, 23, 40, 40, 61)


class Reference(NamedTuple):
    """What transformers says: tokens, and where its choice was close."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    margins: list[list[float]]


class Tally:
    """Tokens compared, and those that differ at a tie."""

    compared = 0
    ties = 0


def prompts(shortest: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    lengths = [max(n, shortest) for n in LENGTHS]
    made = [torch.randint(3, 290, (n,), generator=generator).tolist() for n in lengths]
    made[4][:30] = made[3][:30]  # a shared beginning
    return made


def generate(model, ids: list[int], num_new: int = NUM_NEW) -> tuple[list[int], list[float]]:
    """Greedy tokens of transformers, and the margin of each choice (share of the largest)."""
    model.generation_config.eos_token_id = None
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=num_new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
    )
    margins = []
    for logits in out.logits:
        best = logits[0].float().topk(2).values
        margins.append(float((best[0] - best[1]) / logits[0].abs().max()))
    return out.sequences[0, len(ids) :].tolist(), margins


def engine_for(path: str, **options) -> LLMEngine:
    defaults = {
        "max_model_len": 128,
        "num_threads": 1,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "num_kv_blocks": 200,
        "block_size": 8,
        "skip_tokenizer_init": True,
        "log_level": "error",
    }
    args = EngineArgs(model=path, **{**defaults, **options})
    return LLMEngine.from_engine_args(args)


def tightest(engine: LLMEngine, longest: int) -> int:
    """The size of a KV pool that holds one request of this many tokens and one block more.

    engine: with the same options and a pool of any size."""
    return pool_for(engine, [longest]) + 1


def pool_for(engine: LLMEngine, lengths: list[int]) -> int:
    """The size of a KV pool for requests of these lengths at once, its null block included: each
    takes blocks in every group of layers.

    engine: with the same options and a pool of any size."""
    decided = engine.session.client.decided
    return 1 + sum(request_blocks(decided.kv_groups, decided.block_size, n) for n in lengths)


def run(
    engine: LLMEngine, made: list[list[int]], num_new: int = NUM_NEW
) -> tuple[list[list[int]], list[int]]:
    """Tokens and cached tokens of each prompt."""
    outs = finished(engine, made, SamplingParams(temperature=0, max_tokens=num_new, **WHOLE))
    return [out.outputs[0].token_ids for out in outs], [out.num_cached_tokens for out in outs]


def run_several(
    engine: LLMEngine, made: list[list[int]], num_new: int = NUM_NEW, count: int = 3
) -> list[list[list[int]]]:
    """Tokens of each prompt, for each of ``count`` answers that are sampled from one token."""
    params = SamplingParams(n=count, top_k=1, max_tokens=num_new, **WHOLE)
    outs = finished(engine, made, params)
    return [[out.outputs[number].token_ids for out in outs] for number in range(count)]


def finished(
    engine: LLMEngine, made: list[list[int]], params: SamplingParams
) -> list[RequestOutput]:
    """The last output of each prompt's request."""
    for index, ids in enumerate(made):
        engine.add_request(str(index), ids, params)
    last = {}
    while engine.has_unfinished_requests():
        for out in engine.step():
            last[int(out.request_id)] = out
    outs = [last[index] for index in range(len(made))]
    assert all(out.finished for out in outs)
    return outs


def compare(reference: Reference, tokens: list[list[int]], tally: Tally) -> None:
    """Token for token, up to the first tie."""
    for right, margins, ours in zip(reference.tokens, reference.margins, tokens, strict=True):
        compare_one(right, margins, ours, tally)


def compare_one(right: list[int], margins: list[float], ours: list[int], tally: Tally) -> None:
    """Token for token, up to the first tie."""
    for position, (one, other) in enumerate(zip(right, ours, strict=True)):
        tally.compared += 1
        if one != other:
            assert margins[position] < 1e-4, (
                f"token {position} is {other}, transformers says {one} by a margin of "
                f"{margins[position]:.2e}"
            )
            tally.ties += 1
            break

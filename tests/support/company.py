"""Requests answered alone and in random company: batches, chunks, cache states, preemption, drafts,
recorded steps, numbers of threads. What is compared is exact.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from engine import EngineArgs, LLMEngine, SamplingParams
from engine.assets import BOX_MODEL
from engine.messages.structured import StructuredOutputsParams

LENGTH = 640  # tokens of a request at most: over the ends of two stretches of keys
A_ROUND = 40  # requests that are answered in one kind of company
FORMS = ("[0-9]{3}-[0-9]{4}", '\\{"name": "[a-z ]{3,9}", "age": [0-9]+\\}')
KEPT = ("auto", "auto", "int8", "fp8")  # values of ``kv_cache_dtype``
ALONE = {"max_num_seqs": 1, "enable_prefix_caching": False, "num_threads": 1, "num_kv_blocks": 100}


class Company(NamedTuple):
    """Texts of a model that are compared, and numbers of threads that are tried."""

    path: str
    num_texts: int
    threads: tuple[int, ...] = (1, 2)
    seed: int = 0


class Asked(NamedTuple):
    prompt: list[int]
    params: SamplingParams


def differences(company: Company) -> Iterator[tuple[int, list[str]]]:
    """For each round: the number of compared texts, and how they differ from the answers alone."""
    rng = random.Random(company.seed)
    lengthen(company.path)
    left = company.num_texts
    while left > 0:
        requests = {str(i): draw(rng, company.path) for i in range(min(A_ROUND, left))}
        kept = {"kv_cache_dtype": rng.choice(KEPT)}
        with engine_for(company.path, {**ALONE, **kept}) as engine:
            alone = {name: answers(engine, {name: one}, 1)[name] for name, one in requests.items()}
        for _ in range(3):
            some = dict(rng.sample(sorted(requests.items()), min(len(requests), left)))
            if not some:
                return
            options = {**options_of(rng, company), **kept}
            with engine_for(company.path, options) as engine:
                if rng.random() < 0.5:  # some of it is in the cache then
                    answers(engine, dict(list(some.items())[::2]), rng.randint(1, 9))
                found = answers(engine, some, rng.randint(1, 9))
            left -= len(some)
            yield (
                len(some),
                [
                    f"seed {company.seed}, request {name} of {len(one.prompt)} tokens: {options}"
                    for name, one in some.items()
                    if found[name] != alone[name]
                ],
            )


def lengthen(path: str) -> None:
    """Have a tiny random model, whose positions are few, take requests of ``LENGTH``."""
    if Path(path) == BOX_MODEL:
        return
    place = Path(path) / "config.json"
    config = json.loads(place.read_text())
    if config["max_position_embeddings"] < LENGTH:
        place.write_text(json.dumps({**config, "max_position_embeddings": LENGTH}))


def engine_for(path: str, options: dict[str, Any]) -> LLMEngine:
    usual = {"max_model_len": LENGTH, "log_level": "error", "max_num_batched_tokens": 256}
    has_text = Path(path) == BOX_MODEL
    return LLMEngine.from_engine_args(
        EngineArgs(model=path, skip_tokenizer_init=not has_text, **{**usual, **options})
    )


def draw(rng: random.Random, path: str) -> Asked:
    """A request of any length, half of them of text that says things again."""
    length = rng.choice((1, 7, 16, 33, 90, 200, 250, 256, 300, 500, 513))
    phrase = [rng.randrange(3, 100) for _ in range(length if rng.random() < 0.5 else 6)]
    prompt = (phrase * length)[:length]
    beginning = random.Random(length % 3).choices(range(3, 100), k=length // 2)
    if rng.random() < 0.4:  # begins as others do
        prompt[: len(beginning)] = beginning
    params: dict[str, Any] = {"max_tokens": rng.randint(3, 24), "logprobs": 1, "ignore_eos": True}
    is_greedy = rng.random() < 0.5
    params |= {"temperature": 0.0} if is_greedy else {"temperature": 1.0, "seed": rng.randrange(99)}
    if not is_greedy and rng.random() < 0.3:
        params["n"] = 2
    if rng.random() < 0.15:
        params["prompt_logprobs"] = 0
    if Path(path) == BOX_MODEL and rng.random() < 0.2:
        form = StructuredOutputsParams(regex=rng.choice(FORMS))
        params |= {"structured_outputs": form, "ignore_eos": False}
    return Asked(prompt, SamplingParams(detokenize=False, **params))


def options_of(rng: random.Random, company: Company) -> dict[str, Any]:
    """One kind of company."""
    drafts: list[dict[str, Any] | None] = [
        None,
        {"method": "ngram", "prompt_lookup_max": 4},
        {"method": "suffix"},
        {"method": "draft_model", "model": company.path},
        *([{"method": "grammar"}] if Path(company.path) == BOX_MODEL else []),
    ]
    chosen = rng.choice(drafts)
    if chosen is not None:
        chosen |= {"num_speculative_tokens": rng.randint(1, 6), "adaptive": rng.random() < 0.3}
    block = rng.choice((8, 16, 16, 24, 32))
    enough = -(-LENGTH // block) + 30
    return {
        "block_size": block,
        "num_kv_blocks": rng.choice((enough, 3 * enough, 1000)),  # few: some are preempted
        "max_num_seqs": rng.choice((2, 5, 16)),
        "max_num_batched_tokens": rng.choice((17, 64, 101, 256, 2048)),
        "enable_prefix_caching": rng.random() < 0.7,
        "enforce_eager": rng.random() < 0.3,
        "async_scheduling": rng.random() < 0.3,
        "num_threads": rng.choice(company.threads),
        "speculative_config": chosen,
    }


def answers(engine: LLMEngine, requests: dict[str, Asked], at_once: int) -> dict[str, Any]:
    """Tokens and log-probabilities of each, as they are; some come in each third step."""
    waiting, found, step = list(requests.items()), {}, 0
    while waiting or engine.has_unfinished_requests():
        if step % 3 == 0:
            for name, asked in waiting[:at_once]:
                engine.add_request(name, {"prompt_token_ids": asked.prompt}, asked.params)
            del waiting[:at_once]
        step += 1
        for output in engine.step():
            if output.finished:
                prompt = output.prompt_logprobs or []
                found[output.request_id] = (
                    [(list(one.token_ids), exact(one.logprobs)) for one in output.outputs],
                    exact(prompt),
                )
    return found


def exact(positions: Any) -> list[dict[int, str] | None]:
    return [
        at and {token: entry.logprob.hex() for token, entry in at.items()} for at in positions or ()
    ]

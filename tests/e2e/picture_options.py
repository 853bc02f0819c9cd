"""Situations that options make, of requests and of engines: sampling, drafts, adapters, numbers,
processes."""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from e2e.picture_cases import NUM_NEW, Prompt, Seen
from e2e.picture_situations import (
    MIXED,
    SIZES,
    A,
    Situation,
    check,
    engine,
    greedy,
    items_of,
    say,
    situation,
)
from e2e.quantized_seeing import QUANTIZED, quantized_copy
from e2e.references import Tally, compare_one
from e2e.seeing_models import IMAGE, TEXT, reference
from e2e.test_ngram import NGRAM
from e2e.test_suffix import SUFFIX
from support import adapter_files
from support.patience import WAIT_SECONDS

from engine import (
    LLM,
    LoRARequest,
    SamplingParams,
    StructuredOutputsParams,
)
from engine.core.replay import replay

WITH_OPTIONS: dict[str, Situation] = {}
IN_PROCESSES: dict[str, Situation] = {}
"""Situations whose engine starts processes, for seconds."""

# Sampling


@situation("several answers", WITH_OPTIONS)
def several(seen: Seen, tally: Tally, root: Path) -> None:
    with engine(seen, max_num_batched_tokens=33) as llm:
        params = SamplingParams(n=3, top_k=1, max_tokens=NUM_NEW, ignore_eos=True)
        outputs = say(llm, seen, MIXED, params)
    for output, prompt in zip(outputs, MIXED, strict=True):
        assert len(output.outputs) == 3
        for index in range(3):
            seen.check(output, prompt, tally, index=index)


def scores(seen: Seen, prompt: Prompt, tokens: Sequence[int]) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] after each token of prompt and answer but the last,
    by transformers."""
    inputs = seen.inputs(prompt)
    ids = inputs["input_ids"]
    more = torch.tensor([list(tokens)], dtype=ids.dtype)
    inputs["input_ids"] = torch.cat([ids, more], dim=1)
    for name in ("attention_mask", "mm_token_type_ids", "token_type_ids"):
        if name in inputs:
            filler = torch.full_like(more, int(name == "attention_mask")).to(inputs[name].dtype)
            inputs[name] = torch.cat([inputs[name], filler], dim=1)
    with torch.inference_mode():
        return reference(seen.path)(**inputs).logits[0].log_softmax(dim=-1)


@situation("sampled, with log-probabilities", WITH_OPTIONS)
def sampled(seen: Seen, tally: Tally, root: Path) -> None:
    params = SamplingParams(
        temperature=1.0, seed=3, n=2, max_tokens=NUM_NEW, ignore_eos=True, logprobs=2
    )
    with engine(seen, max_num_batched_tokens=33) as llm:
        outputs = say(llm, seen, MIXED, params)
        again = say(llm, seen, MIXED[3:4], params)[0]
        (image,) = llm.get_tokenizer().encode(IMAGE, add_special_tokens=False)
    for index in range(2):
        assert again.outputs[index].token_ids == outputs[3].outputs[index].token_ids
    num_compared = 0
    for output, prompt in zip(outputs, MIXED, strict=True):
        for one in output.outputs:
            # transformers takes an image token in an answer for a picture.
            tokens = list(takewhile(lambda token: token != image, one.token_ids))
            wanted = scores(seen, prompt, tokens)[-len(tokens) - 1 :]
            for token, found, right in zip(tokens, one.logprobs, wanted, strict=False):
                assert abs(found[token].logprob - float(right[token])) < 1e-3, prompt.text
                num_compared += 1
    assert num_compared > len(MIXED) * NUM_NEW  # of twice as many


@situation("scored prompts", WITH_OPTIONS)
def scored(seen: Seen, tally: Tally, root: Path) -> None:
    params = greedy(1, prompt_logprobs=0)
    for budget in (max(23, seen.least_budget), 300):
        with engine(seen, max_num_batched_tokens=budget) as llm:
            for output, prompt in zip(say(llm, seen, MIXED, params), MIXED, strict=True):
                wanted = scores(seen, prompt, [])
                found = output.prompt_logprobs
                assert len(found) == len(output.prompt_token_ids)
                for at, token in enumerate(output.prompt_token_ids[1:]):
                    right = float(wanted[at, token])
                    assert abs(found[at + 1][token].logprob - right) < 1e-3, (prompt.text, at)


@situation("repetition penalty", WITH_OPTIONS)
def penalty(seen: Seen, tally: Tally, root: Path) -> None:
    with engine(seen, max_num_batched_tokens=70) as llm:
        outputs = say(llm, seen, MIXED, greedy(repetition_penalty=1.4))
    for output, prompt in zip(outputs, MIXED, strict=True):
        seen.check(output, prompt, tally, repetition_penalty=1.4)


WORDS = ("teapot", "teacup", "cup", "cap", "capable")


@situation("grammar", WITH_OPTIONS)
def grammar(seen: Seen, tally: Tally, root: Path) -> None:
    """Answers are those of a list, as JSON: each token is transformers' best of those allowed."""
    schema = {"enum": list(WORDS)}
    params = SamplingParams(
        temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(json=schema)
    )
    spelled: list[list[int]] = []

    def allowed(ids: Sequence[int]) -> list[int]:
        """Tokens after the first ones of an answer."""
        at = len(ids)
        return [each[at] for each in spelled if each[:at] == ids and at < len(each)]

    for options in ({}, NGRAM):
        with engine(seen, max_num_batched_tokens=41, **options) as llm:
            tokenizer = llm.get_tokenizer()
            spelled = [
                [*tokenizer.encode(json.dumps(word), add_special_tokens=False), 2] for word in WORDS
            ]
            outputs = say(llm, seen, MIXED, params)
        for output, prompt in zip(outputs, MIXED, strict=True):
            length = len(seen.answer(prompt).prompt)
            answer = seen.answer(
                prompt,
                20,
                prefix_allowed_tokens_fn=lambda _, ids, n=length: allowed(ids.tolist()[n:]),
                eos_token_id=2,
                pad_token_id=0,
            )
            found = output.outputs[0]
            assert json.loads(found.text) in WORDS
            assert found.finish_reason == "stop"
            assert answer.tokens[: len(found.token_ids)] == list(found.token_ids), prompt.text


# Drafts


@situation("drafts of n-grams", WITH_OPTIONS)
def ngrams(seen: Seen, tally: Tally, root: Path) -> None:
    drafted(seen, tally, NGRAM)


@situation("drafts of suffixes", WITH_OPTIONS)
def suffixes(seen: Seen, tally: Tally, root: Path) -> None:
    drafted(seen, tally, SUFFIX)


@situation("drafts of a text model", WITH_OPTIONS)
def drafts_of_text(seen: Seen, tally: Tally, root: Path) -> None:
    path = root / "draft"
    small = {"num_hidden_layers": 1, "max_position_embeddings": 4096}
    config = transformers.LlamaConfig(**{**TEXT, **small})
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    own = {"model": str(path), "num_speculative_tokens": 3, "adaptive": False}
    drafted(seen, tally, {"speculative_config": {"method": "draft_model", **own}})


@situation("drafts of the model itself", WITH_OPTIONS)
def drafts_of_itself(seen: Seen, tally: Tally, root: Path) -> None:
    own = {"model": str(seen.path), "num_speculative_tokens": 3, "adaptive": False}
    drafted(seen, tally, {"speculative_config": {"method": "draft_model", **own}})


def drafted(seen: Seen, tally: Tally, drafts: dict[str, Any]) -> None:
    for options in ({}, {"max_num_batched_tokens": max(19, seen.least_budget)}):
        with engine(seen, **drafts, **options) as llm:
            check(llm, seen, MIXED, tally, 20)
            check(llm, seen, MIXED, tally, 20)
            assert llm.llm_engine.stats().counters["drafts.num_drafts"] > 0


# Adapters

LINEARS = r".*(language_model|text_model).*\.(q_proj|v_proj|o_proj|down_proj|gate_proj)"


@situation("adapters", WITH_OPTIONS)
def adapters(seen: Seen, tally: Tally, root: Path) -> None:
    """Adapters of peft change the text half, and only in the requests that name them."""
    made = {}

    def changed(number: int) -> Callable[[Any], Any]:
        def change(model: Any) -> Any:
            if number not in made:
                own = adapter_files.trained(
                    copy.deepcopy(model), number, size=4.0, target_modules=LINEARS
                )
                adapter_files.save(own, root / str(number))
                made[number] = own
            return made[number].get_base_model()

        return change

    changes = [changed(1), changed(2)]
    for each in changes:
        each(reference(seen.path))
    requests = [None, *(LoRARequest(f"a{n}", n, str(root / str(n))) for n in (1, 2))]
    prompts = [MIXED[0], MIXED[3], MIXED[1]]
    cases = [(prompt, at) for prompt in prompts for at in range(3)]
    answers = [seen.answer(p) if not at else seen.answer_of(changes[at - 1], p) for p, at in cases]
    assert len({tuple(answer.tokens) for answer in answers}) > 6, [a.tokens for a in answers]
    with engine(seen, enable_lora=True, max_loras=2, max_num_batched_tokens=57) as llm:
        for _ in range(2):
            outputs = say(
                llm, seen, [p for p, _ in cases], greedy(),
                lora_request=[requests[at] for _, at in cases],
            )  # fmt: skip
            for output, answer in zip(outputs, answers, strict=True):
                assert output.prompt_token_ids == answer.prompt
                compare_one(answer.tokens, answer.margins, output.outputs[0].token_ids, tally)


# Numbers


def bits(outputs: Sequence[Any]) -> list[list[tuple[int, str]]]:
    return [
        [(t, entry[t].logprob.hex()) for t, entry in zip(one.token_ids, one.logprobs, strict=True)]
        for one in (output.outputs[0] for output in outputs)
    ]


@situation("batch invariant", WITH_OPTIONS)
def batch_invariant(seen: Seen, tally: Tally, root: Path) -> None:
    """Prompts have the same bits alone, in a batch, in chunks, and from the caches."""
    params = greedy(logprobs=0)
    with engine(seen, batch_invariant=True, enable_prefix_caching=False) as llm:
        alone = [bits(say(llm, seen, [each], params))[0] for each in MIXED]
        assert bits(say(llm, seen, MIXED, params)) == alone
        assert bits(say(llm, seen, MIXED[::-1], params))[::-1] == alone
    with engine(seen, batch_invariant=True, max_num_batched_tokens=37) as llm:
        assert bits(say(llm, seen, MIXED, params)) == alone
        assert bits(say(llm, seen, MIXED, params)) == alone


def is_near(seen: Seen, bound: float, **options: Any) -> None:
    """Log-probabilities of prompts with pictures are near transformers'. bound: of their mean
    difference, in standard deviations of transformers'."""
    params = greedy(1, prompt_logprobs=0)
    with engine(seen, max_num_batched_tokens=64, **options) as llm:
        outputs = say(llm, seen, MIXED, params)
        say(llm, seen, MIXED, greedy(12))
    for output, prompt in zip(outputs, MIXED, strict=True):
        ids = output.prompt_token_ids
        wanted = scores(seen, prompt, [])[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        found = torch.tensor(
            [each[ids[at + 1]].logprob for at, each in enumerate(output.prompt_logprobs[1:])]
        )
        off = (found - wanted).abs().mean() / wanted.std()
        assert off < bound, (prompt.text, float(off))


@situation("bfloat16", WITH_OPTIONS)
def bfloat16(seen: Seen, tally: Tally, root: Path) -> None:
    is_near(seen, 0.15, dtype="bfloat16")


@situation("small keys and values", WITH_OPTIONS)
def small_keys(seen: Seen, tally: Tally, root: Path) -> None:
    for kind, bound in (("bfloat16", 0.1), ("int8", 0.15), ("fp8", 0.5)):
        is_near(seen, bound, dtype="float32", kv_cache_dtype=kind)


@situation("int8 weights", WITH_OPTIONS)
def int8_weights(seen: Seen, tally: Tally, root: Path) -> None:
    is_near(seen, 0.3, quantization="int8")


@situation("quantised text half", WITH_OPTIONS)
def quantized(seen: Seen, tally: Tally, root: Path) -> None:
    for kind in QUANTIZED:
        path, model = quantized_copy(seen, root, kind)
        with LLM(path, dtype="float32", **SIZES) as llm:
            outputs = say(llm, seen, MIXED, greedy())
        for output, prompt in zip(outputs, MIXED, strict=True):
            answer = seen.answer_of(lambda _, model=model: model, prompt)
            assert output.prompt_token_ids == answer.prompt
            compare_one(answer.tokens, answer.margins, output.outputs[0].token_ids, tally)


# Cores and processes


@situation("replayed", WITH_OPTIONS)
def replayed(seen: Seen, tally: Tally, root: Path) -> None:
    log = root / "steps"
    budget = max(23, seen.least_budget)
    longest = max(item for each in MIXED for item in items_of(seen, each))
    options = {"max_num_encoder_input_tokens": longest, "encoder_cache_size": longest}
    with engine(seen, step_log=str(log), max_num_batched_tokens=budget, **options) as llm:
        check(llm, seen, MIXED, tally)
        check(llm, seen, MIXED[::-1], tally)
    outcome = replay(log)
    assert outcome.difference is None
    assert outcome.num_requests == 2 * len(MIXED)
    assert A.tobytes()[:64] not in log.read_bytes()


@situation("a core in a process", IN_PROCESSES)
def own_process(seen: Seen, tally: Tally, root: Path) -> None:
    with engine(seen, multiprocess=True, max_num_batched_tokens=37) as llm:
        check(llm, seen, MIXED, tally)
        check(llm, seen, MIXED[::-1], tally)


@situation("two cores", IN_PROCESSES)
def two_cores(seen: Seen, tally: Tally, root: Path) -> None:
    with engine(seen, multiprocess=True, data_parallel_size=2) as llm:
        check(llm, seen, [*MIXED, *MIXED[::-1]], tally)


@situation("text processes", IN_PROCESSES)
def text_processes(seen: Seen, tally: Tally, root: Path) -> None:
    with engine(seen, tokenizer_pool_size=2, multiprocess=True) as llm:
        check(llm, seen, [*MIXED, *MIXED[::-1]], tally)


@situation("a core at an address", IN_PROCESSES)
def remote(seen: Seen, tally: Tally, root: Path) -> None:
    secret = "a secret of some length"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = min(free.getsockname()[1], 65_000)
    address = f"tcp://127.0.0.1:{port}"
    command = [sys.executable, "-m", "engine.cli.main", "core", "--listen", address]
    command += ["--model", str(seen.path), "--num-threads", "1", "--num-kv-blocks", "200"]
    command += ["--max-num-batched-tokens", "64", "--max-num-seqs", "16"]
    environment = {**os.environ, "METRONOME_CORE_SECRET": secret}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as core:
        try:
            assert core.stdout is not None
            assert core.stdout.readline().startswith("core address: tcp://")
            options = {"core_address": address}
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("METRONOME_CORE_SECRET", secret)
                with LLM(seen.path, **options) as llm, LLM(seen.path, **options) as other:
                    check(llm, seen, MIXED, tally)
                    check(other, seen, MIXED[::-1], tally)
        finally:
            core.terminate()
            core.wait(WAIT_SECONDS)

"""Behaviours 117 to 127 on the real core with the model in the box."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import (
    LLM,
    AsyncLLMEngine,
    ConfigError,
    EngineArgs,
    EngineDeadError,
    LLMEngine,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from engine.assets import BOX_MODEL
from engine.frontend.backends import REPLACEMENT
from engine.messages.outputs import FinishReason
from engine.messages.params import OutputKind

PROMPTS = ["A list comprehension", "The import statement", "class Reader:", "Return a new"]
SIZES: dict[str, Any] = {
    "max_num_seqs": 32,
    "max_num_batched_tokens": 256,
    "max_model_len": 512,
    "num_kv_blocks": 400,
    "disable_log_stats": True,
    "num_threads": 1,
}
KINDS: tuple[OutputKind, ...] = ("cumulative", "delta", "final")


@pytest.fixture(scope="module")
def llm_engine() -> Iterator[LLMEngine]:
    with LLMEngine.from_engine_args(EngineArgs(**SIZES)) as started:
        yield started


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm_engine" not in request.fixturenames:
        return
    llm_engine: LLMEngine = request.getfixturevalue("llm_engine")
    stats = llm_engine.stats()
    assert not llm_engine.has_unfinished_requests()
    assert stats is not None
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 32, **options})


def run(llm_engine: LLMEngine, params: dict[str, SamplingParams]) -> dict[str, list[RequestOutput]]:
    """All outputs of these requests, side by side; request ``i`` gets prompt ``i``."""
    outputs: dict[str, list[RequestOutput]] = {name: [] for name in params}
    for number, (name, own) in enumerate(params.items()):
        llm_engine.add_request(name, PROMPTS[number % len(PROMPTS)], own)
    while llm_engine.has_unfinished_requests():
        for output in llm_engine.step():
            outputs[output.request_id].append(output)
    return outputs


def run_one(llm_engine: LLMEngine, params: SamplingParams) -> list[RequestOutput]:
    return run(llm_engine, {"one": params})["one"]


def joined(outputs: list[RequestOutput]) -> tuple[str, list[int]]:
    pieces = [output.outputs[0] for output in outputs]
    return "".join(p.text for p in pieces), [i for p in pieces for i in p.token_ids]


@pytest.fixture(scope="module")
def answer(llm_engine: LLMEngine) -> tuple[str, list[int]]:
    """What the model says to the first prompt, greedily."""
    last = run_one(llm_engine, greedy(output_kind="final"))[-1].outputs[0]
    return last.text, last.token_ids


def test_117_pieces_joined_are_the_text(
    llm_engine: LLMEngine, answer: tuple[str, list[int]]
) -> None:
    outputs = run(llm_engine, {kind: greedy(output_kind=kind) for kind in KINDS})
    same = {kind: run_one(llm_engine, greedy(output_kind=kind)) for kind in KINDS}
    assert joined(same["delta"]) == answer
    assert same["cumulative"][-1].outputs[0].text == answer[0]
    tokenizer = llm_engine.get_tokenizer()
    prompt_ids = tokenizer.encode(PROMPTS[0])
    whole = tokenizer.decode(prompt_ids + answer[1])
    assert answer[0] == whole.removeprefix(tokenizer.decode(prompt_ids))
    for found in (*outputs.values(), *same.values()):
        assert [output.finished for output in found] == [False] * (len(found) - 1) + [True]
        assert found[-1].outputs[0].finish_reason == "length"
    assert len(same["delta"][0].outputs[0].token_ids) == 1


def test_118_no_half_characters(llm_engine: LLMEngine, seed: int) -> None:
    """Hot sampling hits many byte tokens."""
    params = {
        str(i): SamplingParams(
            temperature=2.0, max_tokens=60, seed=seed + i, output_kind="delta", ignore_eos=True
        )
        for i in range(8)
    }
    tokenizer = llm_engine.get_tokenizer()
    for name, outputs in run(llm_engine, params).items():
        text, token_ids = joined(outputs)
        prompt_ids = tokenizer.encode(PROMPTS[int(name) % len(PROMPTS)])
        before = tokenizer.decode(prompt_ids)
        assert text == tokenizer.decode(prompt_ids + token_ids).removeprefix(before)
        for output in outputs[:-1]:  # what is shown is settled: a mark stands for bytes, not a half
            assert not output.outputs[0].text.endswith(REPLACEMENT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("included", [False, True])
def test_119_stop_strings(
    llm_engine: LLMEngine, answer: tuple[str, list[int]], kind: OutputKind, included: bool
) -> None:
    text, token_ids = answer
    tokenizer = llm_engine.get_tokenizer()
    pieces = [tokenizer.token_text(i) for i in token_ids]
    # From within one token into the next but one: over two borders.
    start = len("".join(pieces[:9])) + max(0, len(pieces[9]) - 1)
    stop = text[start : len("".join(pieces[:11])) + 1]
    start = text.find(stop)
    params = greedy(
        max_tokens=200, stop=[stop], include_stop_str_in_output=included, output_kind=kind
    )
    outputs = run_one(llm_engine, params)
    shown = joined(outputs)[0] if kind == "delta" else outputs[-1].outputs[0].text
    assert shown == text[: start + len(stop) * included]
    last = outputs[-1].outputs[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)


def test_120_stop_token_ids(llm_engine: LLMEngine, answer: tuple[str, list[int]]) -> None:
    token_ids = answer[1]
    stop = token_ids[12]
    end = token_ids.index(stop)
    tokenizer = llm_engine.get_tokenizer()
    prompt_ids = tokenizer.encode(PROMPTS[0])
    for included in (False, True):
        params = greedy(stop_token_ids=[stop], include_stop_str_in_output=included)
        completion = run_one(llm_engine, params)[-1].outputs[0]
        assert completion.token_ids == token_ids[: end + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        shown = tokenizer.decode(prompt_ids + token_ids[: end + included])
        assert completion.text == shown.removeprefix(tokenizer.decode(prompt_ids))


@pytest.mark.parametrize("kind", KINDS)
def test_121_logprobs(llm_engine: LLMEngine, kind: OutputKind) -> None:
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=12, logprobs=4, prompt_logprobs=2, output_kind=kind
    )
    outputs = run_one(llm_engine, params)
    last = outputs[-1].outputs[0]
    if kind == "delta":
        token_ids = joined(outputs)[1]
        entries = [e for o in outputs for e in o.outputs[0].logprobs or ()]
    else:
        token_ids, entries = last.token_ids, last.logprobs or []
    assert len(entries) == len(token_ids) == 12
    total = 0.0
    for token_id, entry in zip(token_ids, entries, strict=True):
        assert token_id in entry and len(entry) in (4, 5)
        assert all(position.rank >= 1 and position.logprob <= 1e-6 for position in entry.values())
        assert entry[token_id].decoded_token == llm_engine.get_tokenizer().token_text(token_id)
        total += entry[token_id].logprob
    assert last.cumulative_logprob == pytest.approx(total, rel=1e-5)
    first = outputs[0]
    assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None
    assert len(first.prompt_logprobs) == len(first.prompt_token_ids)
    for token_id, position in zip(
        first.prompt_token_ids[1:], first.prompt_logprobs[1:], strict=True
    ):
        assert position is not None and token_id in position and len(position) in (2, 3)


def test_121_prompt_logprobs_from_a_start(llm_engine: LLMEngine) -> None:
    found = {}
    for start in (0, 2):
        params = greedy(max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=start)
        found[start] = run_one(llm_engine, params)[-1].prompt_logprobs
    whole, part = found[0], found[2]
    assert whole is not None and part is not None
    assert part[:2] == [None, None] and len(part) == len(whole)
    for ours, theirs in zip(part[2:], whole[2:], strict=True):
        assert ours is not None and theirs is not None and ours.keys() == theirs.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_123_n_samples(llm_engine: LLMEngine, kind: OutputKind) -> None:
    params = SamplingParams(n=3, temperature=1.2, seed=7, max_tokens=10, output_kind=kind)
    runs = [run_one(llm_engine, params) for _ in range(2)]
    texts = []
    for outputs in runs:
        if kind == "final":
            assert len(outputs) == 1
        if kind == "delta":
            whole = [
                [i for o in outputs for c in o.outputs if c.index == index for i in c.token_ids]
                for index in range(3)
            ]
        else:
            assert [c.index for c in outputs[-1].outputs] == [0, 1, 2]
            whole = [c.token_ids for c in outputs[-1].outputs]
        assert all(len(token_ids) == 10 for token_ids in whole)
        assert len({tuple(token_ids) for token_ids in whole}) == 3
        texts.append(whole)
    assert texts[0] == texts[1]


def test_123_abort_of_the_parent_aborts_all(llm_engine: LLMEngine) -> None:
    llm_engine.add_request("family", PROMPTS[0], SamplingParams(n=3, max_tokens=100))
    llm_engine.step()
    llm_engine.abort_request("family")
    (output,) = llm_engine.step()
    assert output.finished
    assert [c.finish_reason for c in output.outputs] == ["abort"] * 3


def test_124_final_only_is_one_output(llm_engine: LLMEngine) -> None:
    params = {str(i): greedy(max_tokens=1 + i, output_kind="final") for i in range(6)}
    for i, outputs in enumerate(run(llm_engine, params).values()):
        assert [len(output.outputs[0].token_ids) for output in outputs] == [1 + i]


def test_125_counts_and_times(llm_engine: LLMEngine) -> None:
    counts = llm_engine.token_counts()
    before = (counts.prompt_tokens, counts.generation_tokens, counts.finished.total())
    params = {str(i): greedy(max_tokens=3 + i, ignore_eos=True) for i in range(5)}
    outputs = [found[-1] for found in run(llm_engine, params).values()]
    assert counts.prompt_tokens - before[0] == sum(len(o.prompt_token_ids) for o in outputs)
    assert counts.generation_tokens - before[1] == sum(3 + i for i in range(5))
    assert counts.finished.total() - before[2] == 5
    for output in outputs:
        times = output.metrics
        assert times is not None and times.finished_time is not None
        assert times.scheduled_time is not None and times.last_token_time is not None
        assert times.first_token_time is not None
        queue = times.scheduled_time - times.arrival_time
        prefill = times.first_token_time - times.scheduled_time
        decode = times.last_token_time - times.first_token_time
        assert min(queue, prefill, decode) >= 0
        assert queue + prefill + decode == pytest.approx(times.finished_time - times.arrival_time)


def test_127_strings_need_a_tokenizer() -> None:
    with LLMEngine.from_engine_args(EngineArgs(**SIZES, skip_tokenizer_init=True)) as bare:
        for refused in (greedy(stop=["x"]), greedy(bad_words=["x"])):
            with pytest.raises(RequestError, match="skip_tokenizer_init"):
                bare.add_request("0", [5, 6, 7], refused)
        with pytest.raises(RequestError, match="prompt_token_ids"):
            bare.add_request("0", "text", greedy())
        bare.add_request("0", {"prompt_token_ids": [5, 6, 7]}, greedy(max_tokens=4))
        while bare.has_unfinished_requests():
            (output,) = bare.step() or [None]
        assert output is not None
        assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 4


def test_bad_input_harms_nobody(llm_engine: LLMEngine, answer: tuple[str, list[int]]) -> None:
    llm_engine.add_request("good", PROMPTS[0], greedy())
    llm_engine.step()
    for prompt, message in (
        ([], "empty"),
        ([5] * 512, "max_model_len is 512"),
        ([4096], "vocabulary"),
    ):
        with pytest.raises(RequestError, match=message):
            llm_engine.add_request("bad", prompt, greedy())
    with pytest.raises(RequestError, match="'good' is in use"):
        llm_engine.add_request("good", "x", greedy())
    while llm_engine.has_unfinished_requests():
        outputs = llm_engine.step()
    assert outputs[0].outputs[0].text == answer[0]


def test_llm_keeps_the_order_and_agrees_with_the_engine(answer: tuple[str, list[int]]) -> None:
    with LLM(**SIZES) as llm:
        params = [greedy(max_tokens=n) for n in (32, 1, 9, 20)]
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [output.prompt for output in outputs] == PROMPTS
        assert [len(o.outputs[0].token_ids) for o in outputs] == [32, 1, 9, 20]
        assert outputs[0].outputs[0].text == answer[0]
        (reply,) = llm.chat([{"role": "user", "content": "Hello"}], greedy(), use_tqdm=False)
        assert reply.prompt is not None and reply.prompt.endswith("<|im_start|>assistant\n")
        assert reply.outputs[0].token_ids


def test_200_mixed_requests_are_answered_once(llm_engine: LLMEngine, seed: int) -> None:
    """Random lengths, parameters, aborts, stop strings; outputs equal those of runs alone."""
    dice = random.Random(seed)
    todo = {}
    for i in range(200):
        params = SamplingParams(
            temperature=dice.choice([0.0, 1.0]),
            seed=i,
            top_k=dice.choice([0, 20]),
            max_tokens=dice.randint(1, 24),
            stop=dice.choice([[], [" the"], ["a ", "class "]]),
            logprobs=dice.choice([None, 2]),
            output_kind=dice.choice(KINDS),
        )
        prompt = [dice.randrange(4, 4000) for _ in range(dice.randint(1, 60))]
        todo[f"mixed-{i}"] = (prompt, params)
    aborted = set(dice.sample(sorted(todo), 20))
    answers = _run_mixed(llm_engine, todo, aborted, dice)
    assert answers.keys() == todo.keys()
    for name in dice.sample(sorted(todo.keys() - aborted), 25):
        assert _run_mixed(llm_engine, {name: todo[name]}, set(), dice)[name] == answers[name]


Mixed = dict[str, tuple[list[int], SamplingParams]]


def _run_mixed(
    llm_engine: LLMEngine, todo: Mixed, aborted: set[str], dice: random.Random
) -> dict[str, tuple[str, list[int], FinishReason | None]]:
    waiting = list(todo)
    texts = dict.fromkeys(todo, "")
    tokens: dict[str, list[int]] = {name: [] for name in todo}
    answers: dict[str, tuple[str, list[int], FinishReason | None]] = {}
    while waiting or llm_engine.has_unfinished_requests():
        for _ in range(min(len(waiting), dice.randint(0, 20))):
            name = waiting.pop()
            llm_engine.add_request(name, todo[name][0], todo[name][1])
        for output in llm_engine.step():
            completion, name = output.outputs[0], output.request_id
            assert name not in answers
            if todo[name][1].output_kind == "delta":
                texts[name] += completion.text
                tokens[name] += completion.token_ids
            else:
                texts[name], tokens[name] = completion.text, completion.token_ids
            if output.finished:
                answers[name] = (texts[name], tokens[name], completion.finish_reason)
        for name in sorted(aborted - set(waiting)):
            if dice.random() < 0.1:
                llm_engine.abort_request(name)
    return answers


# The asynchronous engine


async def collect(
    async_engine: AsyncLLMEngine, name: str, params: SamplingParams
) -> list[RequestOutput]:
    return [output async for output in async_engine.generate(PROMPTS[0], params, name)]


async def test_122_slow_reader(answer: tuple[str, list[int]]) -> None:
    async_engine = AsyncLLMEngine.from_engine_args(EngineArgs(**SIZES))
    try:
        for kind in ("delta", "cumulative"):
            outputs = []
            async for output in async_engine.generate(PROMPTS[0], greedy(output_kind=kind), "slow"):
                outputs.append(output)
                await asyncio.sleep(0.1)
            assert [output.finished for output in outputs].count(True) == 1
            last = outputs[-1].outputs[0]
            found = joined(outputs) if kind == "delta" else (last.text, last.token_ids)
            assert found == answer
    finally:
        async_engine.shutdown()


async def test_126_a_hundred_at_once() -> None:
    async_engine = AsyncLLMEngine.from_engine_args(EngineArgs(**SIZES))
    try:
        for _ in range(2):  # ids are free again
            params = [greedy(max_tokens=1 + i % 8, ignore_eos=True) for i in range(100)]
            tasks = [
                asyncio.create_task(collect(async_engine, str(i), own))
                for i, own in enumerate(params)
            ]
            await asyncio.sleep(0.05)
            for task in tasks[3::10]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for i, result in enumerate(results):
                if isinstance(result, list):
                    assert len(result[-1].outputs[0].token_ids) == 1 + i % 8
                else:
                    assert i % 10 == 3 and isinstance(result, asyncio.CancelledError)
    finally:
        async_engine.shutdown()
    with pytest.raises(EngineDeadError):
        await collect(async_engine, "late", greedy())


# What is wrong with a model or an option is said before anything is loaded


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "/nowhere"}, "'/nowhere' does not exist"),
        ({"max_model_len": 1 << 20}, "max_model_len is 1048576"),
        ({"scheduling_policy": "fastest"}, "fastest"),
        ({"max_num_seq": 4}, "did you mean 'max_num_seqs'"),
    ],
)
def test_what_cannot_work_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**options)


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(BOX_MODEL / name)
    with pytest.raises(ConfigError, match="skip_tokenizer_init"):
        LLM(tmp_path, **SIZES)
    with LLM(tmp_path, **SIZES, skip_tokenizer_init=True) as llm:
        (output,) = llm.generate([[5, 6]], greedy(max_tokens=3), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3

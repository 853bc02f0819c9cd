"""Behaviours 117 to 125 and 127 on the real core with the model in the box."""

import pytest
from e2e.box_engine import KINDS, PROMPTS, SIZES, greedy, joined, run, run_one

from engine import EngineArgs, LLMEngine, RequestError, SamplingParams
from engine.messages.params import OutputKind
from engine.text.token_texts import REPLACEMENT


@pytest.mark.behaviour(117)
def test_pieces_joined_are_the_text(llm_engine: LLMEngine, answer: tuple[str, list[int]]) -> None:
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


@pytest.mark.behaviour(118)
def test_no_half_characters(llm_engine: LLMEngine, seed: int) -> None:
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


@pytest.mark.behaviour(119)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("included", [False, True])
def test_stop_strings(
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


@pytest.mark.behaviour(120)
def test_stop_token_ids(llm_engine: LLMEngine, answer: tuple[str, list[int]]) -> None:
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


@pytest.mark.behaviour(121)
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs(llm_engine: LLMEngine, kind: OutputKind) -> None:
    params = SamplingParams(
        temperature=1.0,
        seed=3,
        max_tokens=12,
        ignore_eos=True,
        logprobs=4,
        prompt_logprobs=2,
        output_kind=kind,
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


@pytest.mark.behaviour(121)
def test_prompt_logprobs_from_a_start(llm_engine: LLMEngine) -> None:
    found = {}
    for start in (0, 2):
        params = greedy(max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=start)
        found[start] = run_one(llm_engine, params)[-1].prompt_logprobs
    whole, part = found[0], found[2]
    assert whole is not None and part is not None
    assert part[:2] == [None, None] and len(part) == len(whole)
    for ours, theirs in zip(part[2:], whole[2:], strict=True):
        assert ours is not None and theirs is not None and ours.keys() == theirs.keys()


@pytest.mark.behaviour(123)
@pytest.mark.parametrize("kind", KINDS)
def test_n_samples(llm_engine: LLMEngine, kind: OutputKind) -> None:
    params = SamplingParams(
        n=3, temperature=1.2, seed=7, max_tokens=10, ignore_eos=True, output_kind=kind
    )
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


@pytest.mark.behaviour(123)
def test_abort_of_the_parent_aborts_all(llm_engine: LLMEngine) -> None:
    llm_engine.add_request(
        "family", PROMPTS[0], SamplingParams(n=3, max_tokens=100, ignore_eos=True)
    )
    llm_engine.step()
    llm_engine.abort_request("family")
    (output,) = llm_engine.step()
    assert output.finished
    assert [c.finish_reason for c in output.outputs] == ["abort"] * 3


@pytest.mark.behaviour(124)
def test_final_only_is_one_output(llm_engine: LLMEngine) -> None:
    params = {str(i): greedy(max_tokens=1 + i, output_kind="final") for i in range(6)}
    for i, outputs in enumerate(run(llm_engine, params).values()):
        assert [len(output.outputs[0].token_ids) for output in outputs] == [1 + i]


@pytest.mark.behaviour(125)
def test_counts_and_times(llm_engine: LLMEngine) -> None:
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


@pytest.mark.behaviour(127)
def test_strings_need_a_tokenizer() -> None:
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

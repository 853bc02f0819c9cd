"""What a user writes becomes messages for the core, or an error that says what to change."""

from typing import Any

import pytest
from support import made_tokenizers as made
from support.fakes import FakeClock

from engine.errors import RequestError, RequestTypeError
from engine.frontend.prompt import InputProcessor, ModelLimits, Submission, derive_seed
from engine.messages.params import SamplingParams
from engine.text.tokenizer import RustBackend, Tokenizer

TOKENIZER = Tokenizer(RustBackend(made.metaspace()), {"eos_token": "</s>"}, {})


def processor(tokenizer: Tokenizer | None = TOKENIZER, **limits: Any) -> InputProcessor:
    defaults: dict[str, Any] = {
        "max_model_len": 32,
        "vocab_size": 500,
        "eos_token_ids": (2, 7),
        "scheduling_policy": "fcfs",
        "seed": 0,
    }
    return InputProcessor(tokenizer, ModelLimits(**{**defaults, **limits}), FakeClock())


def process(
    prompt: Any = "Hello", params: SamplingParams | None = None, **options: Any
) -> Submission:
    return processor().process("id", prompt, params, options)


def test_forms_of_a_prompt() -> None:
    ids = TOKENIZER.encode("Hello")
    assert ids[0] == 1  # what the model expects in front
    for prompt in ("Hello", {"prompt": "Hello"}):
        submission = process(prompt)
        assert (submission.prompt, submission.prompt_token_ids) == ("Hello", ids)
    for prompt in (ids, {"prompt_token_ids": ids}):
        submission = process(prompt)
        assert (submission.prompt, submission.prompt_token_ids) == (None, ids)
    both = process({"prompt": "shown", "prompt_token_ids": ids, "cache_salt": "mine"})
    assert (both.prompt, both.prompt_token_ids) == ("shown", ids)
    assert both.requests[0].cache_salt == "mine"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        (list(range(3, 35)), r"32 tokens, but max_model_len is 32"),
        ("word " * 40, r"max_model_len is 32.*shorten the prompt"),
        ([3, 500], r"token id 500 is not in the model's vocabulary; ids are 0..499"),
        ([3, "4"], "must be integers, got '4'"),
        ([3, 2**70], "must be integers"),
        (17, "prompt must be a str, a list"),
        ({"prompt": 17}, "prompt must be a str"),
        ({"prompt": "x", "images": []}, r"\['images', 'prompt'\]"),
    ],
)
def test_bad_prompts_are_named(prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        process(prompt)


def test_empty_text_is_what_the_model_expects_in_front() -> None:
    assert process("").prompt_token_ids == [1]


def test_other_bad_input() -> None:
    with pytest.raises(RequestTypeError, match="request_id must be a str, got int: 5"):
        processor().process(5, "x", None, {})  # type: ignore[arg-type]
    with pytest.raises(RequestTypeError, match="params must be SamplingParams, got dict"):
        processor().process("id", "x", {"n": 1}, {})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"unknown option 'prio'.*priority"):
        process("x", prio=1)
    with pytest.raises(RequestError, match="stop_token_ids has token id 500"):
        process("x", SamplingParams(stop_token_ids=[500]))


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_no_tokenizer_no_strings(field: str) -> None:
    """127: stop strings and bad words need a tokenizer, and so does a text."""
    bare = processor(None)
    with pytest.raises(RequestError, match=f"{field}.*needs a tokenizer"):
        bare.process("id", [3], SamplingParams(**{field: ["x"]}), {})
    with pytest.raises(RequestError, match="prompt_token_ids"):
        bare.process("id", "text", None, {})
    assert bare.process("id", [3], SamplingParams(), {}).prompt_token_ids == [3]


def test_max_tokens_is_what_is_left() -> None:
    prompt = list(range(3, 23))  # 20 of 32
    for asked, given in ((None, 12), (5, 5), (12, 12), (100, 12)):
        submission = process(prompt, SamplingParams(max_tokens=asked))
        assert submission.requests[0].max_tokens == given


def test_end_of_text_ids() -> None:
    assert process().requests[0].eos_token_ids == [2, 7]
    assert process(params=SamplingParams(ignore_eos=True)).requests[0].eos_token_ids == []


def test_bad_words_with_and_without_a_space() -> None:
    backend = RustBackend(made.byte_level())
    tokenizer = Tokenizer(backend, {}, {})
    request = processor(tokenizer).process("id", "x", SamplingParams(bad_words=[" dog"]), {})
    assert request.requests[0].bad_words_ids == [*backend.encode(["dog", " dog"], False)]


def test_options_and_arrival() -> None:
    request = process(user="me", deadline=5.0, hints={"a": 1}).requests[0]
    assert (request.arrival_time, request.user, request.deadline) == (100.0, "me", 5.0)
    assert request.hints == {"a": 1}
    assert process(arrival_time=0.0).arrival_time == 0.0


def test_priority_under_fcfs_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    """44: it has no effect, and the user should know."""
    inputs = processor()
    for _ in range(3):
        assert inputs.process("id", "x", None, {"priority": 3}).requests[0].priority == 3
    assert caplog.text.count("priority 3 is ignored") == 1
    other = processor(scheduling_policy="priority")
    other.process("id", "x", None, {"priority": -3})
    assert "-3" not in caplog.text


def test_children_have_ids_and_seeds_of_their_own() -> None:
    params = SamplingParams(n=3, seed=5)
    requests = process(params=params).requests
    assert [request.request_id for request in requests] == ["0/id", "1/id", "2/id"]
    assert [r.seed for r in requests] == [derive_seed(5, i) for i in range(3)]
    assert len({request.seed for request in requests}) == 3
    assert requests == process(params=params).requests


def test_seeds() -> None:
    assert process(params=SamplingParams(seed=-17)).requests[0].seed == -17
    first, second = processor(), processor()
    seeds = [first.process("id", "x", None, {}).requests[0].seed for _ in range(50)]
    assert len(set(seeds)) == 50 and all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [second.process("id", "x", None, {}).requests[0].seed for _ in range(50)]
    assert processor(seed=1).process("id", "x", None, {}).requests[0].seed not in seeds

"""What users get wrong is refused where they stand, and leaves the engine as it was."""

import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import made_tokenizers as made
from support.fakes import FakeClient, FakeDecided, counting, fake_session

from engine import ModelError, RequestError, RequestTypeError, SamplingParams
from engine.config.args import EngineArgs
from engine.config.model import ModelConfig
from engine.llm import LLM
from engine.messages.params import SamplingParams as Params
from engine.text.tokenizer import load_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=2)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LLM:
    """``LLM`` around a scripted core."""
    client = FakeClient(counting, FakeDecided(vocab_size=400))
    monkeypatch.setattr("engine.frontend.session.open_core", lambda config: client)
    return LLM(made.save(tmp_path, made.metaspace()))


def pick_nothing(params: Params, prompt_token_ids: list[int]) -> None:
    """A logits processor for nobody."""


def test_logits_processors_are_found_by_dotted_path() -> None:
    config = EngineArgs(model="m", logits_processors=[f"{__name__}.pick_nothing"]).create_config()
    assert config.logits_processors == (pick_nothing,)


@pytest.mark.parametrize(
    "prompt", [None, 5, 1.5, b"ab", [None], ["a", 5], "half \ud800", [[1], {}]]
)
def test_prompts_of_wrong_types_are_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompt, GREEDY)
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize("ids", [(5, 6), np.array([5, 6]), [np.int64(5), 6], range(5, 7)])
def test_ids_may_come_in_any_sequence(llm: LLM, ids: Any) -> None:
    (output,) = llm.generate(ids, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == [5, 6]


@pytest.mark.parametrize("params", [5, "ab", SamplingParams, [GREEDY, 5], [GREEDY, None], {"n": 1}])
def test_parameters_of_wrong_types_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestTypeError, match="sampling_params"):
        llm.generate(["a", "b"], params)


@pytest.mark.parametrize(
    "option",
    [
        {"priority": "high"},
        {"priority": True},
        {"priority": 10**400},
        {"user": 5},
        {"arrival_time": "now"},
        {"arrival_time": math.nan},
        {"deadline": math.inf},
        {"timeout": "5"},
        {"timeout": 10**400},
        {"queue_timeout": math.nan},
        {"hints": 5},
    ],
)
def test_request_options_of_wrong_types_are_refused(llm: LLM, option: Any) -> None:
    with pytest.raises(RequestTypeError, match=f"{next(iter(option))} is .*, must be"):
        llm.llm_engine.add_request("a", "Hello", GREEDY, **option)


def test_a_priority_fits_64_bits(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"priority is 9223372036854775808, must be .* 64 bits"):
        llm.llm_engine.add_request("a", "Hello", GREEDY, priority=2**63)


def test_an_arrival_of_another_clock_is_refused(llm: LLM) -> None:
    """By the time of day a request would not age for half a century, nor its timeout end it."""
    with pytest.raises(RequestError, match=r"arrival_time is 17\d+.*time.monotonic.*leave"):
        llm.llm_engine.add_request("a", "Hello", GREEDY, arrival_time=1_700_000_000.0)


def test_parameters_changed_after_they_were_made_are_checked_again(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2)
    params.max_tokens = 0  # an engine that believed it would never end
    with pytest.raises(RequestError, match="max_tokens is 0"):
        llm.llm_engine.add_request("a", "Hello", params)


def test_parameters_may_be_changed_while_a_request_runs(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, stop=["never"])
    llm.llm_engine.add_request("a", "Hello", params)
    params.stop.append(5)  # type: ignore[arg-type]
    params.output_kind = "delta"
    outputs = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]


@pytest.mark.parametrize("ids", [5, None, ["a", 5]])
def test_aborting_what_is_no_id_is_refused(llm: LLM, ids: Any) -> None:
    with pytest.raises(RequestTypeError, match="must be a str"):
        llm.llm_engine.abort_request(ids)


@pytest.mark.parametrize(
    "options",
    [
        {"added_tokens_decoder": {"a": 5}},
        {"added_tokens_decoder": [1]},
        {"additional_special_tokens": [5]},
    ],
)
def test_a_damaged_tokenizer_configuration_is_named(tmp_path: Path, options: Any) -> None:
    made.save(tmp_path, made.metaspace())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is damaged"):
        load_tokenizer(ModelConfig(model=str(tmp_path)))


def test_a_damaged_chat_template_is_named(tmp_path: Path) -> None:
    made.save(tmp_path, made.metaspace())
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"chat_template\.jinja is damaged"):
        load_tokenizer(ModelConfig(model=str(tmp_path)))


TEMPLATE = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ([{"role": "user", "content": None}], {}),
        ([{"role": 5, "content": "x"}], {}),
        ([[{"role": "user", "content": "x"}], 5], {}),
        ("hello", {}),
        ([{"role": "user", "content": "x"}], {"chat_template": "{{ 1 / 0 }}"}),
        ([{"role": "user", "content": "x"}], {"chat_template": 5}),
        ([{"role": "user", "content": "x"}], {"chat_template_kwargs": 5}),
        ([{"role": "user", "content": "x"}], {"chat_template_kwargs": {"messages": []}}),
    ],
)
def test_conversations_a_template_cannot_take_are_refused(
    llm: LLM, messages: Any, options: Any
) -> None:
    with pytest.raises(RequestError):
        llm.chat(messages, GREEDY, **{"chat_template": TEMPLATE, **options})


def test_threads_that_share_an_llm_take_turns(llm: LLM) -> None:
    results: list[int] = []

    def ask() -> None:
        for _ in range(5):
            results.append(len(llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False)))

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [3] * 20


def test_end_of_text_ids_outside_the_vocabulary_are_left_out() -> None:
    client = FakeClient(counting, FakeDecided(vocab_size=400, eos_token_ids=(3, 400, -1)))
    submission = fake_session(client).inputs.process("a", [5], GREEDY, {})
    assert submission.requests[0].eos_token_ids == [3]

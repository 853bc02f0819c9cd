"""Sampling parameters: what is legal, and that a refusal says field, value and range."""

import math
from typing import Any

import msgspec
import pytest

from engine.errors import RequestError, RequestTypeError
from engine.messages.params import SamplingParams, check_params_for_vocab

OUT_OF_RANGE = [
    ({"temperature": -0.1}, "temperature is -0.1", "[0, 2]"),
    ({"temperature": 2.01}, "temperature is 2.01", "[0, 2]"),
    ({"top_p": 0.0}, "top_p is 0.0", "(0, 1]"),
    ({"top_k": -2}, "top_k is -2", "at least -1"),
    ({"min_p": -0.1}, "min_p is -0.1", "[0, 1]"),
    ({"presence_penalty": 2.5}, "presence_penalty is 2.5", "[-2, 2]"),
    ({"repetition_penalty": math.inf}, "repetition_penalty is inf", "greater than 0"),
    ({"seed": 2**63}, f"seed is {2**63}", "64 bits"),
    ({"n": 0}, "n is 0", "at least 1"),
    ({"max_tokens": 0}, "max_tokens is 0", "at least 1"),
    ({"min_tokens": -1}, "min_tokens is -1", "at least 0"),
    ({"logprobs": -2}, "logprobs is -2", "at least -1"),
    ({"prompt_logprobs": 1, "prompt_logprobs_start": -1}, "prompt_logprobs_start is -1", "0"),
    ({"logit_bias": {3: 100.5}}, "logit_bias of token 3 is 100.5", "[-100, 100]"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias has token id -1", "at least 0"),
    ({"stop_token_ids": [-5]}, "stop_token_ids has token id -5", "at least 0"),
    ({"allowed_token_ids": [-5]}, "allowed_token_ids has token id -5", "at least 0"),
    ({"allowed_token_ids": []}, "allowed_token_ids is []", "at least one"),
    ({"stop": ["end", ""]}, "stop has an empty string", "non-empty"),
    ({"bad_words": [""]}, "bad_words has an empty string", "non-empty"),
    ({"output_kind": "all"}, "output_kind is 'all'", "cumulative, delta, final"),
]

WRONG_COMBINATION = [
    ({"n": 2, "temperature": 0.0}, "n is 2", "temperature"),
    ({"min_tokens": 17}, "min_tokens is 17", "max_tokens (16)"),
    ({"stop": "end", "detokenize": False}, "stop is ['end']", "detokenize=True"),
    ({"prompt_logprobs_start": 4}, "prompt_logprobs_start is 4", "prompt_logprobs"),
]

WRONG_TYPE = [
    ({"temperature": "1"}, "temperature is '1' (str)"),
    ({"temperature": True}, "temperature is True (bool)"),
    ({"n": True}, "n is True (bool)"),
    ({"max_tokens": "all"}, "max_tokens is 'all' (str)"),
    ({"ignore_eos": 1}, "ignore_eos is 1 (int)"),
    ({"stop": [1]}, "stop is 1 (int)"),
    ({"bad_words": [b"x"]}, "bad_words is b'x' (bytes)"),
    ({"stop_token_ids": [True]}, "stop_token_ids is True (bool)"),
    ({"allowed_token_ids": [1.0]}, "allowed_token_ids is 1.0 (float)"),
    ({"logit_bias": [1]}, "logit_bias is [1] (list)"),
    ({"extra_args": [1]}, "extra_args is [1] (list)"),
]

LEGAL: list[dict[str, Any]] = [
    {},
    {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0},
    {"temperature": 2.0, "top_p": 1e-9, "top_k": 10**12, "min_p": 1.0},
    {"temperature": 0.001},
    {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 0.01},
    {"seed": -(2**63)},
    {"n": 3, "max_tokens": None, "min_tokens": 500},
    {"min_tokens": 16},
    {"logprobs": -1, "prompt_logprobs": 0, "prompt_logprobs_start": 9},
    {"logit_bias": {0: -100, 5: 100.0}, "allowed_token_ids": [0], "bad_words": ["x"]},
    {"output_kind": "delta", "extra_args": {"user": 1}},
]


def refused(kwargs: dict[str, Any]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**kwargs)
    assert isinstance(caught.value, ValueError)
    return caught.value


@pytest.mark.parametrize(("kwargs", "value", "limit"), OUT_OF_RANGE + WRONG_COMBINATION)
def test_a_refusal_names_value_and_limit(kwargs: dict[str, Any], value: str, limit: str) -> None:
    error = refused(kwargs)
    assert value in str(error)
    assert limit in str(error)
    assert (error.param, error.code) == (value.split()[0], None)


@pytest.mark.parametrize(("kwargs", "value"), WRONG_TYPE)
def test_a_wrong_type_is_named(kwargs: dict[str, Any], value: str) -> None:
    error = refused(kwargs)
    assert isinstance(error, RequestTypeError)
    assert value in str(error)
    assert (error.param, error.code) == (value.split()[0], "invalid_type")


@pytest.mark.parametrize("kwargs", LEGAL)
def test_the_limits_themselves_are_legal(kwargs: dict[str, Any]) -> None:
    params = SamplingParams(**kwargs)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert again == params


def test_unknown_parameters_are_refused_on_the_wire() -> None:
    with pytest.raises(msgspec.ValidationError, match="best_of"):
        msgspec.json.decode(b'{"best_of": 2}', type=SamplingParams)


def test_lists_may_be_written_as_users_do() -> None:
    params = SamplingParams(stop="end", stop_token_ids=(1, 2), bad_words=None)  # type: ignore[arg-type]
    assert params.stop == ["end"]
    assert params.stop_token_ids == [1, 2]
    assert params.bad_words == []


def test_seed_minus_one_is_no_seed() -> None:
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=-2).seed == -2


def test_default_lists_are_not_shared() -> None:
    first = SamplingParams()
    first.stop.append("x")
    assert SamplingParams().stop == []


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6])
def test_greedy(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).is_greedy
    assert not SamplingParams(temperature=1e-4).is_greedy


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"stop_token_ids": [1, 100]}, ("stop_token_ids", "100", "[0, 99]")),
        ({"allowed_token_ids": [100]}, ("allowed_token_ids", "100", "[0, 99]")),
        ({"logit_bias": {100: 1.0}}, ("logit_bias", "100", "[0, 99]")),
        ({"logprobs": 101}, ("logprobs is 101", "at most 100")),
        ({"prompt_logprobs": 101}, ("prompt_logprobs is 101", "at most 100")),
    ],
)
def test_what_depends_on_the_vocabulary(kwargs: dict[str, Any], words: tuple[str, ...]) -> None:
    params = SamplingParams(**kwargs)
    check_params_for_vocab(params, 101)
    with pytest.raises(RequestError) as caught:
        check_params_for_vocab(params, 100)
    assert all(word in str(caught.value) for word in words), caught.value
    assert caught.value.param in kwargs

"""A type checker knows every option, and a name that is none is an error before and at run time.

This file is among those that mypy checks: an ``ignore`` that it does not need is an error too.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine import LLM, EngineArgs
from engine.errors import ConfigError

NEAR = "unknown option 'max_num_seq'; did you mean 'max_num_seqs'"


def test_options_have_their_types() -> None:
    args = EngineArgs(model="m", max_num_seqs=4, block_size=8, resources=["a.B"], device="cpu")
    num_seqs: int = args.max_num_seqs
    block_size: int = args.block_size  # type: ignore[assignment]  # which may be None
    assert (num_seqs, block_size) == (4, 8)
    assert args.create_config().scheduler.resources == ("a.B",)


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=NEAR):
        EngineArgs(max_num_seq=4)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=NEAR):
        replace(EngineArgs(), max_num_seq=4)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=NEAR):
        LLM(max_num_seq=4)  # takes any names, and hands them on


def test_a_name_that_is_near_to_none_is_answered_with_all() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'qqq'; known are: model, tokenizer, .*"):
        EngineArgs(qqq=1)  # type: ignore[call-arg]


def test_a_name_near_to_several_is_answered_with_them() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'max_waiting_requests' or 'max_waiting_t"):
        EngineArgs(max_waiting=1)  # type: ignore[call-arg]


def test_options_without_a_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'m' is given without a name: .*model='m'"):
        EngineArgs("m")  # type: ignore[call-arg]


def test_a_wrong_type_is_an_error() -> None:
    args = EngineArgs(max_num_seqs="4")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"max_num_seqs is '4' \(str\), must be a whole number"):
        args.create_config()

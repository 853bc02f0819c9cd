"""Every option of engine, scheduler and cache with every kind of wrong value: one clear error."""

from __future__ import annotations

import inspect
import math
import os
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

import pytest

from engine.config.args import EngineArgs
from engine.config.cache import CacheConfig
from engine.config.decide import resolve
from engine.config.env import default_num_threads
from engine.config.model import ModelInfo
from engine.config.sched import SchedulerConfig
from engine.errors import ConfigError
from engine.kv.manager import KVManager
from engine.sched.plugins.find import choose, find_policy, make_scheduler
from engine.sched.policies import POLICIES

HUGE = 10**400  # not even a float
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, HUGE, math.nan, math.inf, -math.inf),
    *("", "x", "5", b"x", [1], ["x"], {"a": "b"}, {"a": math.nan}, {5: 1.0}, object()),
)
CLASSES = (EngineArgs, SchedulerConfig, CacheConfig)
NUMBERS = (int, float, int | None, float | None)


def use(options: Any) -> None:
    """Read options as an engine does before it loads the model."""
    if isinstance(options, EngineArgs):
        config = options.create_config()
        info = ModelInfo(path=Path("m"), architecture="", model_type="", hf={})
        options = resolve(config, info, "cpu").scheduler
    if isinstance(options, SchedulerConfig):
        make_scheduler(options, KVManager(8, 4), clock=float, chosen=choose(options))


def is_of_kind(value: Any, hint: Any) -> bool:
    """May a value of this type be right for a field of type ``hint``?"""
    if hint is Any or get_origin(hint) is Literal:
        return True
    if hint == float | None and value is None:
        return True
    if hint in (float, float | None):
        return type(value) is float or (type(value) is int and value != HUGE)
    origin = get_origin(hint)
    kinds = hint.__args__ if origin not in (None, list, dict, tuple) else (origin or hint,)
    return type(value) in [get_origin(kind) or kind for kind in kinds]


@pytest.mark.parametrize(
    ("cls", "name"), [(cls, field.name) for cls in CLASSES for field in fields(cls)]
)
def test_wrong_values_raise_a_config_error_that_names_the_option(cls: Any, name: str) -> None:
    hint = get_type_hints(cls)[name]
    for value in VALUES:
        try:
            use(cls(**{name: value}))
        except ConfigError as error:
            told = str(error)
            assert name in told, told
            assert len(told) < 600, told
        else:
            assert is_of_kind(value, hint), f"{name}={value!r:.80} was taken"
            assert not (hint in NUMBERS and value == -1) or name == "seed"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 10**7}, r"max_num_seqs is 10000000, must be in 1\.\.1048576"),
        ({"max_num_seqs": "8"}, r"max_num_seqs is '8' \(str\), must be a whole number"),
        ({"max_model_len": 2**31}, r"max_model_len is 2147483648, must be in 1\.\.2147483647"),
        ({"enable_chunked_prefill": 1}, r"enable_chunked_prefill is 1 \(int\), must be True or F"),
        ({"resources": "x"}, r"resources is 'x' \(str\), must be a tuple"),
        ({"user_weights": {"b": 0}}, r"user_weights\['b'\] is 0, must be above 0"),
        ({"user_weights": {"b": math.nan}}, r"user_weights\['b'\] is nan"),
        ({"user_weights": {"b": "2"}}, r"user_weights\['b'\] is '2' \(str\), must be a number"),
        ({"user_weights": {5: 1.0}}, r"a key of user_weights is 5 \(int\), must be a string"),
    ],
)
def test_errors_name_value_and_limit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**options)


# Options of policies


def policy_options() -> list[tuple[str, str, Any]]:
    """Policy, option and type of all shipped ones."""
    return [
        (name, option, get_type_hints(cls.__init__)[option])
        for name, cls in POLICIES.items()
        for option in inspect.signature(cls).parameters
    ]


@pytest.mark.parametrize(("policy", "option", "hint"), policy_options())
def test_wrong_options_of_policies_are_refused(policy: str, option: str, hint: Any) -> None:
    for value in VALUES:
        try:
            find_policy(policy, {option: value})
        except ConfigError as error:
            assert option in str(error) and policy.split("-")[0][0].upper() in str(error)
        else:
            assert is_of_kind(value, hint), f"{option}={value!r:.80} was taken"
            finite = isinstance(value, bool) or (math.isfinite(value) and value >= 0)
            assert finite, f"{option}={value!r} was taken"


def test_options_that_a_policy_does_not_have() -> None:
    with pytest.raises(ConfigError, match=r"EDF .*'defualt_deadline'; its options are: default_de"):
        find_policy("edf", {"defualt_deadline": 3.0})
    with pytest.raises(ConfigError, match=r"FCFS .*'a'; its options are: none"):
        find_policy("fcfs", {"a": 3.0})


def test_options_beside_an_object_are_refused() -> None:
    """They would be for nobody: the policy was made already."""
    policy = find_policy("edf", {})
    with pytest.raises(ConfigError, match=r"policy_options .* object of EDF; give the class"):
        choose(SchedulerConfig(scheduling_policy=policy, policy_options={"default_deadline": 3.0}))


def test_paths_are_paths() -> None:
    assert EngineArgs(step_log=Path("x")).create_config().step_log == "x"


@pytest.mark.parametrize(
    ("value", "threads"),
    [
        ("1", 1),
        ("1,2", 1),
        ("1000000", os.cpu_count()),
        ("9" * 5000, None),
        ("0", None),
        ("x", None),
        ("", None),
        ("-1", None),
    ],
)
def test_threads_of_openmp_are_no_more_than_there_are_cores(
    value: str, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert default_num_threads() == threads

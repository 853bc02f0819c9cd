"""Prompts beside decodes: in small steps while few wait (``max_mixed_prefill_tokens``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.simulate import Run, expected, make_request, make_run

from engine.config.args import EngineArgs
from engine.config.decide import Products, resolve
from engine.config.engine import Device
from engine.config.model import ModelInfo
from engine.errors import ConfigError
from engine.sched import Policy, Request, SchedView
from engine.sched.policies.fcfs import FCFS
from engine.sched.policies.sarathi import Sarathi
from engine.sched.resource import Fit, Resource
from engine.sched.step_state import Step


def beside_a_decode(lengths: Sequence[int], **options: Any) -> Run:
    """A request decodes, then prompts "0", "1", ... of these lengths come at once."""
    run = make_run(**{"max_num_batched_tokens": 1024, "max_mixed_prefill_tokens": 128} | options)
    run.add(make_request("old", [3] * 4, 50))
    run.step()
    for index, length in enumerate(lengths):
        run.add(make_request(str(index), [5 + index] * length, 4))
    return run


def prompts_of(run: Run, num_steps: int) -> list[dict[str, int]]:
    """Prompt tokens by request in each of the next steps; "old" are all decodes."""
    first = len(run.plans)
    for _ in range(num_steps):
        run.step()
    plans = run.plans[first:]
    assert all(plan["old"] == 1 for plan in plans)
    return [{name: count for name, count in plan.items() if count > 1} for plan in plans]


def test_prompts_beside_a_decode_go_in_small_steps() -> None:
    run = beside_a_decode([100, 100, 100])
    assert prompts_of(run, 3) == [{"0": 100, "1": 28}, {"1": 72, "2": 56}, {"2": 44}]
    run.drain()
    assert run.outputs["2"] == expected([7] * 100, 4)


def test_small_prompts_share_a_step() -> None:
    assert prompts_of(beside_a_decode([60, 68, 60]), 2) == [{"0": 60, "1": 68}, {"2": 60}]


def test_a_long_prompt_takes_six_steps_more_at_most() -> None:
    run = beside_a_decode([2000], max_num_batched_tokens=4096)
    assert [plan["0"] for plan in prompts_of(run, 7)] == [1232, 128, 128, 128, 128, 128, 128]


def test_over_how_many_steps_prompts_are_spread_is_decided_for_the_processor() -> None:
    run = beside_a_decode([2000], max_num_batched_tokens=4096, num_mixed_prefill_steps=12)
    assert [plan["0"] for plan in prompts_of(run, 3)] == [464, 128, 128]


def test_what_is_more_than_six_steps_of_prompts_is_computed_at_once() -> None:
    first, second = prompts_of(beside_a_decode([100] * 11), 2)
    assert first == {"0": 100, "1": 100, "2": 100, "3": 32}
    assert second == {"3": 68, "4": 60}


def test_nobody_decodes_so_prompts_start_together() -> None:
    run = make_run(max_num_batched_tokens=1024, max_mixed_prefill_tokens=128)
    for name in "abc":
        run.add(make_request(name, [ord(name)] * 100, 4))
    run.step()
    assert run.plans[0] == {"a": 100, "b": 100, "c": 100}


def test_what_is_cached_takes_no_room() -> None:
    run = beside_a_decode([112])
    assert prompts_of(run, 1) == [{"0": 112}]
    run.add(make_request("other", [90] * 100, 4))
    run.add(make_request("again", [5] * 112, 4))  # 96 of them are cached
    assert prompts_of(run, 1) == [{"other": 100, "again": 16}]


class Whole(Resource):
    """Wants the first 200 tokens in one step, as a picture may."""

    def watches(self, req: Request) -> bool:
        return req.num_computed < 200 <= req.num_prompt

    def fit(self, req: Request, num_tokens: int, step: Step) -> Fit:
        return Fit(num_tokens if not self.watches(req) or num_tokens >= 200 else 0)


def test_what_must_be_computed_whole_is_not_cut() -> None:
    run = beside_a_decode([50, 300, 50], resources=[Whole()])
    assert prompts_of(run, 3) == [{"0": 50}, {"1": 300}, {"2": 50}]


def test_what_must_be_computed_whole_comes_first_soon() -> None:
    """Though prompts keep coming, of which one is always begun."""
    run = beside_a_decode([100], resources=[Whole()])
    run.add(make_request("picture", [90] * 300, 4))
    for index in range(8):
        run.add(make_request(f"late {index}", [100 + index] * 128, 2))
        run.step()
    assert any(plan.get("picture") == 300 for plan in run.plans[:5])


class Least(Resource):
    """Wants 200 tokens at once, and says so only when it is asked."""

    def watches(self, req: Request) -> bool:
        return False

    def fit(self, req: Request, num_tokens: int, step: Step) -> Fit:
        return Fit(num_tokens if num_tokens >= min(200, req.num_uncomputed) else 0)


def test_a_resource_that_refuses_a_piece_is_asked_about_the_whole() -> None:
    assert prompts_of(beside_a_decode([300], resources=[Least()]), 1) == [{"0": 300}]


def test_what_must_be_computed_whole_may_be_longer_than_a_long_prompt_may_get() -> None:
    run = beside_a_decode([300, 50], resources=[Whole()], long_prefill_token_threshold=64)
    assert prompts_of(run, 2) == [{"0": 300}, {"1": 50}]


def test_what_cannot_run_yet_does_not_make_steps_longer() -> None:
    run = beside_a_decode([100] * 3)
    run.scheduler.add_request(make_request("parked", [9] * 2000, 2))
    parked = run.scheduler.roster.by_id["parked"]
    run.scheduler.roster.park(parked, 0.0, "a grammar")
    assert prompts_of(run, 1) == [{"0": 100, "1": 28}]


def test_zero_is_no_cap() -> None:
    run = beside_a_decode([100, 100, 100], max_mixed_prefill_tokens=0)
    assert prompts_of(run, 1) == [{"0": 100, "1": 100, "2": 100}]


class PromptsLast(FCFS):
    """An order of its own."""

    def order(self, view: SchedView) -> Iterator[Request]:
        yield from view.decodes_first()
        yield from view.unoffered


@pytest.mark.parametrize("policy", [Sarathi(), PromptsLast()])
def test_a_policy_that_shapes_steps_is_left_alone(policy: Policy) -> None:
    run = beside_a_decode([100, 100, 100], policy=policy)
    assert prompts_of(run, 1) == [{"0": 100, "1": 100, "2": 100}]


@pytest.mark.parametrize(
    ("device", "products", "asked", "found"),
    [
        ("cpu", "", None, 48),
        ("cpu", "wide pairs", None, 128),
        ("cpu", "tiles", None, 160),
        ("cuda", "", None, 0),
        ("cpu", "tiles", 0, 0),
    ],
)
def test_what_a_device_has_if_none_is_asked(
    device: Device, products: Products, asked: int | None, found: int
) -> None:
    config = EngineArgs(max_mixed_prefill_tokens=asked).create_config()
    info = ModelInfo(path=Path("m"), architecture="", model_type="", hf={})
    resolved = resolve(config, info, device, products=products)
    assert resolved.scheduler.max_mixed_prefill_tokens == found
    assert resolved.scheduler.num_mixed_prefill_steps == (6 if products else 12)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_mixed_prefill_tokens": -1}, "max_mixed_prefill_tokens is -1"),
        (
            {"max_mixed_prefill_tokens": 64, "enable_chunked_prefill": False, "max_model_len": 99},
            "64 and enable_chunked_prefill is False",
        ),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_run(**options)

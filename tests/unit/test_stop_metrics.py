"""What users read of a request that a stop string ended, and of outputs that they keep."""

from __future__ import annotations

import random
from copy import deepcopy
from typing import Any

import pytest
from support.fakes import FakeClient, FakeClock, counting, fake_session, scheduled_session
from support.simulate import expected
from support.words import word, words

from engine.errors import EngineDeadError
from engine.frontend.session import Session
from engine.messages.params import SamplingParams
from engine.messages.requests import CoreOutputs, RequestMetrics, RequestOutput, Started

Ask = tuple[list[int], int, bool]
"""A prompt, how many tokens it gets, and whether a stop string or its length ends it."""

MANY = 60  # tokens; more than any asks for


def params_of(asked: Ask, by_string: bool) -> SamplingParams:
    prompt, num_tokens, _ = asked
    if by_string:
        last = expected(prompt, num_tokens)[-1]
        return SamplingParams(max_tokens=MANY, stop=[word(last)], min_tokens=num_tokens - 1)
    return SamplingParams(max_tokens=num_tokens, min_tokens=num_tokens - 1)


def ends_of(asked: list[Ask], by_string: bool, **options: Any) -> dict[str, RequestOutput]:
    """The last outputs. Time goes on between steps alone, so that two runs can be compared."""
    clock = FakeClock(0.0)
    session = scheduled_session(clock, tokenizer=words(), **options)
    last: dict[str, RequestOutput] = {}
    for name, each in enumerate(asked):
        params = params_of(each, by_string and each[2])
        session.submit(session.inputs.process(str(name), each[0], params, {}))
        clock.now += 1.0
        last |= {output.request_id: output for output in session.step()}
    while session.has_unfinished:
        clock.now += 1.0
        last |= {output.request_id: output for output in session.step()}
    return last


def metrics_of(output: RequestOutput) -> RequestMetrics:
    assert output.metrics is not None
    return output.metrics


@pytest.mark.parametrize("turn", range(10))
def test_a_request_ended_by_a_string_has_fared_as_one_ended_by_its_length(
    turn: int, seed: int
) -> None:
    """In a pool that is too small, so that some are preempted, wait and come back."""
    dice = random.Random(seed + turn)
    asked: list[Ask] = [
        (
            [dice.randrange(1, 900) for _ in range(dice.randint(1, 30))],
            dice.randint(2, 40),
            dice.random() < 0.7,
        )
        for _ in range(12)
    ]
    options = {"num_blocks": 9, "max_num_seqs": 6}
    strings, lengths = (ends_of(asked, each, **options) for each in (True, False))
    assert len(strings) == len(lengths) == 12
    for name, output in strings.items():
        assert output.outputs[0].token_ids == lengths[name].outputs[0].token_ids
        assert metrics_of(output) == metrics_of(lengths[name]), name
    assert sum(metrics_of(output).num_preemptions for output in strings.values())


def test_an_output_that_is_kept_says_what_was_true_of_its_moment() -> None:
    clock = FakeClock(0.0)
    session = scheduled_session(clock, tokenizer=words(), num_blocks=6, max_num_seqs=2)
    kept: list[tuple[RequestOutput, RequestMetrics]] = []
    for name in "ab":
        params = SamplingParams(max_tokens=40)
        session.submit(session.inputs.process(name, [ord(name)] * 20, params, {}))
    while session.has_unfinished:
        clock.now += 1.0
        for output in session.step():
            metrics = metrics_of(output)
            kept.append((output, deepcopy(metrics)))
    assert all(output.metrics == copied for output, copied in kept)
    by_name = [[m for o, m in kept if o.request_id == name] for name in "ab"]
    for every in by_name:
        assert [m.last_token_time for m in every] == sorted({m.last_token_time for m in every})
        assert [m.finished_time for m in every[:-1]] == [None] * (len(every) - 1)
        assert [event for event, _ in every[0].events] == ["queued", "scheduled"]
    last = by_name[1][-1]
    assert last.num_preemptions and len(last.events) > 2 and last.finished_time is not None


def test_what_a_core_tells_of_a_sequence_takes_the_place_of_what_it_told_before() -> None:
    """Figures of several sequences are added."""
    session = fake_session(FakeClient(counting))
    params = SamplingParams(n=2, max_tokens=9)
    submission = session.inputs.process("a", [5], params, {})
    session.submit(submission)
    one, two = (request.request_id for request in submission.requests)

    def told(core_id: str, *started: Started) -> RequestMetrics:
        batch = CoreOutputs([core_id], [7], None, 9.0, started=list(started))
        (output,) = session.outputs.process(batch)
        return metrics_of(output)

    first = told(one, Started(0, 4, 2.0, 0, {"seats": 1.0}, [("queued", 1.0), ("scheduled", 2.0)]))
    assert (first.num_preemptions, first.waits) == (0, {"seats": 1.0})
    events = [("queued", 1.0), ("scheduled", 2.0), ("preempted", 3.0), ("scheduled", 5.0)]
    again = told(one, Started(0, 4, 2.0, 1, {"seats": 1.0, "preempted by x": 2.0}, events))
    assert (again.num_preemptions, again.events) == (1, events)
    both = told(two, Started(0, 0, 4.0, 0, {"seats": 3.0}, [("queued", 1.0), ("scheduled", 4.0)]))
    assert both.num_preemptions == 1 and both.waits == {"seats": 4.0, "preempted by x": 2.0}
    assert [event for event, _ in both.events] == ["queued"] * 2 + [
        "scheduled",
        "preempted",
        "scheduled",
        "scheduled",
    ]
    assert both.scheduled_time == 2.0 and first.waits == {"seats": 1.0}


def test_outputs_are_not_lost_if_the_core_dies_before_it_hears_of_an_end() -> None:
    class Dying(FakeClient):
        def abort(self, request_ids: object) -> None:
            raise EngineDeadError("gone")

    client = Dying(counting)
    session: Session = fake_session(client, words())
    for name, stop in (("a", [word(11)]), ("b", [])):
        params = SamplingParams(max_tokens=9, stop=stop)
        session.submit(session.inputs.process(name, [5], params, {}))
    session.step()
    outputs = {output.request_id: output for output in session.step()}
    assert outputs["a"].outputs[0].finish_reason == "stop"
    assert outputs["b"].outputs[0].token_ids == [10, 11]
    client.is_shut_down = True
    with pytest.raises(EngineDeadError):
        session.step()

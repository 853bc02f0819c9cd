"""Drafts: how many are verified, what is counted, and that nobody's tokens change."""

from __future__ import annotations

import re

import numpy as np
import pytest
from support.data_plane import FeatureWorker, RightDrafts, answer, guess, make_feature_run
from support.simulate import make_request

from engine import EngineArgs
from engine.assets import BOX_MODEL
from engine.core.build import build_core, check_capabilities, parts_of
from engine.errors import ConfigError
from engine.messages.step import StepResult
from engine.sched.policies import Priority
from engine.spec.decide import Drafts
from engine.spec.worker_drafts import WorkerDrafts


def make(num_right=3, num_drafts=3, k=3, resources=(), **options):
    drafts = WorkerDrafts(k)
    run = make_feature_run(
        resources=[drafts, *resources],
        propose=lambda tokens: guess(tokens, num_right, num_drafts),
        num_drafts=k,
        **options,
    )
    return drafts, run


def add(run, request_id="0", length=20, num_output=16, **fields):
    request = make_request(request_id, [ord(request_id)] * length, num_output, **fields)
    run.add(request)
    return request


@pytest.mark.behaviour(81, 82)
@pytest.mark.parametrize(
    ("num_right", "num_accepted_tokens_per_pos", "computed"),
    [(3, [1, 1, 1], 24), (1, [1, 0, 0], 22)],
)
def test_right_drafts_are_counted_and_wrong_ones_rolled_back(
    num_right, num_accepted_tokens_per_pos, computed
):
    drafts, run = make(num_right)
    add(run)
    run.step()
    run.launch()
    req = run.scheduler.roster.by_id["0"]
    assert run.plans == [{"0": 20}, {"0": 4}] and req.num_computed == 24
    run.settle()
    assert req.num_computed == computed and req.num_tokens == computed + 1
    stats = drafts.stats
    assert (stats.num_drafts, stats.num_draft_tokens) == (1, 3)
    assert (stats.num_accepted_tokens, stats.num_accepted_tokens_per_pos) == (
        sum(num_accepted_tokens_per_pos),
        num_accepted_tokens_per_pos,
    )


@pytest.mark.behaviour(83)
def test_requests_add_up_and_no_drafts_are_no_drafts():
    drafts, run = make(num_right=1)
    add(run, "0")
    add(run, "1", num_output=1)
    run.step()
    assert drafts.stats.num_drafts == 0
    add(run, "2")
    run.step()
    run.step()
    stats = drafts.stats
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 9, 3)
    told = {"drafts.num_drafts": 3, "drafts.num_draft_tokens": 9, "drafts.num_accepted_tokens": 3}
    told["drafts.num_accepted_tokens_per_pos.0"] = 3
    assert run.scheduler.make_stats().counters == told
    assert stats.num_accepted_tokens_per_pos == [3, 0, 0]


@pytest.mark.behaviour(84)
def test_pieces_of_a_prompt_have_no_drafts():
    _, run = make(max_num_batched_tokens=50)
    add(run, length=80)
    for _ in range(3):
        run.step()
    assert run.plans == [{"0": 50}, {"0": 30}, {"0": 4}]


@pytest.mark.behaviour(85)
def test_drafts_are_cut_to_the_length_and_the_budget():
    _, run = make(num_drafts=3, max_model_len=24)
    request = add(run, length=20)
    run.drain()
    assert run.plans[:2] == [{"0": 20}, {"0": 3}], "a fourth would be the 25th token"
    assert run.outputs["0"] == answer(request, 4)

    _, run = make(max_num_batched_tokens=16)
    for index in range(4):
        add(run, str(index), length=4)
    run.step()
    run.step()
    assert run.plans[1] == {str(index): 4 for index in range(4)}

    _, run = make(max_num_batched_tokens=6, max_num_seqs=6)
    add(run, "0", length=3)
    add(run, "1", length=3)
    run.step()
    run.step()
    assert run.plans[1] == {"0": 4, "1": 2}


@pytest.mark.behaviour(85)
def test_a_request_never_gets_more_than_it_requested():
    for num_output in range(1, 9):
        _, run = make()
        request = add(run, num_output=num_output)
        run.drain()
        assert run.outputs["0"] == answer(request)


@pytest.mark.behaviour(86)
def test_a_cached_prompt_is_padded_to_the_shape_of_decodes():
    _, run = make(num_right=0)
    add(run, "0", length=33, num_output=40)
    run.step()
    run.add(request := make_request("1", [ord("0")] * 33, 9))
    run.launch()
    plan = run.flight[0][0]
    assert run.plans[1] == {"0": 4, "1": 4}
    assert plan.drafts.tokens.tolist()[3:] == [-1, -1, -1]
    run.settle()
    assert run.scheduler.roster.by_id["1"].num_computed == 33
    run.drain()
    assert run.outputs["1"] == answer(request)


@pytest.mark.behaviour(86)
def test_a_lone_prompt_of_one_token_is_not_padded():
    """There are no decodes whose shape it could take, nor was any of it cached."""
    _, run = make(num_right=0)
    for index in range(2):
        add(run, str(index), length=1, num_output=9)
    run.step()
    assert run.plans == [{"0": 1, "1": 1}]
    add(run, "2", length=1, num_output=9)
    run.step()
    assert run.plans[1] == {"0": 4, "1": 4, "2": 4}, "beside decodes it is"


@pytest.mark.behaviour(86)
def test_padding_is_no_draft():
    drafts, run = make(num_drafts=0)
    add(run, "0", length=33)
    run.drain()
    add(run, "1", length=33)
    run.drain()
    assert drafts.stats.num_drafts == 0


@pytest.mark.behaviour(86)
def test_next_to_a_piece_of_a_prompt_nothing_is_padded():
    _, run = make()
    add(run, "0", length=33, num_output=40)
    run.step()
    add(run, "1", length=20)
    run.add(make_request("2", [ord("0")] * 33, 3))
    run.step()
    assert run.plans[1] == {"0": 4, "1": 20, "2": 1}


@pytest.mark.behaviour(87)
def test_drafts_the_grammar_forbids_are_cut_before_verification():
    drafts = WorkerDrafts(3, cut=lambda req, tokens: 1 if req.request_id == "0" else len(tokens))
    run = make_feature_run(
        resources=[drafts], propose=lambda tokens: guess(tokens, 3, 3), num_drafts=3
    )
    requests = [add(run, "0"), add(run, "1")]
    run.step()
    run.step()
    assert run.plans[1] == {"0": 2, "1": 4}
    assert drafts.stats.num_draft_tokens == 4
    run.drain()
    assert [run.outputs[request.request_id] for request in requests] == list(map(answer, requests))


@pytest.mark.behaviour(17)
def test_accepted_drafts_after_a_stop_token_are_dropped():
    _, run = make()
    request = make_request("0", [5] * 20, 16)
    stop = answer(request)[2]
    run.add(make_request("0", [5] * 20, 16, eos_token_ids=[stop]))
    run.drain()
    assert run.outputs["0"] == answer(request)[:3] and run.finished["0"] == ("stop", None)


def test_a_drafting_request_is_in_one_step_at_a_time():
    _, run = make(depth=3)
    add(run, "0")
    add(run, "1", length=2)
    assert run.launch() and not run.launch()
    run.settle()
    assert run.launch() and not run.launch()
    assert run.plans == [{"0": 20, "1": 2}, {"0": 4, "1": 4}]


def test_without_drafts_steps_overlap_as_ever():
    _, run = make(k=0, num_drafts=2, depth=2)
    add(run)
    assert run.launch() and run.launch()
    run.drain()
    assert run.plans[1] == {"0": 1}


def test_a_row_without_a_result_says_nothing_about_its_drafts():
    drafts, run = make(fail=lambda seq, upto: "lost" if upto > 20 else None)
    add(run)
    run.step()
    run.step()
    assert run.finished["0"] == ("error", None) and drafts.stats.num_drafts == 0


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (-1, r"must be from 0 \(no drafts\) to 256"),
        (10**6, r"must be from 0 "),
        ("3", "must be a whole number"),
    ],
)
def test_a_number_of_drafts_that_cannot_be_is_refused(wrong, why):
    with pytest.raises(ConfigError, match=rf"num_speculative_tokens is {wrong!r}.*{why}"):
        WorkerDrafts(wrong)


def test_drafts_of_which_none_proposes_are_refused_at_the_start():
    """They were taken, and there was never a draft."""
    with pytest.raises(ConfigError, match=r"Drafts needs .*'proposals'.*use Drafts with"):
        build_core(EngineArgs(model=str(BOX_MODEL), resources=[WorkerDrafts(3)]).create_config())


def test_drafts_are_taken_where_the_worker_proposes_or_a_proposer():
    proposing = FeatureWorker(8, 4, propose=lambda tokens: [])
    check_capabilities([WorkerDrafts(3)], proposing.capabilities)
    for drafts in (Drafts(0, RightDrafts()), Drafts(3, RightDrafts())):
        check_capabilities([drafts], frozenset({"drafts"}))
    assert parts_of([WorkerDrafts(3)]) == ("drafts",), "what clients are told of"


@pytest.mark.parametrize("preempts", [False, True])
def test_drafts_stand_beside_a_decode_with_two_steps_in_flight(preempts):
    """A policy whose waiting requests may preempt is asked about each row by itself."""

    class ForOne:
        def propose(self, req, num_tokens):
            said = list(requests[0].prompt_token_ids) + answer(requests[0])
            known = len(req.tokens)
            return said[known : known + num_tokens] if req.request_id == "0" else []

        def release(self, req):
            pass

    requests = [make_request(name, [ord(name)] * 20, 40) for name in "012"]
    drafts = Drafts(3, ForOne())
    run = make_feature_run(
        resources=[drafts],
        depth=2,
        max_num_seqs=2,
        policy=Priority(preempt_for_waiting=preempts),
        num_drafts=3,
    )
    for request in requests:
        run.add(request)
    run.drain()
    assert run.outputs == {request.request_id: answer(request) for request in requests}
    assert drafts.stats.num_accepted_tokens == drafts.stats.num_draft_tokens >= 27


def test_results_may_come_without_proposals():
    _, run = make()
    add(run)
    run.launch()
    plan, result = run.flight.popleft()
    result = StepResult(result.step, result.token_ids, np.array(result.counts))
    run.scheduler.update_from_output(plan, result)
    run.launch()
    assert run.plans[1] == {"0": 1} and run.flight[0][0].drafts is None


class BadForOne(RightDrafts):
    """Answers rightly, but for request 1."""

    def __init__(self, answer):
        self.answer = answer
        self.asked = []

    def propose(self, req, num_tokens):
        self.asked.append((req.request_id, req.num_tokens))
        if req.request_id != "1":
            return super().propose(req, num_tokens)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def run_with(proposer, **options):
    """Three requests whose drafts a proposer guesses, until it has been asked twice about each."""
    run = make_feature_run(resources=[Drafts(3, proposer)], num_drafts=3, **options)
    requests = [add(run, str(index)) for index in range(3)]
    for _ in range(3):
        run.step()
    return run, requests


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (LookupError("no guess today"), "LookupError: no guess today"),
        (None, "returns None, must be token ids"),
        ([5, "x"], r"returns \[5, 'x'\], .*'x'"),
        ([-1], r"returns \[-1\]"),
        ([5, 2**31], r"returns .*2147483648"),
    ],
)
def test_a_proposer_that_fails_for_one_request_goes_on_for_others(bad, told):
    proposer = BadForOne(bad)
    run, requests = run_with(proposer)
    assert run.plans == [{"0": 20, "1": 20, "2": 20}, *[{"0": 4, "1": 1, "2": 4}] * 2]
    faults = run.scheduler.guard.faults.messages
    assert len(faults) == 2 and len(set(proposer.asked)) == len(proposer.asked) == 6
    assert all(re.search(rf"Drafts.*BadForOne.propose, request 1: .*{told}", f) for f in faults)
    run.drain()
    assert [run.outputs[request.request_id] for request in requests] == list(map(answer, requests))


def test_after_too_many_faults_of_a_proposer_requests_go_on_without_drafts():
    proposer = BadForOne([-1])
    run, requests = run_with(proposer)
    run.drain()
    assert "disabled" in run.scheduler.guard.faults.messages[-1]
    assert [run.outputs[request.request_id] for request in requests] == list(map(answer, requests))


@pytest.mark.parametrize("make", [list, tuple, np.array, iter], ids=lambda make: make.__name__)
def test_more_guesses_than_asked_for_are_cut_off(make):
    class Eager(RightDrafts):
        def propose(self, req, num_tokens):
            return make(super().propose(req, num_tokens + 5))

    run, requests = run_with(Eager())
    assert run.plans[1:] == [{"0": 4, "1": 4, "2": 4}] * 2
    run.drain()
    assert not run.scheduler.guard.faults.num_faults
    assert [run.outputs[request.request_id] for request in requests] == list(map(answer, requests))


def test_no_drafts_are_asked_for_where_no_step_could_verify_them():
    """Behind its last token but one a request has no place for any."""
    _, run = make()
    add(run, "0", num_output=1)
    add(run, "1", num_output=2)
    add(run, "2", num_output=4)
    add(run, "3")
    run.launch()
    assert run.flight[-1][0].proposals.tolist() == [0, 0, 2, 3]
    run.drain()
    add(run, "4", num_output=1)
    run.launch()
    assert run.flight[-1][0].proposals is None, "the worker need not prepare for any"


def test_what_a_worker_proposed_before_a_preemption_is_not_verified_behind_it():
    """It comes back to another place, and the worker may be asked for nothing there."""
    drafts, run = make()
    add(run)
    run.step()
    run.step()
    scheduler = run.scheduler
    scheduler.preempt(scheduler.roster.by_id["0"], scheduler.view.step)
    run.worker.propose = None
    before = drafts.stats.num_draft_tokens
    run.drain()
    assert drafts.stats.num_draft_tokens == before

"""Grammars: who waits for one, who fails by one, and how drafts meet one."""

from __future__ import annotations

import pytest
from support.data_plane import (
    Compiler,
    Compiling,
    OneAnswer,
    RightDrafts,
    answer,
    guess,
    kept_by,
    make_feature_run,
)
from support.simulate import VOCAB_SIZE, make_request

from engine.spec.decide import Drafts
from engine.spec.worker_drafts import WorkerDrafts
from engine.structured.decide import GrammarReadiness


def request_of(request_id, grammar=None, num_output=5, **fields):
    return make_request(request_id, [ord(request_id)] * 10, num_output, grammar=grammar, **fields)


def follows(request, polls, error="", upto=None):
    """A grammar that allows just what the fake model says, or its beginning."""
    return lambda: Compiling(OneAnswer(answer(request)[:upto]), polls, error)


def make(grammars, resources=(), **options):
    readiness = GrammarReadiness(Compiler(grammars), VOCAB_SIZE)
    run = make_feature_run(resources=[readiness, *resources], **options)
    return readiness, run


@pytest.mark.behaviour(88)
def test_who_waits_for_a_grammar_is_passed_and_comes_back_in_order():
    requests = [request_of("0", "slow"), request_of("1", "quick"), request_of("2")]
    _, run = make(
        {"slow": follows(requests[0], polls=3), "quick": follows(requests[1], polls=3)},
        max_num_seqs=2,
    )
    for request in requests:
        run.add(request)
    run.step()
    assert run.plans == [{"2": 10}]
    assert run.scheduler.get_request_counts() == (1, 0, 2)
    run.step()
    run.add(request_of("3"))
    requests.append(request_of("3"))
    run.step()
    assert run.plans[1:] == [{"2": 1}, {"2": 1, "0": 10}]
    run.drain()
    assert list(run.finished) == ["2", "0", "1", "3"]
    for request in requests:
        assert run.outputs[request.request_id] == answer(request)


@pytest.mark.behaviour(88)
def test_a_grammar_is_compiled_while_its_request_waits_for_a_seat():
    requests = [request_of("0"), request_of("1", "slow")]
    _, run = make({"slow": follows(requests[1], polls=4)}, max_num_seqs=1)
    for request in requests:
        run.add(request)
    for _ in range(6):
        run.step()
    assert run.plans[5] == {"1": 10}, "not a step is lost"


@pytest.mark.behaviour(88)
def test_an_aborted_request_is_woken_by_nobody():
    request = request_of("0", "slow")
    readiness, run = make({"slow": follows(request, polls=3)})
    run.add(request)
    run.step()
    run.scheduler.finish_requests("0")
    for _ in range(4):
        run.step()
    assert not run.plans and not kept_by(readiness)


@pytest.mark.behaviour(89)
@pytest.mark.parametrize("polls", [1, 3])
def test_a_grammar_that_cannot_be_compiled_ends_one_request(polls):
    wrong, right = request_of("0", "wrong"), request_of("1", "right")
    _, run = make({"wrong": follows(wrong, polls, "( is never closed"), "right": follows(right, 1)})
    run.add(wrong)
    run.add(right)
    run.wait()
    assert run.finished == {"0": ("error", None), "1": ("length", None)}
    assert run.ends["0"].message == "the grammar cannot be used: ( is never closed"
    assert run.ends["0"].code == "invalid_grammar"
    assert run.outputs == {"0": [], "1": answer(right)}


@pytest.mark.behaviour(89)
def test_a_compiler_that_refuses_at_once_ends_one_request():
    _, run = make({})
    run.add(request_of("0", "nobody knows this"))
    run.add(request := request_of("1"))
    run.wait()
    assert run.finished["0"] == ("error", None) and run.outputs["1"] == answer(request)


class Lax(OneAnswer):
    """Its masks allow everything, as if the worker had not read them."""

    def fill(self, masks, drafts):
        masks[:] = -1


@pytest.mark.behaviour(90)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_token_that_the_grammar_refuses_ends_one_request(depth):
    requests = [request_of("0", "short"), request_of("1", "whole"), request_of("2")]
    _, run = make(
        {
            "short": lambda: Compiling(Lax(answer(requests[0])[:2]), 1),
            "whole": follows(requests[1], 1),
        },
        depth=depth,
    )
    for request in requests:
        run.add(request)
    run.drain()
    assert run.finished["0"] == ("error", None)
    token = answer(requests[0])[2]
    assert run.ends["0"].message == f"the grammar does not allow token {token} at output position 2"
    assert run.outputs["0"] == answer(requests[0])[:2]
    for request in requests[1:]:
        assert run.outputs[request.request_id] == answer(request)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_grammar_that_allows_nothing_more_ends_one_request(depth):
    requests = [request_of("0", "short"), request_of("1", "whole"), request_of("2")]
    _, run = make(
        {"short": follows(requests[0], 1, upto=2), "whole": follows(requests[1], 1)}, depth=depth
    )
    for request in requests:
        run.add(request)
    run.drain()
    assert "no token is left" in run.ends["0"].message
    assert run.ends["0"].code == "no_token_is_allowed"
    assert run.outputs["0"] == answer(requests[0])[:2]
    for request in requests[1:]:
        assert run.outputs[request.request_id] == answer(request)


@pytest.mark.behaviour(90)
def test_a_matcher_that_breaks_ends_one_request():
    class Broken:
        def num_allowed(self, tokens):
            raise RuntimeError("out of states")

        def fill(self, masks, drafts):
            masks[:] = -1

    requests = [request_of("0", "broken"), request_of("1", "whole")]
    _, run = make(
        {"broken": lambda: Compiling(Broken(), 1), "whole": follows(requests[1], 1)},
    )
    for request in requests:
        run.add(request)
    run.drain()
    assert run.ends["0"].message == "the grammar cannot be followed: out of states"
    assert run.outputs == {"0": [], "1": answer(requests[1])}
    assert not run.scheduler.guard.faults.messages


def test_a_matcher_that_gives_no_mask_ends_one_request():
    class Broken(OneAnswer):
        def fill(self, masks, drafts):
            raise RuntimeError("out of states")

    requests = [request_of("0", "broken"), request_of("1", "whole")]
    _, run = make(
        {"broken": lambda: Compiling(Broken([1]), 1), "whole": follows(requests[1], 1)},
    )
    for request in requests:
        run.add(request)
    run.drain()
    assert run.ends["0"].message == "the grammar cannot be followed: out of states"
    assert run.outputs == {"0": [], "1": answer(requests[1])}


def test_the_next_step_is_planned_before_the_mask_of_this_one_is_known():
    """A prompt's last chunk waits for nothing; nothing is launched behind a step without masks."""
    request = request_of("0", "its")
    _, run = make({"its": follows(request, 1)}, depth=2)
    run.add(request)
    run.add(request_of("1"))
    run.launch()
    run.settle()
    run.launch()
    assert run.plans == [{"0": 10, "1": 10}, {"0": 1, "1": 1}]
    run.drain()
    assert run.outputs["0"] == answer(request)


@pytest.mark.behaviour(87)
def test_drafts_are_cut_to_what_the_grammar_allows():
    """Right drafts pass, wrong ones are not even tried."""
    request = request_of("0", "its", num_output=9)
    readiness = GrammarReadiness(Compiler({"its": follows(request, 1)}), VOCAB_SIZE)
    drafts = WorkerDrafts(3, cut=readiness.num_allowed)
    run = make_feature_run(
        resources=[readiness, drafts], propose=lambda tokens: guess(tokens, 2, 3), num_drafts=3
    )
    run.add(request)
    run.drain()
    assert run.plans[1:4] == [{"0": 3}, {"0": 3}, {"0": 2}]
    assert drafts.stats.num_draft_tokens == drafts.stats.num_accepted_tokens == 5
    assert run.outputs["0"] == answer(request)


def test_drafts_that_break_a_matcher_are_no_fault_of_drafts():
    """What is wrong with one grammar must not cost all others their drafts."""

    class Broken(OneAnswer):
        def num_allowed(self, tokens):
            if len(tokens) > 1:  # drafts
                raise RuntimeError("out of states")
            return super().num_allowed(tokens)

    request = request_of("0", "broken", num_output=9)
    readiness = GrammarReadiness(
        Compiler({"broken": lambda: Compiling(Broken(answer(request)), 1)}), VOCAB_SIZE
    )
    drafts = Drafts(
        3,
        RightDrafts(),
        cut=readiness.num_allowed,
    )
    run = make_feature_run(resources=[readiness, drafts])
    run.add(request)
    run.drain()
    assert not run.scheduler.guard.faults.messages
    assert run.outputs["0"] == answer(request)


@pytest.mark.behaviour(90)
@pytest.mark.parametrize("depth", [1, 2])
def test_no_mask_is_made_where_what_is_drawn_ahead_is_allowed(depth):
    """The fake worker draws just what this grammar allows, and tells every other token ahead."""
    filled = []

    class Counting(OneAnswer):
        def fill(self, masks, drafts):
            filled.append(len(masks))
            super().fill(masks, drafts)

    request = request_of("0", "whole", num_output=60)
    right = Counting(answer(request))
    readiness, run = make({"whole": lambda: Compiling(right, 1)}, depth=depth)
    run.add(request)
    run.drain()
    assert run.outputs["0"] == answer(request)
    assert 10 < len(filled) < 50
    assert not kept_by(readiness)


@pytest.mark.behaviour(90)
def test_a_request_that_draws_what_is_not_allowed_is_tried_less_and_less():
    class Other(OneAnswer):
        """Allows one token, which is never what would be drawn."""

        def num_allowed(self, tokens):
            return sum(token == 9 for token in tokens)

        def advance(self, tokens):
            assert self.num_allowed(tokens) == len(tokens)

        def fill(self, masks, drafts):
            masks[:, 0] = 1 << 9

    request = request_of("0", "other", num_output=200)
    _, run = make({"other": lambda: Compiling(Other([]), 1)})
    asked = []
    preview = run.worker.preview

    def watched(ticket):
        found = preview(ticket)
        asked.append(int(found[0]) >= 0)
        return found

    run.worker.preview = watched
    run.add(request)
    run.drain()
    assert run.outputs["0"] == [9] * 200
    assert 5 < sum(asked) < 20 and len(asked) < 60

"""Drafts and masks in the worker: several tokens a row, each judged where it would stand."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import pytest
from support.one_bad import says
from support.simulate import make_request
from support.sum_model import CPU, GRAPHS, NAN, POISON, VOCAB, NoisyModel, make_run

from engine.messages.params import SamplingParams
from engine.messages.step import MaskPart, Masks
from engine.sched.resource import Resource
from engine.spec.decide import Drafts

modes = pytest.mark.parametrize("sizes", [CPU, GRAPHS], ids=["cpu", "graphs"])
depths = pytest.mark.parametrize("depth", [1, 3])
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class Guesses:
    """Right up to some place, wrong behind it, sometimes none at all."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.released: list[str] = []

    def propose(self, req, num_tokens):
        num = self.dice.randint(0, num_tokens)
        right = self.dice.randint(0, num)
        said = says(req.tokens.tolist(), num)
        return [token if place < right else (token + 1) % 40 for place, token in enumerate(said)]

    def release(self, req):
        self.released.append(req.request_id)


def run_with(drafts: Drafts | None, params: list[SamplingParams], **options):
    """What four requests are answered with these parameters."""
    resources = [] if drafts is None else [drafts]
    run = make_run(resources=resources, num_drafts=4, **options)
    for index, own in enumerate(params):
        prompt = [(7 * index + place) % 40 for place in range(3 + 2 * index)]
        run.add(make_request(str(index), prompt, own.max_tokens, params=own, seed=100 + index))
    run.drain()
    return run


@depths
@modes
def test_tokens_are_the_same_with_drafts_and_without(depth, sizes, seed):
    guesses = Guesses(random.Random(seed))
    drafts = Drafts(4, guesses)
    run = run_with(drafts, [GREEDY] * 4, depth=depth, sizes=sizes)
    for index in range(4):
        prompt = [(7 * index + place) % 40 for place in range(3 + 2 * index)]
        assert run.outputs[str(index)] == says(prompt, 12)
    assert drafts.stats.num_accepted_tokens > 0
    assert drafts.stats.num_draft_tokens > drafts.stats.num_accepted_tokens
    assert sorted(guesses.released) == ["0", "1", "2", "3"]


ASKED = {
    "seeded": SamplingParams(temperature=0.8, max_tokens=14, ignore_eos=True),
    "cut": SamplingParams(temperature=1.3, top_k=6, top_p=0.9, max_tokens=14, ignore_eos=True),
    "penalised": SamplingParams(
        temperature=0.7,
        repetition_penalty=1.4,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        max_tokens=14,
        ignore_eos=True,
    ),
    "edited": SamplingParams(
        temperature=0.9,
        logit_bias={3: 1.0},
        allowed_token_ids=list(range(1, 38)),
        min_tokens=6,
        stop_token_ids=[5],
        logprobs=2,
        max_tokens=14,
        ignore_eos=True,
    ),
}


@modes
@pytest.mark.parametrize("name", ASKED)
def test_whatever_a_request_asks_for_its_tokens_are_the_same(name, sizes, seed):
    """The noise is that of the position, and what was said before a draft counts for it."""
    asked = [ASKED[name]] * 4

    class Echo(Guesses):
        def propose(self, req, num_tokens):
            known = wanted[req.request_id]
            said = known[req.num_output : req.num_output + num_tokens]
            wrong = self.dice.randint(0, len(said))
            return [t if place < wrong else (t + 1) % 40 for place, t in enumerate(said)]

    plain = run_with(None, asked, model=NoisyModel(), sizes=sizes)
    wanted = plain.outputs
    drafts = Drafts(4, Echo(random.Random(seed)))
    run = run_with(drafts, asked, model=NoisyModel(), sizes=sizes)
    assert run.outputs == wanted
    assert drafts.stats.num_accepted_tokens > 8
    assert len(run.plans) < len(plain.plans)


def test_words_are_forbidden_behind_drafts_too():
    """The first half of a bad word is a draft; the other half must not follow it."""
    answer = says([1, 2, 3], 6)
    word = answer[2:4]

    class Right(Guesses):
        def propose(self, req, num_tokens):
            return answer[req.num_output : req.num_output + num_tokens]

    found = []
    for drafts in (None, Drafts(4, Right(random.Random(0)))):
        run = make_run(resources=[drafts] if drafts else [], num_drafts=4)
        run.add(make_request("a", [1, 2, 3], 6, params=GREEDY, bad_words_ids=[word]))
        run.drain()
        found.append(run.outputs["a"])
    assert found[0] == found[1] and found[0][:3] == answer[:3] and found[0][3] != answer[3]


def test_log_probabilities_come_for_every_accepted_token():
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=1)
    run = make_run(resources=[Drafts(3, Right())], num_drafts=3)
    run.add(make_request("a", [1, 2, 3], 9, params=params))
    entries = []
    while run.scheduler.has_unfinished_requests():
        plan = run.scheduler.schedule()
        for out in run.scheduler.update_from_output(plan, run.worker.execute(plan)).values():
            entries += out.logprobs.get(0, [])
    assert [entry.token_ids[0] for entry in entries] == says([1, 2, 3], 9)


class Right(Guesses):
    def __init__(self) -> None:
        super().__init__(random.Random(0))

    def propose(self, req, num_tokens):
        return says(req.tokens.tolist(), num_tokens)


@modes
def test_all_right_drafts_take_a_step_for_five_tokens(sizes):
    run = make_run(sizes=sizes, resources=[Drafts(4, Right())], num_drafts=4)
    run.add(make_request("a", [1, 2, 3], 21, params=GREEDY))
    run.drain()
    assert run.outputs["a"] == says([1, 2, 3], 21)
    assert [sum(plan.values()) for plan in run.plans if plan] == [3, 5, 5, 5, 5]


def test_one_bad_draft_among_many_rows_fails_its_request_alone():
    class Bad(Right):
        def propose(self, req, num_tokens):
            drafts = super().propose(req, num_tokens)
            return [POISON, *drafts[1:]] if req.request_id == "2" else drafts

    run = make_run(resources=[Drafts(3, Bad())], num_drafts=3)
    for index in range(5):
        run.add(make_request(str(index), [index + 1, 2], 9, params=GREEDY))
    run.drain()
    for index in range(5):
        if index == 2:
            assert run.finished["2"][0] == "error"
        else:
            assert run.outputs[str(index)] == says([index + 1, 2], 9)


@modes
@pytest.mark.parametrize("wrong", [False, True])
def test_a_request_does_not_fail_for_a_draft_that_does_not_stand(sizes, wrong):
    """Behind NAN the model says NaN. It is never said, so nothing is wrong with the request; where
    its logits are edited the same holds."""

    class Bad(Right):
        def propose(self, req, num_tokens):
            drafts = super().propose(req, num_tokens)
            return [*drafts[:1], NAN, *drafts[2:]] if wrong else drafts

    params = [GREEDY, SamplingParams(temperature=0, max_tokens=12, logit_bias={45: 1.0})]
    run = run_with(Drafts(3, Bad()), params, sizes=sizes)
    for index in range(2):
        prompt = [(7 * index + place) % 40 for place in range(3 + 2 * index)]
        assert run.outputs[str(index)] == says(prompt, 12)
        assert run.finished[str(index)][0] == "length"


class UpTo(Resource):
    """Behind the end of an answer a grammar allows nothing."""

    name = "up to"
    needs = ("masks",)

    def __init__(self, end):
        self.end = end

    def attach(self, scheduler):
        self.roster = scheduler.roster

    def describe(self, plan):
        plan.masks = MaskPart(np.flatnonzero(plan.samples).astype(np.int32))

    def masks(self, plan):
        by_row = [[]] * len(plan.rows) if plan.drafts is None else plan.drafts.by_row()
        words = []
        for index in plan.masks.rows.tolist():
            known = self.roster.by_row[int(plan.rows[index])].tokens.tolist()
            for num in range(1 + len(by_row[index])):
                words += [0, 0] if self.end in [*known, *by_row[index][:num]] else [-1, 255]
        return Masks(np.array(words, dtype=np.int32), 2)


@modes
@pytest.mark.parametrize("place", range(5))
def test_tokens_before_the_end_of_a_grammar_stand(sizes, place):
    """Drafts go on behind the stop token, where its masks allow nothing."""
    answer = says([1, 2, 3], 12)
    end = answer[place]
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[end])
    for resources in ([], [Drafts(4, Right())]):
        run = make_run(resources=[UpTo(end), *resources], num_drafts=4, sizes=sizes)
        run.add(make_request("a", [1, 2, 3], 12, params=params))
        run.drain()
        assert run.outputs["a"] == answer[: place + 1]
        assert run.finished["a"] == ("stop", end)


@modes
def test_a_request_that_fails_behind_drafts_has_said_what_it_says_without(sizes):
    """Masks forbid everything from the fourth token on: three are said, and then it fails."""
    answer = says([1, 2, 3], 12)
    params = SamplingParams(temperature=0, max_tokens=12)
    told = []
    for resources in ([], [Drafts(4, Right())]):
        run = make_run(resources=[UpTo(answer[2]), *resources], num_drafts=4, sizes=sizes)
        run.add(make_request("a", [1, 2, 3], 12, params=params))
        run.drain()
        told.append((run.outputs["a"], run.finished["a"][0], run.ends["a"].message))
    assert told[0] == told[1]
    assert told[0][:2] == (answer[:3], "error") and "no token is left" in told[0][2]


@modes
def test_a_draft_that_is_no_token_is_never_right(sizes):
    class Junk(Right):
        def propose(self, req, num_tokens):
            drafts = super().propose(req, num_tokens)
            return [*drafts[:1], 10**6, *drafts[2:]]

    drafts = Drafts(3, Junk())
    run = make_run(resources=[drafts], num_drafts=3, sizes=sizes)
    run.add(make_request("a", [1, 2], 9, params=GREEDY))
    run.drain()
    assert run.outputs["a"] == says([1, 2], 9) and drafts.stats.num_accepted_tokens > 0


def test_a_step_that_waits_for_masks_and_has_failed_is_not_run_again_as_a_whole():
    run = make_run(resources=[UpTo(39)])
    model = run.worker.runner.machine.model
    for index in range(2):
        run.add(make_request(str(index), [POISON if index else 3, 2], 1, params=GREEDY))
    run.drain()
    assert run.finished["1"][0] == "error" and "bad token 40" in run.ends["1"].message
    assert run.finished["0"][0] == "length"
    assert model.calls == 3


def test_waiting_for_masks_is_no_time_of_the_device():
    class Slow(UpTo):
        def masks(self, plan):
            clock.now += 1e6
            return super().masks(plan)

    class Clock:
        now = 0.0

    class TickingMark(NamedTuple):
        at: float

        def elapsed_time(self, later):
            return later.at - self.at

        def synchronize(self):
            pass

    def mark():
        clock.now += 1.0
        return TickingMark(clock.now)

    clock = Clock()
    run = make_run(resources=[Slow(39)])
    run.worker.runner.machine.platform.mark = mark
    run.add(make_request("a", [3, 2], 3, params=GREEDY))
    seconds, collect = [], run.worker.collect
    run.worker.collect = lambda ticket: seconds.append(collect(ticket)) or seconds[-1]
    run.drain()
    assert all(0 < result.seconds < 1 for result in seconds)


class Evens(Resource):
    """The outputs of requests with a grammar are even, or below 20 where it says "low"."""

    name = "evens"
    needs = ("masks",)

    def attach(self, scheduler):
        self.roster = scheduler.roster

    def watches(self, req):
        return False

    def describe(self, plan):
        self.rows = [
            (index, self.roster.by_row[row].add.grammar)
            for index, row in enumerate(plan.rows.tolist())
            if plan.samples[index] and self.roster.by_row[row].add.grammar
        ]
        if self.rows:
            plan.masks = MaskPart(np.array([index for index, _ in self.rows], dtype=np.int32))

    def masks(self, plan):
        by_row = [[]] * len(plan.rows) if plan.drafts is None else plan.drafts.by_row()
        words = [
            word
            for index, kind in self.rows
            for _ in range(1 + len(by_row[index]))
            for word in self.words(kind)
        ]
        return Masks(np.array(words, dtype=np.int32), 2)

    @staticmethod
    def words(kind):
        if kind == "low":
            return [(1 << 20) - 1, 0]
        return [0x55555555, 0x55555555 & ((1 << VOCAB - 32) - 1)]


@depths
@modes
@pytest.mark.parametrize("with_drafts", [False, True])
def test_tokens_are_drawn_among_those_that_masks_allow(depth, sizes, with_drafts, seed):
    resources = [Evens()]
    if with_drafts:
        resources.append(Drafts(3, Guesses(random.Random(seed))))
    run = make_run(depth, sizes, model=NoisyModel(), resources=resources, num_drafts=3)
    kinds = [None, "even", "low", "even", None]
    for index, kind in enumerate(kinds):
        params = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)
        run.add(make_request(str(index), [index, 1], 10, params=params, grammar=kind, seed=index))
    run.drain()
    alone = make_run(model=NoisyModel())
    for index, kind in enumerate(kinds):
        tokens = run.outputs[str(index)]
        assert len(tokens) == 10
        if kind is None:
            params = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)
            alone.add(make_request(str(index), [index, 1], 10, params=params, seed=index))
            alone.drain()
            assert tokens == alone.outputs[str(index)]
        elif kind == "even":
            assert all(token % 2 == 0 for token in tokens) and len(set(tokens)) > 2
        else:
            assert all(token < 20 for token in tokens) and len(set(tokens)) > 2


@depths
@modes
def test_a_step_that_waits_for_masks_fails_only_who_is_to_blame(depth, sizes):
    run = make_run(depth, sizes, resources=[Evens()])
    for index in range(4):
        prompt = [POISON if index == 2 else index + 1, 2]
        run.add(make_request(str(index), prompt, 5, params=GREEDY, grammar="even"))
    run.drain()
    assert run.finished["2"][0] == "error"
    for index in (0, 1, 3):
        assert run.finished[str(index)][0] == "length"
        assert all(token % 2 == 0 for token in run.outputs[str(index)])


@modes
@pytest.mark.parametrize("given", ["none", "too few"])
def test_rows_whose_masks_do_not_come_fail_and_others_go_on(sizes, given, caplog):
    class Late(Evens):
        def masks(self, plan):
            masks = super().masks(plan)
            return None if given == "none" else Masks(masks.words[:-2], 2)

    run = make_run(1, sizes, resources=[Late()])
    run.add(make_request("a", [1, 2], 5, params=GREEDY, grammar="even"))
    run.add(make_request("b", [3, 4], 5, params=GREEDY))
    run.drain()
    assert run.finished["a"][0] == "error" and "no token is left" in run.ends["a"].message
    assert run.outputs["b"] == says([3, 4], 5)


class Ahead(Resource):
    """Finds that all tokens that are drawn ahead of masks are allowed."""

    name = "ahead"
    needs = ("masks",)

    def __init__(self):
        self.drawn = []

    def describe(self, plan):
        rows = np.flatnonzero(plan.samples).astype(np.int32)
        plan.masks = MaskPart(rows, rows)

    def masks(self, plan):
        self.drawn.append(plan.masks.drawn.tolist())
        none = np.zeros(0, dtype=np.int32)
        return Masks(none, 2, none)


def test_a_token_that_was_drawn_ahead_stands_when_its_step_is_run_again():
    """In another batch the logits may be others."""
    params = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True)
    told = []
    for breaks in (False, True):
        ahead = Ahead()
        run = make_run(model=NoisyModel(), resources=[ahead])
        sampler = run.worker.runner.machine.sampler
        prepare, seen = sampler.prepare, []

        def changing(rows, draws, *masks, prepare=prepare, seen=seen, **options):
            if len(draws.rows) == 3:
                seen.append(len(draws.rows))
                raise MemoryError("too many rows")
            rows.logits.mul_(-1.0)
            return prepare(rows, draws, *masks, **options)

        if breaks:
            sampler.prepare = changing
        for index in range(3):
            run.add(make_request(str(index), [index, 1], 6, params=params, seed=index))
        run.drain()
        assert bool(seen) == breaks and min(map(min, ahead.drawn)) >= 0
        told.append([run.outputs[str(index)] for index in range(3)])
    assert told[0] == told[1]

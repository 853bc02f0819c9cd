"""A draft model in the worker: what it guesses, what it keeps, and what it may not change."""

from __future__ import annotations

import random
from collections import deque
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from support.one_bad import says
from support.simulate import make_request
from support.sum_model import (
    CPU,
    EAGER,
    GRAPHS,
    LONGEST,
    NoisyModel,
    SumModel,
    make_run,
)

from engine.config.model import ModelConfig, ModelInfo
from engine.messages.params import SamplingParams
from engine.messages.step import DraftPart, StepPlan
from engine.spec.compute import DraftModel
from engine.spec.kept import DraftWork, KeptDrafts, KeptStates
from engine.spec.worker_drafts import WorkerDrafts

modes = pytest.mark.parametrize("sizes", [CPU, GRAPHS], ids=["cpu", "graphs"])
depths = pytest.mark.parametrize("depth", [1, 2])
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
K = 4


class DraftingSum(SumModel):
    """The same model with a cache of its own, of which nothing is there that was not written."""

    def __init__(self, wrong_every=0):
        super().__init__()
        self.wrong_every = wrong_every
        self.cleared = None

    def lower_layers(self, batch, kv):
        if self.cleared is not kv[0]:
            kv[0].fill_(torch.nan)
            kv[0][0], self.cleared = 0, kv[0]
        return super().lower_layers(batch, kv)

    def logits(self, hidden, out=None):
        logits = super().logits(hidden, out)
        if self.wrong_every:
            for row, total in enumerate(hidden[:, 0].nan_to_num()):
                if int(total) % self.wrong_every == 0:
                    logits[row, (int(total) + 1) % 40] = 9.0
        return logits


class Drafting(DraftModel):
    """Drafts with such a model; some may be spoiled, some withheld."""

    def __init__(self, config, model, longest=LONGEST):
        info = ModelInfo(
            path=Path("d"),
            architecture="",
            model_type="",
            hf={"max_position_embeddings": longest},
        )
        super().__init__(ModelConfig(model="d"), info, config, K)
        self.model = model
        self.dice: random.Random | None = None
        self.num_right: dict[int, int] = {}

    def load(self, machine):
        return self.model

    def report(self, result):
        super().report(result)
        part, dice = result.drafts, self.dice
        if part is None or dice is None:
            return
        rows = part.by_row()
        for row in rows:
            if row:
                place = dice.randrange(len(row))
                row[place] = (row[place] + 1) % 40
        tokens = [token for row in rows for token in row]
        result.drafts = DraftPart(part.counts, np.array(tokens, dtype=np.int32))


class Whims(WorkerDrafts):
    """Wants drafts or not, as it likes."""

    def __init__(self, dice):
        super().__init__(K)
        self.dice = dice

    def wanted(self, plan):
        wished = super().wanted(plan)
        if wished is None:
            return None
        return self.dice.choice([None, wished * 0, wished, wished // 2])


def run_with(drafts, model=None, dice=None, longest=LONGEST, target=None, **options):
    made = deque()

    def make(config):
        made.append(Drafting(config, model or DraftingSum(), longest))
        made[-1].dice = dice
        return made[-1]

    return make_run(resources=[drafts], num_drafts=K, make_feature=make, model=target, **options)


@depths
@modes
def test_a_draft_model_that_is_the_model_is_always_right(depth, sizes):
    drafts = WorkerDrafts(K)
    run = run_with(drafts, depth=depth, sizes=sizes)
    for index in range(4):
        run.add(make_request(str(index), [7 * index + 1, 2, 3], 12, params=GREEDY))
    run.drain()
    for index in range(4):
        assert run.outputs[str(index)] == says([7 * index + 1, 2, 3], 12)
    assert drafts.stats.num_accepted_tokens == drafts.stats.num_draft_tokens >= 4 * 8
    assert len(run.plans) <= 4 + 2 * depth


SITUATIONS = {
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "prefix hits": {"num_blocks": 80},
    "preempted": {"num_blocks": 18, "watermark": 0.0},
    "preempted, nothing cached": {"num_blocks": 18, "watermark": 0.0, "caching": False},
}


@depths
@modes
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("spoiled", [False, True])
def test_it_is_right_wherever_the_model_has_been(depth, sizes, situation, spoiled, seed):
    """Behind chunks, hits, preemptions and, spoiled, behind what was rejected."""
    dice = random.Random(seed)
    drafts = WorkerDrafts(K)
    options = {"max_num_seqs": 5, "max_num_batched_tokens": 40, **SITUATIONS[situation]}
    run = run_with(drafts, dice=dice if spoiled else None, depth=depth, sizes=sizes, **options)
    shared = [dice.randrange(40) for _ in range(30)]
    prompts = {}
    for index in range(14):
        prompt = [*shared[: dice.randrange(30)], dice.randrange(40)]
        num = dice.randint(1, 30)
        prompts[str(index)] = (prompt, num)
        own = SamplingParams(temperature=0, max_tokens=num, ignore_eos=True)
        run.add(make_request(str(index), prompt, num, params=own))
        for _ in range(dice.randrange(3)):
            run.step()
    run.drain()
    for name, (prompt, num) in prompts.items():
        assert run.outputs[name] == says(prompt, num), name
    stats = drafts.stats
    if not spoiled:
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
    else:
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    if situation.startswith("preempted"):
        assert run.scheduler.make_stats().num_preemptions > 0


@depths
@modes
def test_it_catches_up_where_it_was_not_asked(depth, sizes, seed):
    dice = random.Random(seed)
    drafts = Whims(dice)
    sizes_of_run = {"max_num_seqs": 5, "max_num_batched_tokens": 30, "num_blocks": 60}
    run = run_with(drafts, depth=depth, sizes=sizes, **sizes_of_run)
    shared = [dice.randrange(40) for _ in range(30)]
    prompts = {str(i): [*shared[: dice.randrange(30)], i] for i in range(12)}
    for name, prompt in prompts.items():
        own = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        run.add(make_request(name, prompt, 20, params=own))
        run.step()
    run.drain()
    for name, prompt in prompts.items():
        assert run.outputs[name] == says(prompt, 20), name
    assert drafts.stats.num_accepted_tokens == drafts.stats.num_draft_tokens > 0


class NoisySum(DraftingSum):
    """Many tokens are likely."""

    logits = NoisyModel.logits


@depths
@modes
def test_what_is_drawn_by_chance_is_guessed_with_the_same_chance(depth, sizes):
    """The same model with the same noise draws the same token, so every draft is right."""
    params = {
        "seeded": SamplingParams(temperature=0.8, max_tokens=14, ignore_eos=True),
        "cut": SamplingParams(
            temperature=1.3, top_k=9, top_p=0.8, min_p=0.02, max_tokens=14, ignore_eos=True
        ),
        "cold": SamplingParams(temperature=0, max_tokens=14, ignore_eos=True),
    }
    told = []
    for drafts in (None, WorkerDrafts(K)):
        if drafts is None:
            run = make_run(depth=depth, sizes=sizes, model=NoisySum())
        else:
            run = run_with(drafts, NoisySum(), depth=depth, sizes=sizes, target=NoisySum())
        for index, (name, own) in enumerate(params.items()):
            run.add(make_request(name, [index + 1, 5, 7], 14, params=own, seed=100 + index))
        run.drain()
        told.append(run.outputs)
    assert told[0] == told[1]
    assert drafts.stats.num_accepted_tokens == drafts.stats.num_draft_tokens > 20


@modes
def test_a_shorter_draft_model_drafts_as_far_as_it_reaches(sizes):
    drafts = WorkerDrafts(K)
    model = DraftingSum()
    reached = []
    forward = model.forward

    def watched(batch, kv):
        reached.append(int(batch.positions.max()))
        return forward(batch, kv)

    model.forward = watched
    run = run_with(drafts, model, longest=20, sizes=sizes)
    run.add(make_request("a", [1, 2, 3], 40, params=GREEDY))
    run.drain()
    assert run.outputs["a"] == says([1, 2, 3], 40)
    assert (
        max(reached) < 20 and drafts.stats.num_accepted_tokens == drafts.stats.num_draft_tokens >= 8
    )


@modes
def test_a_draft_model_that_raises_takes_only_its_drafts_with_it(sizes):
    model = DraftingSum()
    forward = model.forward

    def failing(batch, kv):
        if model.calls > 3:
            raise RuntimeError("no more")
        return forward(batch, kv)

    run = run_with(WorkerDrafts(K), model, sizes=EAGER if sizes is GRAPHS else sizes)
    model.forward = failing
    run.add(make_request("a", [1, 2, 3], 12, params=GREEDY))
    run.drain()
    assert run.outputs["a"] == says([1, 2, 3], 12)


@modes
@pytest.mark.parametrize("call", (1, 2, 5, 6, 9, 29, 30))
def test_behind_a_pass_that_failed_it_computes_again_what_is_missing(sizes, call):
    """One failure costs the drafts of its step and none later."""
    model, drafts, calls = DraftingSum(), WorkerDrafts(K), count(1)
    forward = model.forward

    def failing(batch, kv):
        if next(calls) == call:
            raise RuntimeError("once")
        return forward(batch, kv)

    run = run_with(drafts, model, sizes=EAGER if sizes is GRAPHS else sizes)
    model.forward = failing
    for name in "ab":  # the second one finds the first one's prompt
        run.add(make_request(name, [1, 2, 3, 4, 5, 6, 7, 8, 9], 30, params=GREEDY))
        run.drain()
        assert run.outputs[name] == says([1, 2, 3, 4, 5, 6, 7, 8, 9], 30)
    assert next(calls) > call
    assert drafts.stats.num_accepted_tokens == drafts.stats.num_draft_tokens
    assert len([plan for plan in run.plans if plan]) <= 2 * (1 + 30 // (K + 1)) + 1


def step_of(starts, count):
    """A plan of one row, in slot 0, within one block."""
    one = np.array([starts], dtype=np.int32)
    none = np.empty(0, dtype=np.int32)
    columns = (one * 0, one * 0, one, one * 0 + count, one * 0 + 1)
    return StepPlan(0, np.zeros(1, np.intp), *columns, [], none, none, none, [], count)


def test_drafts_that_did_not_stand_are_computed_again_though_none_was_wanted_meanwhile():
    """A grammar may force other drafts than those of the draft model, which stand then."""
    kept, wanted = KeptDrafts(1, 8, LONGEST, 8, KeptStates(1, 0)), np.array([K], dtype=np.int32)
    kept.begin(step_of(0, 5))
    plan = step_of(5, 5)  # a token and four drafts, of which none stands
    kept.begin(plan)
    rows = DraftWork(plan.slots, plan.starts, plan.counts, wanted, plan.starts + 1)
    work = kept.work(rows, LONGEST, 100)
    assert (work.starts.tolist(), work.counts.tolist()) == ([0], [11])
    kept.computed(work)
    kept.begin(step_of(6, 3))  # no draft is wanted behind this step, whose drafts were others
    plan = step_of(9, 1)
    kept.begin(plan)
    work = kept.work(
        DraftWork(plan.slots, plan.starts, plan.counts, wanted, plan.starts), LONGEST, 100
    )
    assert (work.starts.tolist(), work.counts.tolist()) == ([6], [5])


@modes
@pytest.mark.parametrize("longest", [LONGEST, 32])
def test_no_row_goes_beyond_the_limit_with_one_that_wants_more(sizes, longest):
    """Rows draft together, and each as far as the one that wants most."""
    model, reached = DraftingSum(), []
    forward = model.forward

    def watched(batch, kv):
        reached.append(int(batch.positions.max()))
        return forward(batch, kv)

    model.forward = watched
    run = run_with(WorkerDrafts(K), model, longest=longest, sizes=sizes, num_blocks=200)
    prompts = [[3] * num for num in range(longest - 9, longest - 1)] + [
        [place] for place in range(8)
    ]
    for index, prompt in enumerate(prompts):
        num = min(20, LONGEST - len(prompt))
        own = SamplingParams(temperature=0, max_tokens=num, ignore_eos=True)
        run.add(make_request(str(index), prompt, num, params=own))
    run.drain()
    for index, prompt in enumerate(prompts):
        assert run.outputs[str(index)] == says(prompt, min(20, LONGEST - len(prompt)))
    assert max(reached) < longest


@depths
@modes
def test_a_plan_that_it_cannot_take_fails_its_step_and_no_later_one(depth, sizes):
    drafts = WorkerDrafts(K)
    run = run_with(drafts, depth=depth, sizes=sizes)
    (feature,) = run.worker.runner.machine.features
    begin, calls = feature.begin, count(1)

    def failing(plan, live):
        begin(plan, live)
        if next(calls) == 3:
            raise RuntimeError("no room")

    feature.begin = failing
    prompts = {"a": [1, 2, 3], "b": [4, 5, 6]}
    for name, prompt in prompts.items():
        run.add(make_request(name, prompt, 12, params=GREEDY))
        run.drain()
    assert run.finished["a"] == ("error", None)
    assert run.outputs["b"] == says([4, 5, 6], 12)
    assert drafts.stats.num_accepted_tokens == drafts.stats.num_draft_tokens > 8


@modes
def test_blocks_that_drafts_filled_are_found_again(sizes):
    """A second turn goes through the draft model from where the first ended."""
    model, computed = DraftingSum(), []
    forward = model.forward

    def counting(batch, kv):
        computed.append(int((batch.attn[0].slots >= 0).sum()))
        return forward(batch, kv)

    model.forward = counting
    run = run_with(WorkerDrafts(K), model, sizes=EAGER if sizes is GRAPHS else sizes)
    own = SamplingParams(temperature=0, max_tokens=41, ignore_eos=True)
    run.add(make_request("a", [1, 2, 3], 41, params=own))
    run.drain()
    computed.clear()
    text = [1, 2, 3, *run.outputs["a"]]
    run.add(make_request("b", text, 5, params=GREEDY))
    run.drain()
    assert max(computed) <= 12, "44 tokens are known already, but for the last block"

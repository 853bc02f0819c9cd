"""All features at once, at random: everybody ends, with the right tokens, and nothing is left."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from support.data_plane import (
    Compiler,
    Compiling,
    OneAnswer,
    answer,
    guess,
    kept_by,
    make_feature_run,
    tiers_of,
)
from support.simulate import VOCAB_SIZE, make_request

from engine.errors import RequestError
from engine.kv_transfer.tiers import Tiers
from engine.lora.decide import AdapterSlots
from engine.messages.requests import AddRequest, MediaItem
from engine.mm.decide import EncoderBudget
from engine.spec.decide import Drafts
from engine.spec.worker_drafts import WorkerDrafts
from engine.structured.decide import GrammarReadiness
from examples.resources.ready import BlockAlignment, PipelineCadence, PrefillGate
from policylab.verify.tiers import FakeCopies

LONGEST = 20  # tokens of a prompt, and of an output
LONGEST_ITEM = 6
STORES = ("plain", "slow", "lossy", "dying", "liar")


@dataclass
class Features:
    """One resource of each kind."""

    adapters: AdapterSlots
    encoder: EncoderBudget
    drafts: Drafts
    grammars: GrammarReadiness
    tiers: Tiers
    gate: PrefillGate

    def check(self, running) -> None:
        adapters = {req.adapter for req in running if req.adapter is not None}
        assert len(adapters) <= self.adapters.max_loras
        assert self.encoder.cache.num_used <= self.encoder.cache.num_tokens

    def check_empty(self) -> None:
        """No request is left, and nothing is kept but adapters that may be used again."""
        assert not self.encoder.cache.num_used
        for resource in vars(self).values():
            assert kept_by(resource).keys() <= {"slot_of", "_counts", "_fresh"}, resource


def make(rng: random.Random, depth: int, grammars: dict):
    k = rng.choice([0, 1, 3])
    stores = FakeCopies([rng.choice(STORES)], 20, rng.randrange(1000))
    readiness = GrammarReadiness(Compiler(grammars), VOCAB_SIZE)
    seats = rng.randint(1, 8)
    budget = rng.randint(max(seats, LONGEST_ITEM), 30)
    whole, aligned = rng.choice([(False, False), (True, False), (False, True)])
    # Pieces that end at multiples may have to read several items at once.
    cache = rng.randint(4 * LONGEST_ITEM if aligned else LONGEST_ITEM, 30)
    features = Features(
        AdapterSlots(rng.randint(1, 3)),
        EncoderBudget(
            cache if aligned else rng.randint(LONGEST_ITEM, 12), cache, whole_media=whole
        ),
        WorkerDrafts(k, cut=readiness.num_allowed),
        readiness,
        tiers_of(stores),
        PrefillGate(),
    )
    resources = list(vars(features).values())
    if rng.random() < 0.3:
        resources.append(PipelineCadence())
    if aligned:
        resources.append(BlockAlignment(rng.choice([2, 4])))
    rng.shuffle(resources)
    size = rng.choice([1, 2, 4])
    run = make_feature_run(
        depth=depth,
        resources=resources,
        propose=lambda tokens: guess(tokens, rng.randint(0, k), rng.randint(0, k + 1)),
        stores=stores,
        cache_size=cache,
        num_drafts=k,
        num_blocks=rng.randint(42, 90) // size + 2,
        block_size=size,
        caching=rng.random() < 0.7,
        policy=rng.choice(["fcfs", "priority"]),
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        max_model_len=2 * LONGEST + 1,
    )
    return features, run


def draw_media(rng: random.Random, num_prompt: int) -> list[MediaItem]:
    media, offset = [], rng.randint(0, 4)
    while offset < num_prompt and rng.random() < 0.5:
        length = min(rng.randint(1, LONGEST_ITEM), num_prompt - offset)
        media.append(MediaItem(offset, length, f"{length} tokens, {rng.randint(0, 2)}"))
        offset += length + rng.randint(0, 3)
    return media


def draw_request(rng: random.Random, name: str, shared: list[int], grammars: dict) -> AddRequest:
    num_prompt = rng.randint(1, LONGEST)
    common = rng.randint(0, num_prompt)
    prompt = shared[:common] + [rng.randrange(1000) for _ in range(num_prompt - common)]
    params = {"max_load_tokens": rng.randint(0, num_prompt)} if rng.random() < 0.1 else None
    request = make_request(
        name,
        prompt,
        rng.randint(1, LONGEST),
        priority=rng.randint(-1, 1),
        adapter=rng.choice([None, None, "A", "B", "C"]),
        media=draw_media(rng, num_prompt),
        grammar=name if rng.random() < 0.3 else None,
        kv_transfer_params=params,
        client_index=rng.randint(0, 1),
    )
    if request.grammar is not None:
        right = answer(request)
        upto = rng.choice([None, None, rng.randint(0, len(right))])
        error = "wrong" if rng.random() < 0.2 else ""
        polls = rng.randint(1, 6)
        grammars[name] = lambda: Compiling(OneAnswer(right[:upto]), polls, error)
    return request


def drive(rng: random.Random, run, features: Features, requests, abort_rate: float) -> set[str]:
    """Add the requests over time, abort some, throttle now and then. Returns the ids aborted."""
    scheduler, todo, aborted = run.scheduler, list(requests), set()
    for _ in range(4000):
        while todo and rng.random() < 0.4:
            try:
                run.add(request := todo.pop(0))
            except RequestError:  # too large for this pool
                requests.remove(request)
        if rng.random() < abort_rate and run.outputs:
            for req in scheduler.finish_requests(rng.choice(sorted(run.outputs))):
                aborted.add(req.request_id)
                run.finished[req.request_id] = ("abort", None)
        features.gate.throttled = rng.random() < 0.3
        run.step()
        features.check(scheduler.roster.running)
        if not (todo or run.flight or scheduler.has_requests() or scheduler.is_transferring):
            break
    else:
        stuck = [repr(req) for req in scheduler.roster.by_id.values()]
        raise AssertionError(f"no end: {stuck}, loading {scheduler.kv.promotions}")
    run.drain()
    return aborted


def check_end(run, request: AddRequest) -> None:
    """The right tokens, or an error that was to be expected and the right ones before it."""
    name, right = request.request_id, answer(request)
    out, (reason, _) = run.outputs[name], run.finished[name]
    if reason == "error":
        message = run.ends[name].message
        assert request.grammar is not None and "grammar" in message, message
    assert out == (right if reason == "length" else right[: len(out)])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_all_features_at_once(depth):
    num_preempted = num_loads = num_accepted_tokens = 0
    for seed in range(1000 * depth, 1000 * depth + 20):
        print(f"seed {seed}")
        rng = random.Random(seed)
        grammars: dict = {}
        shared = [rng.randrange(1000) for _ in range(LONGEST)]
        requests = [draw_request(rng, str(i), shared, grammars) for i in range(25)]
        features, run = make(rng, depth, grammars)
        aborted = drive(rng, run, features, requests, 0.05 if seed % 2 else 0.0)
        features.check_empty()
        assert not run.scheduler.guard.faults.messages
        for request in requests:
            if request.request_id not in aborted:
                check_end(run, request)
        num_preempted += run.scheduler.settler.counters.num_preemptions
        num_loads += features.tiers.counters().get("loads", 0)
        num_accepted_tokens += features.drafts.stats.num_accepted_tokens
    assert num_preempted > 50 and num_loads > 50 and num_accepted_tokens > 50

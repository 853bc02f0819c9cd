"""Snapshot policies decide which snapshots of recurrent states are taken and which are dropped."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from support.simulate import Run, expected, make_request, make_run

from engine.config.cache import CacheConfig
from engine.errors import ConfigError, PolicyError
from engine.kv.snapshots import KeptSnapshot
from engine.sched.predict.cost import PRIOR
from engine.states.policies import ByCost, Interval, Marconi, find_snapshot_policy
from engine.states.policy import SnapshotPolicy, Take

PROMPT = [(7 * k) % 991 for k in range(3000)]
OTHER = [(11 * k + 5) % 983 for k in range(3000)]


def serve(run: Run, name: str, prompt: list[int], max_tokens: int = 4) -> int:
    """Serve one request alone, check its tokens, and return how many came from the cache."""
    run.add(make_request(name, prompt, max_tokens))
    run.drain()
    assert run.outputs[name] == expected(prompt, max_tokens)
    return run.starts[name][0].num_cached_tokens


def continued(prompt: list[int], num_output: int, num_new: int) -> list[int]:
    """The prompt of a next turn: a prompt, its answer, and new tokens."""
    return [*prompt, *expected(prompt, num_output), *OTHER[:num_new]]


# -- the default


def test_snapshots_within_a_conversation_are_dropped_once_blocks_are_worth_something():
    """A pool half full of other content makes room; snapshots of an almost empty one all stay."""
    numbers = {}
    for num_blocks in (100, 1000):
        run = make_run(snapshot_blocks=1, num_blocks=num_blocks)
        prompt = PROMPT[:100]
        for turn in range(8):
            hit = serve(run, str(turn), prompt, 40)
            assert turn == 0 or hit == (len(prompt) - 21) // 16 * 16
            prompt = continued(prompt, 40, 20)
        numbers[num_blocks] = run.scheduler.make_stats().num_snapshots
    assert numbers[100] < numbers[1000] / 2


def test_a_dropped_snapshot_that_was_needed_stays_from_then_on():
    run = make_run(snapshot_blocks=1, num_blocks=70)
    serve(run, "fills most of the pool", OTHER[:700])
    for turn in range(3):
        serve(run, str(turn), PROMPT[:160], 40)
        serve(run, f"next {turn}", continued(PROMPT[:160], 40, 8), 40)
    assert serve(run, "again", PROMPT[:160]) == 144


def test_a_shared_beginning_outlives_the_requests_that_share_it():
    """Its snapshot stays as long as its KV, which each request uses."""
    run = make_run(snapshot_blocks=4, num_blocks=120)
    hits = []
    for k in range(20):
        prompt = PROMPT[:512] + [1000 + k] * 80
        hits.append(serve(run, f"{k}", prompt, 40))
        hits.append(serve(run, f"{k} again", continued(prompt, 40, 40), 4))
    assert all(hits[3:]) and hits[4::2] == [512] * 18


def test_snapshots_that_cost_more_than_they_save_are_not_taken():
    """Copies of large states are dearer than computing the tokens of a block again."""
    many = math.ceil(PRIOR[2] / PRIOR[3] / 2)  # blocks that are copied in the time of 16 tokens
    counts = []
    for size in (1, 3 * many):
        run = make_run(snapshot_blocks=size, num_blocks=10 * many)
        serve(run, "a", PROMPT[:100], 30)
        counts.append(run.scheduler.make_stats().counters["snapshots.published"])
    assert counts[1] == 1 < counts[0]


# -- published policies


def test_marconi_keeps_ends_of_requests_and_branches():
    run = make_run(snapshot_blocks=2, snapshot_policy="marconi")
    assert [serve(run, name, PROMPT[:544], 20) for name in "abc"] == [0, 0, 528]
    assert serve(run, "d", continued(PROMPT[:544], 20, 30)) == 560
    prompts = [OTHER[:512] + PROMPT[32 * k : 32 * k + 32] for k in range(4)]
    assert [serve(run, f"e{k}", prompt) for k, prompt in enumerate(prompts)] == [0, 0, 512, 512]


@pytest.mark.parametrize(("alpha", "dropped"), [(0.0, [10, 20]), (100.0, [20, 30])])
def test_marconi_drops_the_oldest_or_what_saves_least_for_its_blocks(alpha, dropped):
    """The snapshot that several requests have used stays with any ``alpha``."""
    kept = [
        KeptSnapshot(b"long", 640, num_saved=640, last_used=10.0),
        KeptSnapshot(b"short", 32, num_saved=32, last_used=20.0),
        KeptSnapshot(b"short too", 64, num_saved=64, last_used=30.0),
        KeptSnapshot(b"shared", 16, num_saved=16, last_used=5.0, num_uses=2),
    ]
    view = SimpleNamespace(
        is_pool_full=True,
        kept=kept,
        num_blocks=4,
        block_size=16,
        compute_seconds=lambda num_tokens, context: num_tokens / 1000,
    )
    assert [each.last_used for each in Marconi(alpha).victims(2, view)] == dropped
    view.is_pool_full = False
    assert not list(Marconi(alpha).victims(2, view))


def test_an_interval_policy_keeps_its_multiples():
    run = make_run(snapshot_blocks=2, snapshot_policy=Interval(tokens=100))
    assert [serve(run, name, PROMPT[:544]) for name in "ab"] == [0, 448]
    run = make_run(snapshot_blocks=2, snapshot_policy="interval")
    assert [serve(run, name, PROMPT[:544]) for name in "ab"] == [0, 512]


# -- plug-ins


class Faulty(ByCost):
    """One of its hooks raises, or returns ``answer``."""

    hook, answer = "", None

    def __init__(self, hook: str, answer: object) -> None:
        super().__init__()
        setattr(self, hook, self._fail)
        self._answer = answer

    def _fail(self, *args):
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


FAULTS = [
    *((hook, ValueError("broken")) for hook in ("stop", "takes", "victims", "used", "taken")),
    *(("stop", answer) for answer in ("soon", 17, 0, -16, math.nan, 3.5)),
    *(("takes", answer) for answer in (None, True, "stays")),
    *(("victims", answer) for answer in (None, 3, ["a"], [None])),
]


@pytest.mark.parametrize(("hook", "answer"), FAULTS)
@pytest.mark.parametrize("max_faults", [0, 1000])
def test_the_default_takes_the_place_of_a_faulty_hook(hook, answer, max_faults):
    run = make_run(
        snapshot_blocks=2, max_policy_faults=max_faults, snapshot_policy=Faulty(hook, answer)
    )
    assert [serve(run, name, PROMPT[:544], 20) for name in "abc"] == [0, 528, 528]
    stats = run.scheduler.make_stats()
    assert stats.num_policy_faults == 1 if max_faults == 0 else stats.num_policy_faults > 1
    assert f"Faulty.{hook}" in stats.by_default


class Never(SnapshotPolicy):
    """Takes no snapshot."""

    def stop(self, req, after, view):
        return None

    def takes(self, req, num_tokens, view):
        return Take.NO


class Misspelt(Never):
    def victim(self, num_more, view):
        return ()


class Incomplete(SnapshotPolicy):
    def stop(self, req, after, view):
        return None


def test_a_policy_may_take_none():
    run = make_run(snapshot_blocks=2, snapshot_policy=Never)
    assert [serve(run, name, PROMPT[:544]) for name in "ab"] == [0, 0]


@pytest.mark.parametrize("given", ["marconi", Marconi, Marconi(0.5)])
def test_policies_are_given_by_name_class_or_object(given):
    found = find_snapshot_policy(CacheConfig(state_snapshot_policy=given).state_snapshot_policy)
    assert isinstance(found, Marconi)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("marcony", "state_snapshot_policy 'marcony' is not known.*did you mean 'marconi'"),
        ("engine.states.policies.Other", "state_snapshot_policy: cannot load"),
        (dict, "is not a subclass of engine.states.policy.SnapshotPolicy"),
        (3, "is not a subclass of engine.states.policy.SnapshotPolicy"),
        (Incomplete, "Incomplete lacks takes"),
        (Misspelt, "Misspelt.victim is never called.*did you mean 'victims'"),
    ],
)
def test_a_policy_that_cannot_be_used_is_refused(given, error):
    with pytest.raises((ConfigError, PolicyError), match=error):
        find_snapshot_policy(given)


def test_options_of_shipped_policies_are_checked():
    with pytest.raises(ValueError, match="alpha is -1"):
        Marconi(-1)
    with pytest.raises(ConfigError, match="state_snapshot_policy is None"):
        CacheConfig(state_snapshot_policy=None)

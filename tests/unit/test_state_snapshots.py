"""Prefix hits of models with recurrent states end at snapshots of these states."""

from __future__ import annotations

import pytest
from support.data_plane import RightDrafts
from support.holders import fill, holder
from support.simulate import Run, expected, make_request, make_run

from engine.kv.block_pool import BlockPool
from engine.kv.manager import KVManager
from engine.kv.snapshots import KeptSnapshot, Snapshots
from engine.messages.params import SamplingParams
from engine.sched.policies import FCFS
from engine.spec.decide import Drafts

PROMPT = [(7 * k) % 991 for k in range(3000)]
OTHER = [(11 * k + 5) % 983 for k in range(3000)]


def serve(run: Run, name: str, prompt: list[int], max_tokens: int = 4, **fields) -> int:
    """Serve one request alone, check its tokens, and return how many came from the cache."""
    run.add(make_request(name, prompt, max_tokens, **fields))
    run.drain()
    assert run.outputs[name] == expected(prompt, max_tokens)
    return run.starts[name][0].num_cached_tokens


@pytest.fixture(params=[(1, 1), (2, 1), (1, 3)], ids=["one block", "two in flight", "3 blocks"])
def run(request) -> Run:
    depth, size = request.param
    return make_run(depth=depth, snapshot_blocks=size, max_model_len=8192)


def test_the_same_prompt_starts_before_its_last_token(run):
    assert [serve(run, name, PROMPT[:544]) for name in "abc"] == [0, 528, 528]
    assert [serve(run, name, OTHER[:3000]) for name in "def"] == [0, 2992, 2992]


def test_a_second_turn_starts_at_the_last_full_block_of_the_first(run):
    assert serve(run, "a", PROMPT[:544], 8) == 0
    turn = PROMPT[:544] + expected(PROMPT[:544], 8)
    assert serve(run, "b", turn + OTHER[: 592 - len(turn)]) == 544


@pytest.mark.parametrize("num_output", [1, 16, 17, 40, 48])
def test_a_long_answer_leaves_a_snapshot_after_its_last_full_block(run, num_output):
    serve(run, "a", PROMPT[:530], num_output)
    turn = PROMPT[:530] + expected(PROMPT[:530], num_output)
    computed = len(turn) - 1  # the last token was not read
    assert serve(run, "b", [*turn, *OTHER[:50]]) == computed // 16 * 16


def test_a_shared_beginning_is_hit_from_the_third_request_on(run):
    prompts = [PROMPT[:512] + OTHER[32 * k : 32 * k + 32] for k in range(5)]
    hits = [serve(run, str(k), prompt) for k, prompt in enumerate(prompts)]
    assert hits == [0, 0, 512, 512, 512]


def test_a_hit_that_ends_before_the_cached_kv_has_a_reason(run):
    serve(run, "a", PROMPT[:544])
    serve(run, "b", PROMPT[:512] + OTHER[:32])
    serve(run, "c", PROMPT[:512] + OTHER[32:64])
    reasons = [run.starts[name][0].prefix_end for name in "abc"]
    assert reasons == ["never seen", "no snapshot there", "never seen"]
    assert run.scheduler.kv.counts.missed["no snapshot there"] == 528


class EvictsOnce(FCFS):
    """Preempts all running requests in the next step after ``is_due`` was set."""

    is_due = False

    def evict(self, view):
        is_due, self.is_due = self.is_due, False
        return list(view.running) if is_due else []


@pytest.mark.parametrize(("num_steps", "computed"), [(10, 480), (40, 627)])
def test_a_preempted_request_continues_from_its_newest_snapshot(num_steps, computed):
    """It continues after its last full block, whether that is in its prompt or in its output."""
    policy = EvictsOnce()
    run = make_run(snapshot_blocks=1, policy=policy, max_num_batched_tokens=48)
    run.add(make_request("a", PROMPT[:600], 60))
    for _ in range(num_steps):
        run.step()
    policy.is_due = True
    run.drain()
    assert run.outputs["a"] == expected(PROMPT[:600], 60)
    assert run.scheduler.make_stats().num_preemptions == 1
    assert run.scheduler.kv.counts.preempted_hits == computed // 16 * 16


def test_snapshots_never_take_a_block_that_a_request_holds():
    """Both requests fill the pool; no step of one is put off for a snapshot of the other."""
    runs = [
        make_run(snapshot_blocks=size, num_blocks=1 + 2 * 16, max_num_batched_tokens=64)
        for size in (0, 1, 5)
    ]
    for run in runs:
        run.add(make_request("a", PROMPT[:128], 128))
        run.add(make_request("b", OTHER[:128], 128))
        run.drain()
        assert run.scheduler.make_stats().num_preemptions == 0
        assert run.outputs["a"] == expected(PROMPT[:128], 128)
    assert len({run.scheduler.make_stats().num_preemptions for run in runs}) == 1


@pytest.mark.parametrize("size", [1, 3])
def test_statistics_count_the_snapshots_that_are_cached(size):
    run = make_run(snapshot_blocks=size, num_blocks=1 + 100)
    assert run.scheduler.make_stats().num_snapshots == 0
    for k in range(40):  # later snapshots evict former ones
        serve(run, f"first {k}", OTHER[64 * k : 64 * k + 60], 1)
    stats = run.scheduler.make_stats()
    assert stats.has_snapshots and stats.counters["snapshots.published"] == 40
    assert 0 < stats.num_snapshots < 40
    assert stats.snapshot_usage == stats.num_snapshots * size / 100
    for k in range(40):
        run.add(make_request(f"second {k}", OTHER[64 * k : 64 * k + 60], 1))
    waiting = run.scheduler.roster.by_id.values()
    is_cached = [run.scheduler.kv.states.has_snapshot(req, 48) for req in waiting]
    assert is_cached == [k >= 40 - stats.num_snapshots for k in range(40)]
    run.scheduler.reset_prefix_cache()
    assert run.scheduler.make_stats().num_snapshots == 0


def test_a_request_as_large_as_the_pool_is_served_after_a_hit():
    run = make_run(snapshot_blocks=3, num_blocks=1 + 10, max_num_batched_tokens=64)
    assert serve(run, "a", PROMPT[:81], 2) == 0
    assert serve(run, "b", PROMPT[:81] + OTHER[:60], 19) == 80


def test_a_request_that_fails_leaves_no_snapshot_of_what_it_failed_on():
    def fail(new, upto):
        return "broken" if new.request_id == "bad" and upto > 40 else None

    run = make_run(snapshot_blocks=1, fail=fail, max_num_batched_tokens=32)
    run.add(make_request("bad", PROMPT[:100], 8))
    run.drain()
    assert run.finished["bad"][0] == "error"
    assert serve(run, "good", PROMPT[:100]) <= 32


def test_a_lost_snapshot_is_not_hit():
    run = make_run(snapshot_blocks=2)
    run.worker.keep_states(loses=lambda step, index: True)
    assert [serve(run, name, PROMPT[:544]) for name in "ab"] == [0, 0]


@pytest.mark.parametrize("hook", ["seated", "describe", "settle", "release"])
@pytest.mark.parametrize("max_faults", [0, 1000])
def test_hits_have_their_states_though_the_resource_fails(hook, max_faults):
    """``max_faults``: 0: the resource is disabled by the first fault."""
    run = make_run(snapshot_blocks=2, depth=2, max_policy_faults=max_faults)
    assert serve(run, "a", PROMPT[:544]) == 0
    (resource,) = run.scheduler.resources.members
    inner, calls = getattr(resource, hook), iter(range(100))

    def fail(*args):
        if next(calls) < 3:
            raise RuntimeError("broken")
        return inner(*args)

    setattr(resource, hook, fail)
    assert [serve(run, name, PROMPT[:544]) for name in "bcd"] == [528] * 3
    serve(run, "e", OTHER[:300], 40)
    serve(run, "f", OTHER[:300] + expected(OTHER[:300], 40) + PROMPT[:30])
    assert run.scheduler.make_stats().num_policy_faults >= 1
    assert len(run.scheduler.resources.members) == (max_faults > 0)


def test_a_salt_separates_snapshots(run):
    salts = (None, "x", "y", "x")
    hits = [serve(run, str(k), PROMPT[:544], cache_salt=salt) for k, salt in enumerate(salts)]
    assert hits == [0, 0, 0, 528]


def test_a_reset_empties_the_cache_of_snapshots(run):
    serve(run, "a", PROMPT[:544])
    assert run.scheduler.reset_prefix_cache()
    assert serve(run, "b", PROMPT[:544]) == 0


def test_without_prefix_caching_there_are_no_snapshots():
    run = make_run(snapshot_blocks=1, caching=False)
    assert [serve(run, name, PROMPT[:544]) for name in "ab"] == [0, 0]


def test_prompts_that_may_not_be_split_are_not_split_for_a_snapshot():
    run = make_run(snapshot_blocks=1, enable_chunked_prefill=False, max_num_batched_tokens=2048)
    assert [serve(run, name, PROMPT[:544]) for name in "ab"] == [0, 0]
    assert run.plans[0] == {"a": 544}


def kept(kv: KVManager, row: int, num_tokens: int) -> None:
    """A request that was computed, has left a snapshot after ``num_tokens`` tokens, and ended."""
    req = holder(row, PROMPT[:100])
    fill(kv, req)
    (written,) = kv.states.snapshots.reserve(1)
    kv.states.publish(req, num_tokens, written, stays=True)
    kv.finish(req)


def test_a_snapshot_of_which_a_block_was_taken_is_not_found():
    kv = KVManager(40, 16)
    kv.keep_states(3)
    kept(kv, 0, 32)
    kept(kv, 0, 80)
    hit = kv.lookup(holder(1, PROMPT[:100]))
    assert (hit.num_tokens, len(hit.snapshot)) == (80, 3)
    kv.cache.unpublish(hit.snapshot[2])
    hit = kv.lookup(holder(1, PROMPT[:100]))
    assert (hit.num_tokens, len(hit.snapshot)) == (32, 3)
    kv.cache.unpublish(hit.snapshot[0])
    assert kv.lookup(holder(1, PROMPT[:100])).num_tokens == 0


def test_withdrawn_tokens_take_their_snapshots_along():
    kv = KVManager(40, 16)
    kv.keep_states(2)
    kept(kv, 0, 32)
    kept(kv, 0, 80)
    bad = holder(1, PROMPT[:100])
    fill(kv, bad)
    kv.revoke(bad, 50, [bad])
    kv.finish(bad)
    assert kv.lookup(holder(2, PROMPT[:100])).num_tokens == 32
    fill(kv, holder(3, PROMPT[:100]))
    assert kv.lookup(holder(2, PROMPT[:100])).num_tokens == 32


@pytest.mark.parametrize("num_output", [3, 5, 6, 8, 9])
def test_a_request_that_stops_among_its_drafts_leaves_a_snapshot_before_its_stop(num_output):
    answer = expected(PROMPT[:34], 20)
    run = make_run(snapshot_blocks=1, block_size=4, resources=[Drafts(4, RightDrafts())])
    run.num_drafts = 4
    params = SamplingParams(max_tokens=20, stop_token_ids=[answer[num_output - 1]])
    run.add(make_request("a", PROMPT[:34], 20, params=params))
    run.drain()
    assert run.outputs["a"] == answer[:num_output]
    hit = serve(run, "b", PROMPT[:34] + answer[:num_output] + OTHER[:9])
    assert hit in {(34 + num_output) // 4 * 4, (34 + num_output - 1) // 4 * 4}


@pytest.mark.parametrize("counts", [True, False], ids=["statistics between", "none"])
def test_a_snapshot_that_comes_back_has_no_former_uses(counts: bool) -> None:
    """Whether statistics were read meanwhile changes nothing, so that replays repeat."""
    pool = BlockPool(4)
    snapshots = Snapshots(pool, 1)
    (written,) = snapshots.reserve(1)
    assert snapshots.publish(written, KeptSnapshot(b"hash", 8, is_branch=True)) is not None
    pool.release(pool.take(3))  # it is evicted
    if counts:
        assert snapshots.count_cached() == 0
    (block,) = pool.take(1)
    pool.cache.publish(block, snapshots.keys_of(b"hash")[0])
    snapshots.restore(KeptSnapshot(b"hash", 8))
    kept = snapshots.kept(b"hash")
    assert kept is not None and not kept.is_branch

"""The ledger: what each user was served, however often it was preempted."""

from __future__ import annotations

import random
from collections import Counter

from support.simulate import make_request, make_run

from engine.sched.policies.fcfs import FCFS


class Audited(FCFS):
    """FCFS that wants the ledger kept."""

    uses_ledger = True


def test_every_token_is_entered_once(seed):
    rng = random.Random(seed)
    wanted_input, wanted_output = Counter(), Counter()
    run = make_run(
        policy=Audited(),
        num_blocks=20,
        block_size=4,
        max_num_seqs=24,
        max_num_batched_tokens=32,
        depth=rng.choice([1, 2]),
    )
    ledger = run.scheduler.view.ledger
    for index in range(60):
        user = rng.choice("abc")
        prompt = [1] * rng.randint(0, 12) + [rng.randrange(99) for _ in range(rng.randint(1, 20))]
        num_output = rng.randint(1, 20)
        run.add(make_request(str(index), prompt, num_output, user=user))
        wanted_input[user] += len(prompt)
        wanted_output[user] += num_output
        run.step()
        active = Counter(req.user for req in run.scheduler.view.unfinished)
        assert all(ledger.account(user).active == active[user] for user in "abc")
    run.drain()
    assert run.scheduler.make_stats().num_preemptions > 0
    for user in "abc":
        account = ledger.account(user)
        assert account.input_tokens + account.cached_tokens == wanted_input[user]
        assert account.output_tokens == wanted_output[user]
        assert account.active == 0
    assert sum(ledger.account(user).cached_tokens for user in "abc") > 0


def test_service_is_tokens_at_their_price_per_weight():
    run = make_run(policy=Audited(), user_weights={"b": 4.0})
    for user in "ab":
        run.add(make_request(user, list(range(41)), 3, user=user, cache_salt=user))
    run.drain()
    ledger = run.scheduler.view.ledger
    assert ledger.service("a") == 41 + 2 * 3
    assert ledger.service("a", input_price=0.0, output_price=5.0) == 15
    assert ledger.service("b") == ledger.service("a") / 4
    assert ledger.service("never seen") == 0.0

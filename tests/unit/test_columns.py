"""A step's outputs reach their client with everything that belongs to them, and nothing else."""

from __future__ import annotations

import copy
import random

import pytest
from support.fakes import FakeClock
from support.simulate import expected, make_request, make_run

from engine.messages.requests import TokenLogprobs
from policylab.verify.fake import DigestWorker

FEW, MANY = 3, 20  # rows of a step: granted one by one, or in columns


class ScoringWorker(DigestWorker):
    """Its scores name slot and step, so that a stray one is seen."""

    kind = "logprobs"

    def launch(self, plan):
        result = super().launch(plan)
        scores = {
            place: [TokenLogprobs([slot], [-float(plan.step)], 1)]
            for place, slot in enumerate(plan.slots.tolist())
            if result.counts[place]
        }
        setattr(result, self.kind, scores)
        return result


def run_of(num_rows, num_clients, **options):
    """Requests of 4 and 5 tokens in turn, on one client after the other."""
    run = make_run(num_blocks=200, **{"max_num_seqs": 32, **options})
    for i in range(num_rows):
        run.add(make_request(str(i), [i + 1] * 3, 4 + i % 2, client_index=i % num_clients))
    return run


def hear_step(run):
    """One step; its outputs by client."""
    plan = run.scheduler.schedule()
    return run.scheduler.update_from_output(plan, run.worker.collect(run.worker.launch(plan)))


def slots(run):
    return {req.request_id: req.slot for req in run.scheduler.roster.running}


@pytest.mark.parametrize("kind", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("num_clients", [1, 2])
@pytest.mark.parametrize("num_rows", [FEW, MANY])
def test_scores_reach_the_request_they_belong_to(num_rows, num_clients, kind):
    run = run_of(num_rows, num_clients)
    run.worker = ScoringWorker(200, 16)
    run.worker.kind = kind
    num_scores = 0
    for step in range(1, 6):
        before, outputs = slots(run), hear_step(run)
        slot_of = before | slots(run)
        for client, out in outputs.items():
            assert {int(name) % num_clients for name in out.request_ids} == {client}
            scores = getattr(out, kind)
            assert sorted(scores) == list(range(len(out.request_ids)))
            for index, score in scores.items():
                slot = slot_of[out.request_ids[index]]
                assert score == [TokenLogprobs([slot], [-float(step)], 1)]
                num_scores += 1
    assert num_scores == sum(4 + i % 2 for i in range(num_rows))


@pytest.mark.parametrize("num_clients", [1, 2])
@pytest.mark.parametrize("num_rows", [FEW, MANY])
def test_a_first_output_says_so_once_and_when_its_request_was_scheduled(num_rows, num_clients):
    clock = FakeClock()
    run = run_of(num_rows, num_clients, clock=clock)
    told: dict[str, tuple[float, int]] = {}
    tokens: dict[str, list[int]] = {}
    for _ in range(5):
        clock.now += 1.0
        for out in hear_step(run).values():
            assert out.time == clock.now and out.counts in (None, [1] * len(out.request_ids))
            for name, token in zip(out.request_ids, out.token_ids, strict=True):
                tokens.setdefault(name, []).append(token)
            for started in out.started:
                name = out.request_ids[started.index]
                assert name not in told
                told[name] = (started.scheduled_time, started.num_cached_tokens)
    assert told == {str(i): (101.0, 0) for i in range(num_rows)}
    assert tokens == {str(i): expected([i + 1] * 3, 4 + i % 2) for i in range(num_rows)}


@pytest.mark.parametrize("num_clients", [1, 2])
@pytest.mark.parametrize("num_rows", [FEW, MANY])
def test_who_meets_a_deadline_is_told_beside_those_with_a_token(num_rows, num_clients):
    """Steps share columns; what is said of one step only must not stay in them."""
    clock = FakeClock()
    run = run_of(num_rows, num_clients, clock=clock, max_num_seqs=num_rows)
    run.add(make_request("late", [99] * 3, 9, queue_deadline=102.5, client_index=0))
    ends, tokens = {}, {}
    for _ in range(5):
        clock.now += 1.0
        for client, out in hear_step(run).items():
            counts = out.counts or [1] * len(out.request_ids)
            flat = iter(out.token_ids)
            for name, count in zip(out.request_ids, counts, strict=True):
                tokens.setdefault(name, []).extend(next(flat) for _ in range(count))
            assert next(flat, None) is None
            for end in out.finished:
                ends[out.request_ids[end.index]] = (client, end.reason, clock.now)
    lasting = {str(i): (i % num_clients, "length", 104.0 + i % 2) for i in range(num_rows)}
    assert ends == lasting | {"late": (0, "deadline", 103.0)}
    assert tokens.pop("late") == []
    assert tokens == {str(i): expected([i + 1] * 3, 4 + i % 2) for i in range(num_rows)}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_plan_that_was_copied_on_its_way_is_settled_like_any_other(depth, seed):
    """Whether its rows are those that run now is known by its step, not by which array they are."""
    rng = random.Random(seed)
    runs = [run_of(MANY, 2, depth=depth, block_size=2) for _ in range(2)]
    for index in range(MANY, MANY + 20):
        add = make_request(str(index), [index] * rng.randint(1, 5), rng.randint(1, 9))
        for run in runs:
            run.add(add)
            run.step()
            copied, result = runs[1].flight[0] if runs[1].flight else (None, None)
            if copied is not None:
                runs[1].flight[0] = copy.deepcopy(copied), result
    for run in runs:
        run.drain()
    assert runs[0].plans == runs[1].plans and runs[0].outputs == runs[1].outputs, f"seed {seed}"

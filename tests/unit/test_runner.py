"""The worker's step: what fails, fails alone; what is asked for, is delivered once."""

from __future__ import annotations

import pytest
import torch
from one_bad import check_that_one_fails_alone, says
from simulate import Run, make_request, make_scheduler

from engine.kv.layout import KVSpec
from engine.messages.params import SamplingParams
from engine.sample.sampler import Sampler
from engine.worker.executor import InprocExecutor
from engine.worker.runner import ModelRunner
from engine.worker.states import States

VOCAB = 50
POISON, NAN = 40, 41


class SumModel:
    """Says the sum of all tokens so far, modulo 40; chokes on POISON and answers NAN with NaN.

    The KV cache holds each token itself, so the sum comes through the block table.
    """

    kv_spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=1, windows=(0,))
    vocab_size = VOCAB
    dtype = torch.float32
    calls = 0

    def forward(self, batch, kv):
        self.calls += 1
        if (batch.input_ids == POISON).any():
            raise RuntimeError("bad token 40")
        meta, cache = batch.attn, kv[0]
        keys = cache[:, 0, 0, :, 0]
        keys[meta.slots // 4, meta.slots % 4] = batch.input_ids.float()
        rows = []
        for s in range(len(meta.seq_lens)):
            first, last = int(meta.query_start[s]), int(meta.query_start[s + 1])
            tokens = keys[meta.block_tables[s].long()].reshape(-1)[: int(meta.seq_lens[s])]
            sums = tokens.cumsum(0)[len(tokens) - (last - first) :]
            sums[batch.input_ids[first:last] == NAN] = torch.nan
            rows.append(sums)
        hidden = torch.cat(rows)[:, None]
        return hidden if batch.wanted is None else hidden[batch.wanted.rows]

    def logits(self, hidden):
        logits = torch.zeros(len(hidden), VOCAB)
        for row, total in enumerate(hidden[:, 0]):
            logits[row, int(total.nan_to_num()) % 40] = 5.0
            logits[row] += total * 0
        return logits


def make_runner_run(model: SumModel, depth: int = 1, **options) -> Run:
    scheduler = make_scheduler(num_blocks=64, block_size=4, max_model_len=64, **options)
    states = States(scheduler.config.max_num_seqs, 64, 4)
    sampler = Sampler(vocab_size=VOCAB, max_num_seqs=scheduler.config.max_num_seqs, device="cpu")
    kv = [torch.zeros(64, 2, 1, 4, 1)]
    return Run(scheduler, InprocExecutor(ModelRunner(model, sampler, states, kv)), depth)


GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("bad", [POISON, NAN])
def test_one_bad_request_among_twelve_fails_alone(bad, depth):
    run = make_runner_run(SumModel(), depth)
    check_that_one_fails_alone(run, bad, GREEDY)
    assert run.scheduler.make_stats().num_failed == 1


def test_what_a_failed_request_wrote_is_not_found_again():
    run = make_runner_run(SumModel())
    run.add(make_request("bad", [1] * 8 + [NAN], 6, params=GREEDY))
    run.drain()
    run.add(make_request("good", [1] * 9, 6, params=GREEDY))
    req = run.scheduler.roster.by_id["good"]
    assert run.scheduler.kv.lookup(req).num_tokens == 0
    run.drain()
    assert run.outputs["good"] == says([1] * 9, 6)


def test_halving_asks_no_more_often_than_it_must():
    model = SumModel()
    run = make_runner_run(model)
    for i in range(16):
        run.add(make_request(str(i), [POISON if i == 11 else i], 1, params=GREEDY))
    run.drain()
    assert model.calls <= 1 + 2 * 4


@pytest.mark.parametrize(("start", "first"), [(0, 1), (1, 1), (4, 4), (8, 8)])
@pytest.mark.parametrize("budget", [4, 7, 1024])
def test_prompt_scores_come_once_and_whole(start, first, budget):
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    params = SamplingParams(
        temperature=0, max_tokens=3, prompt_logprobs=2, prompt_logprobs_start=start
    )
    run = make_runner_run(SumModel(), max_num_batched_tokens=budget, max_num_seqs=2)
    run.add(make_request("a", prompt, 3, params=params))
    delivered = []
    while run.scheduler.has_unfinished_requests():
        plan = run.scheduler.schedule()
        result = run.worker.launch(plan)
        for out in run.scheduler.update_from_output(plan, result).values():
            delivered += [out.prompt_logprobs[0]] if out.prompt_logprobs else []
    (scores,) = delivered
    assert [entry.token_ids[0] for entry in scores] == prompt[first:]
    for position, entry in enumerate(scores, start=first):
        assert (entry.rank == 1) == (sum(prompt[:position]) % 40 == prompt[position])


class ForgetfulSampler(Sampler):
    """Out of memory the first time more than one row samples."""

    raised = False

    def sample(self, logits, slots, positions, tokens):
        if len(slots) > 1 and not self.raised:
            self.raised = True
            raise MemoryError("too many rows")
        return super().sample(logits, slots, positions, tokens)


def test_prompt_logprobs_survive_a_step_that_is_run_again():
    run = make_runner_run(SumModel())
    runner = run.worker._runner
    runner.sampler.__class__ = ForgetfulSampler
    results = []
    execute = runner.execute
    runner.execute = lambda plan: results.append(execute(plan)) or results[-1]
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1)
    for name in "ab":
        run.add(make_request(name, [1, 2, 3], 2, params=params))
    run.drain()
    assert runner.sampler.raised
    assert {row: len(scores) for row, scores in results[0].prompt_logprobs.items()} == {0: 2, 1: 2}
    assert not any(result.prompt_logprobs for result in results[1:])

"""Small cases of several ranks that were wrong once."""

from __future__ import annotations

from engine.config.sched import SchedulerConfig
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest
from policylab.verify.case import Add, Case, Setup
from policylab.verify.simulation import Simulation


def test_an_id_that_is_used_again_with_other_content_is_another_request() -> None:
    config = SchedulerConfig(max_model_len=2, max_num_seqs=1, max_num_batched_tokens=1)
    setup = Setup(config=config, num_blocks=2, block_size=1, caching=False, seed=1, ranks=2)
    params = SamplingParams(max_tokens=1)
    requests = [
        AddRequest("0", [24], params, seed=0, arrival_time=0.0, max_tokens=1, cache_salt=salt)
        for salt in (None, "a")
    ]
    events = [Add(at, request) for at, request in enumerate(requests)]
    assert Simulation(Case(setup=setup, events=events)).run().num_accepted == 2

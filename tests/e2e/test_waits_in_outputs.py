"""What users of a real engine see of waits, deadlines and refusals."""

import pytest
from e2e.box_engine import PROMPTS, SIZES, greedy

from engine import LLM, LLMEngine, RefusedError


def test_waits_and_events_of_a_real_run(llm_engine: LLMEngine) -> None:
    for number in range(40):  # 32 seats
        llm_engine.add_request(str(number), PROMPTS[number % 4], greedy(max_tokens=8))
    finished = {}
    while llm_engine.has_unfinished_requests():
        finished |= {o.request_id: o for o in llm_engine.step() if o.finished}
    for output in finished.values():
        metrics = output.metrics
        assert metrics is not None and metrics.scheduled_time is not None
        (queued, arrived), (scheduled, started) = metrics.events
        assert (queued, scheduled) == ("queued", "scheduled")
        assert started == metrics.scheduled_time
        assert sum(metrics.waits.values()) == pytest.approx(started - arrived, abs=1e-6)
    last = finished["39"].metrics
    assert last is not None and max(last.waits, key=last.waits.__getitem__) == "seats"


def test_deadlines_and_refusals_of_llm() -> None:
    with LLM(**{**SIZES, "max_num_seqs": 2, "max_waiting_requests": 6}) as llm:
        outputs = llm.generate(
            PROMPTS, greedy(max_tokens=400), use_tqdm=False, timeout=0.05, queue_timeout=0.02
        )
        reasons = [output.outputs[0].finish_reason for output in outputs]
        assert reasons == ["deadline"] * 4
        assert "by its deadline" in (outputs[0].outputs[0].error or "")
        with pytest.raises(RefusedError, match="max_waiting_requests"):
            llm.generate(PROMPTS * 3, greedy(max_tokens=4), use_tqdm=False)
        assert not llm.llm_engine.has_unfinished_requests()
        outputs = llm.generate(PROMPTS, greedy(max_tokens=4), use_tqdm=False)
        assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 4

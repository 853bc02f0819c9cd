"""Two real cores: conversations stay where their KV is; both cores publish events and record."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.kv_subscriber import KVEventSubscriber

from engine import LLM, SamplingParams
from engine.assets import BOX_MODEL
from engine.cli.main import main
from engine.core.kv_publisher import events_endpoint, replay_endpoint
from engine.messages.kv_events import BlockStored

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
NUM_TALKS, NUM_TURNS = 6, 4


def test_conversations_over_two_cores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint, log = f"ipc://{tmp_path}/e", tmp_path / "steps.log"
    options = {"multiprocess": True, "data_parallel_size": 2, "num_threads": 2}
    events = {"enable_kv_events": True, "kv_events_endpoint": endpoint, "kv_events_topic": "kv@a@b"}
    stored: list[set[int]] = []
    with LLM(BOX_MODEL, **options, **events, step_log=log) as llm:
        talks = [[100 + number, *range(7, 50)] for number in range(NUM_TALKS)]
        for turn in range(NUM_TURNS):
            order = range(NUM_TALKS) if turn % 2 else reversed(range(NUM_TALKS))
            for number in order:
                prompt = {"prompt_token_ids": talks[number]}
                (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
                known = len(talks[number]) - 6 if turn else 0  # but the question and last token
                assert output.num_cached_tokens == known // 16 * 16
                talks[number] += [*output.outputs[0].token_ids, *range(300, 305)]
        for rank in range(2):
            own = events_endpoint(endpoint, rank)
            subscriber = KVEventSubscriber(own, "kv@", replay_endpoint(own, 2))
            batches = subscriber.catch_up(5)
            subscriber.close()
            assert {batch.data_parallel_rank for batch in batches} == {rank}
            blocks = [each for batch in batches for each in batch.events]
            assert all(isinstance(each, BlockStored) for each in blocks)
            stored.append({name for each in blocks for name in each.block_hashes})
    assert stored[0] and stored[1] and not stored[0] & stored[1]
    assert main(["replay", str(log)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [f"{log}-core0", f"{log}-core1"]
    assert all(": identical: " in line for line in lines)
    counts = [int(line.split()[-2]) for line in lines]
    assert sum(counts) == NUM_TALKS * NUM_TURNS and min(counts) >= NUM_TURNS

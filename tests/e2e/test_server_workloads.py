"""A workload of the policy lab, sent to a server."""

from __future__ import annotations

import json

from server_load import Shape
from server_workloads import body_of, play
from support.served import served

from policylab.sim.workloads import find_workload
from tools.server_campaign import COMMON, NAME

TURNS = (
    "conversations(num_requests=12,think=0.02,turns=3,max_context=256,num_users=2,"
    "lengths='log-uniform(prompt=(4, 16), output=(2, 8))')"
)


def test_turns_follow_answers_of_a_server() -> None:
    shape = Shape(NAME, vocab=500)
    with served(*COMMON) as made:
        rows = play(("127.0.0.1", made.port), shape, TURNS, rate=40.0, seconds=20.0)
    assert len(rows) == 12 and all(row.is_whole for row in rows)
    asked = [json.loads(row.body) for row in rows]
    assert [row.num_tokens for row in rows] == [body["max_tokens"] for body in asked]
    followers = [row for row, body in zip(rows, asked, strict=True) if len(body["prompt"]) > 16]
    ends = sorted(row.ended for row in rows)
    assert followers and all(row.sent > ends[0] for row in followers)


def test_what_is_posted_is_what_was_drawn() -> None:
    job = next(iter(find_workload("tiers(chat_share=0)").source(0)))
    body = json.loads(body_of(job, Shape("name", vocab=100)))
    assert len(body["prompt"]) == job.num_prompt and body["max_tokens"] == job.num_output
    assert min(body["prompt"]) >= 10 and max(body["prompt"]) < 100
    assert (body["priority"], body["user"]) == (1, "batch")

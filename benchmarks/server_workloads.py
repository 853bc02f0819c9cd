"""The workloads of the policy lab as load for a server (server_load.py).

Requests ask for as many tokens as the workload drew, end of text ignored; those that follow others
are sent when these have ended. Prompts are token ids within --vocab, so what prompts share, a
prefix cache finds; only what the server itself has answered is stood in for, as a stream tells no
token ids.
"""

import json
import time

from server_load import DRAIN_SECONDS, Load, Row, Shape

from policylab.sim.job import FIRST_TOKEN, Job
from policylab.sim.workloads import find_workload

LOWEST_TOKEN = 10  # below lie the special tokens of the models used here
AHEAD_SECONDS = 0.5  # a request is made so long before it is due


def body_of(job: Job, shape: Shape) -> bytes:
    """What is posted for a job."""
    room = shape.vocab - LOWEST_TOKEN
    body = {
        "model": shape.model,
        "prompt": [LOWEST_TOKEN + (token - FIRST_TOKEN) % room for token in job.tokens()],
        "max_tokens": job.num_output,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if job.priority:
        body["priority"] = job.priority
    if job.user:
        body["user"] = job.user
    return json.dumps(body, separators=(",", ":")).encode()


def play(
    address: tuple[str, int],
    shape: Shape,
    workload: str,
    rate: float | None,
    seconds: float,
    seed: int = 0,
) -> list[Row]:
    """The requests of a workload that come within this many seconds, ended; at this rate, or at the
    workload's own."""
    source = find_workload(workload).source(seed, rate)
    rows: list[Row] = []
    jobs: dict[int, Job] = {}  # of rows under way, by identity
    with Load(*address) as load:
        start = time.perf_counter()
        load.on_end = lambda row: source.ended(jobs.pop(id(row)), time.perf_counter() - start)
        end = start + seconds + DRAIN_SECONDS
        while (now := time.perf_counter()) < end:
            while source.next_time < min(seconds, now - start + AHEAD_SECONDS):
                job = source.take()
                rows.append(Row(start + job.arrival, body_of(job, shape)))
                jobs[id(rows[-1])] = job
                load.add(rows[-1])
            if not load.num_pending and source.next_time >= seconds:
                break
            if load.num_pending:
                load.run(min(end, now + AHEAD_SECONDS / 5))
            else:
                time.sleep(AHEAD_SECONDS / 5)
        load.on_end = lambda row: None
    return rows

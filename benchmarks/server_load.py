"""Loads a server with streams, and prints what became of them.

    python benchmarks/server_load.py URL --model NAME [--rate 20] [--seconds 30] [--tokens 64]
                                     [--ttft 0.5] [--itl 0.1] [--rows FILE] [--workload W]

Requests arrive as a Poisson process, however slow the server is (an open loop). With --streams N,
always N of them run. With --workload "azure-conv(scale=0.1)" they are those of a workload of the
policy lab, see docs/internals/workloads.md: prompts are token ids below --vocab, so a prefix cache
finds what prompts share, and requests that follow others are sent when these have ended.

A request keeps the promise if its first token came within --ttft seconds and 99 % of the gaps
between its events were at most --itl; goodput is the number of such requests a second. Also printed
is the processor time of this program for each token, which should be far below the server's.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from http_load import (
    DRAIN_SECONDS,
    Load,
    Promise,
    Row,
    Shape,
    closed_loop,
    completion,
    cpu_between,
    open_loop,
    summary,
    thread_seconds,
)
from measure import quantile

from policylab.sim.job import FIRST_TOKEN, Job
from policylab.sim.workloads import find_workload

LOWEST_TOKEN = 10  # below lie the special tokens of the models used here
AHEAD_SECONDS = 0.5  # before it is due, a request is prepared


def body_of(job: Job, shape: Shape) -> bytes:
    """The body of the request for a job."""
    room = shape.vocab - LOWEST_TOKEN
    prompt = [LOWEST_TOKEN + (token - FIRST_TOKEN) % room for token in job.tokens()]
    more: dict[str, Any] = {"priority": job.priority} if job.priority else {}
    if job.user:
        more["user"] = job.user
    return completion(shape.model, prompt, job.num_output, **more)


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--rate", type=float, help="requests a second; 20, or of a workload its own"
    )
    parser.add_argument("--workload", help="arrivals and lengths of this workload of the lab")
    parser.add_argument("--streams", type=int, default=0, help="keep this many running instead")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=1000)
    parser.add_argument("--ttft", type=float, default=Promise.ttft)
    parser.add_argument("--itl", type=float, default=Promise.itl)
    parser.add_argument(
        "--tick", type=float, default=0.002, help="seconds between two looks, with --streams"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pid", type=int, help="of the server, to say what it took of each token")
    parser.add_argument("--rows", type=Path, help="write a line for each request here")
    args = parser.parse_args()
    parts = urlsplit(args.url)
    address = (parts.hostname or "127.0.0.1", parts.port or 80)
    shape = Shape(args.model, args.prompt, args.tokens, args.vocab)
    before = thread_seconds(args.pid) if args.pid else {}
    cpu, began = time.process_time(), time.perf_counter()
    if args.workload:
        rows = play(address, shape, args.workload, args.rate, args.seconds, args.seed)
    elif args.streams:
        rows = closed_loop(
            address, shape, args.streams, args.seconds, seed=args.seed, tick=args.tick
        )
    else:
        rate = 20.0 if args.rate is None else args.rate
        rows = open_loop(address, shape, rate, args.seconds, args.seed)
    cpu = time.process_time() - cpu
    figures = summary(rows, Promise(args.ttft, args.itl), args.seconds)
    num_tokens = sum(row.num_tokens for row in rows if row.times)
    if args.pid:
        spent = cpu_between(before, thread_seconds(args.pid))
        figures["server_us_per_token"] = round(1e6 * spent / max(1, num_tokens), 2)
    figures["own_us_per_token"] = round(1e6 * cpu / max(1, num_tokens), 2)
    print(json.dumps(figures, indent=1))
    if args.rows:
        with args.rows.open("w") as file:
            for row in rows:
                file.write(json.dumps(line_of(row, began)) + "\n")


def line_of(row: Row, began: float) -> dict[str, Any]:
    """A request as a row of figures, in seconds from ``began``."""
    return {
        "due": round(row.due - began, 6),
        "sent": round(row.sent - began, 6),
        "status": row.status,
        "how": row.how,
        "tokens": row.num_tokens,
        "ttft": round(row.ttft, 6) if row.times else None,
        "itl_p99": round(quantile(row.gaps, 0.99, 0.0), 6),
        "ended": round(row.ended - began, 6),
    }


if __name__ == "__main__":
    main()

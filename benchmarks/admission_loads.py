"""What the schedulers are given to admit: random requests, and pools too small for all of them.

Each load is drawn from its number. Times are in seconds of a virtual clock that the costs of steps
move; how densely requests come is drawn as a share of what an engine with these costs can serve.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import log2

from scheduler_loads import Setup

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
NUM_LOADS = 48


@dataclass(frozen=True)
class Cost:
    """Seconds of a step, affine in its sizes."""

    fixed: float
    row: float = 0.0
    token: float = 0.0
    context: float = 0.0
    pair: float = 0.0

    def seconds(self, starts: list[int], counts: list[int]) -> float:
        """A step whose rows compute so many tokens, each from its position on."""
        pairs = sum(n * start + n * (n + 1) // 2 for start, n in zip(starts, counts, strict=True))
        return (
            self.fixed
            + self.row * len(counts)
            + self.token * sum(counts)
            + self.context * sum(starts)
            + self.pair * pairs
        )


@dataclass(frozen=True)
class Request:
    """One request: when it comes, what it asks."""

    name: str
    seconds: float
    prompt: list[int]
    num_output: int


@dataclass(frozen=True)
class Load:
    """An engine and the requests that come to it."""

    setup: Setup
    requests: list[Request]


def make(number: int, cost: Cost) -> Load:
    """The load of this number, at the pace of these costs."""
    rng = random.Random(number)
    seats = rng.choice((16, 32, 64, 128))
    longest = rng.choice((128, 512, 1024))
    most_output = rng.choice((64, 256, 512))
    num_requests = rng.choice((2, 4)) * seats
    num_shared = rng.choice((0, 0, 0, 64))
    shared = [rng.randrange(10, 8000) for _ in range(num_shared)]
    sizes = [
        (int(2 ** rng.uniform(3, log2(longest))), int(2 ** rng.uniform(2, log2(most_output))))
        for _ in range(num_requests)
    ]
    mean = sum(num_prompt + num_output for num_prompt, num_output in sizes) / num_requests
    # What all seats would hold half way, cut to a share: most pools are too small for all seats.
    tightness = rng.choice((0.25, 0.4, 0.55, 0.7, 1.0))
    needed = max(num_prompt + num_output for num_prompt, num_output in sizes) + num_shared
    num_tokens = max(1.5 * needed, tightness * seats * mean)
    setup = Setup(
        num_blocks=1 + int(num_tokens // BLOCK_SIZE) + 2,
        max_num_seqs=seats,
        max_num_batched_tokens=max(seats, rng.choice((256, 512, 2048))),
        long_prefill_token_threshold=rng.choice((0, 0, 0, 128)),
    )
    gap = mean_gap(setup, sizes, cost) / rng.choice((0.7, 0.9, 1.1, 1.4, 1000.0))
    requests, now = [], 0.0
    for index, (num_prompt, num_output) in enumerate(sizes):
        prompt = shared + [rng.randrange(10, 8000) for _ in range(num_prompt)]
        requests.append(Request(str(index), now, prompt, num_output))
        now += rng.expovariate(1 / gap)
    return Load(setup, requests)


def mean_gap(setup: Setup, sizes: list[tuple[int, int]], cost: Cost) -> float:
    """Seconds between two requests at which about as many come as can be served: by the tokens of a
    step, by the rows that the pool holds, and by the seats."""
    count = len(sizes)
    num_prompt = sum(size for size, _ in sizes) / count
    num_output = sum(size for _, size in sizes) / count
    rows = (setup.num_blocks - 1) * BLOCK_SIZE / (num_prompt + num_output / 2)
    rows = max(1.0, min(rows, setup.max_num_seqs))
    tokens = rows * (1 + num_prompt / num_output)  # of a step in which that many run
    steps = num_output * max(1.0, tokens / setup.max_num_batched_tokens)
    step = cost.fixed + cost.row * rows + cost.token * min(tokens, setup.max_num_batched_tokens)
    return step * steps / rows

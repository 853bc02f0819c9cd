"""Workloads: the same random token ids, arrivals and lengths for every engine.

Sampling is greedy and the end of text is ignored, so each engine computes the same amount.

    W1      offline throughput   32 requests at once, 256 prompt tokens, 64 outputs
    W2      single stream        1 request, 128 prompt tokens, 128 outputs
    W3      shared prefix        32 requests at once, 512 shared + 32 own tokens, 32 outputs
    W4      online               24 Poisson arrivals, 32..384 prompt tokens, 16..96 outputs
    D<n>    steady decode        n requests at once, 16 prompt tokens, 160 outputs
    L<n>    long context         1 request, n prompt tokens, 64 outputs
    P<n>    prompt               1 request, n prompt tokens, 1 output
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

STANDARD = ("W1", "W2", "W3", "W4")
LARGEST_TOKEN_ID = 8000
SMALLEST_TOKEN_ID = 10  # smaller ids are special tokens of the measured models


@dataclass(frozen=True)
class Arrival:
    """A request and the time of its arrival."""

    seconds: float  # after the start of the run
    prompt: list[int]
    num_output: int


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(SMALLEST_TOKEN_ID, LARGEST_TOKEN_ID) for _ in range(count)]


def make(name: str, repeat: int = 0, rate: float = 2.0) -> list[Arrival]:
    """The requests of workload `name` in order of arrival.

    `repeat` draws other tokens, so that a repeat in one process finds nothing in a prefix cache;
    `rate` is the mean number of arrivals a second in W4.
    """
    if name.startswith("D"):
        return steady_decode(int(name[1:]), repeat)
    if name.startswith(("L", "P")):
        prompt = random_tokens(random.Random(1000 * repeat), int(name[1:]))
        return [Arrival(0.0, prompt, 64 if name.startswith("L") else 1)]
    rng = random.Random(1000 * repeat + int(name[1:]))
    if name == "W1":
        return [Arrival(0.0, random_tokens(rng, 256), 64) for _ in range(32)]
    if name == "W2":
        return [Arrival(0.0, random_tokens(rng, 128), 128)]
    if name == "W3":
        shared = random_tokens(rng, 512)
        return [Arrival(0.0, shared + random_tokens(rng, 32), 32) for _ in range(32)]
    if name == "W4":
        return online(rng, rate)
    raise ValueError(
        f"no workload {name!r}: one of {', '.join(STANDARD)}, D<requests>, L<tokens>, P<tokens>"
    )


def online(rng: random.Random, rate: float) -> list[Arrival]:
    now, arrivals = 0.0, []
    for _ in range(24):
        now += rng.expovariate(rate)
        prompt = random_tokens(rng, rng.randint(32, 384))
        arrivals.append(Arrival(now, prompt, rng.randint(16, 96)))
    return arrivals


def steady_decode(num_requests: int, repeat: int) -> list[Arrival]:
    rng = random.Random(1000 * repeat + num_requests)
    return [Arrival(0.0, random_tokens(rng, 16), 160) for _ in range(num_requests)]


def longest(name: str) -> int:
    """Tokens of the longest request of a workload, prompt and outputs."""
    return max(len(arrival.prompt) + arrival.num_output for arrival in make(name))


def num_shared(arrivals: Sequence[Arrival]) -> int:
    """The number of tokens that all prompts begin with; 0 for a single request."""
    if len(arrivals) == 1:
        return 0
    columns = zip(*(arrival.prompt for arrival in arrivals), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def warm_up() -> list[Arrival]:
    """A small mixed batch that is run before anything is timed."""
    return [Arrival(0.0, list(range(50 + i, 90 + 3 * i)), 4) for i in range(8)]

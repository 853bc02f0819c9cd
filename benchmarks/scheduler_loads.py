"""Loads of the schedulers: the same prompts, pools and seats for every engine.

decode_N      N requests decode; nobody comes or ends while the clock runs
*_hooks       the same under a policy that overrides every hook (ours only)
pressure      256 requests and blocks for half of them, to the end
chunked       512 long prompts next to decodes, to the end
shared        the same, three quarters of each prompt in common
preempting    128 requests and blocks for a third of them, to the end
hash_*        prompts of 8192 tokens: hash and look up, absent and cached
queue_*       256 run, 10,000 wait in order of priority; some end and some start in each step
open_*        some 256 run, as many as there are blocks for, and 10,000 wait; seats are left, so
              the queue is read in each step
full_preempt  256 run in all the seats, 10,000 wait and may take them
"""

from dataclasses import dataclass
from typing import Literal

BLOCK_SIZE = 16
MAX_BATCHED_TOKENS = 8192
MAX_MODEL_LEN = 8192 + 512
NUM_PROMPT = 128
WARM_UP = 20
SIZES = (1, 32, 128, 256, 1024, 4096)
STEPS = {1: 1000, 32: 500, 128: 300, 256: 200, 1024: 100, 4096: 30}

Kind = Literal["decode", "drain", "lookup", "queue"]


@dataclass(frozen=True)
class Setup:
    """Options of an engine's scheduler. ``policy`` and ``hash_algo`` are names."""

    num_blocks: int
    max_num_seqs: int
    policy: str = "fcfs"
    hash_algo: str = "sha256"
    caching: bool = True
    max_num_batched_tokens: int = MAX_BATCHED_TOKENS
    long_prefill_token_threshold: int = 0


@dataclass(frozen=True)
class Load:
    """One measurement: a number of requests of this size, on a scheduler of this kind."""

    kind: Kind
    setup: Setup
    requests: int
    num_prompt: int
    num_output: int
    num_shared: int = 0
    steps: int = 0  # measured steps; 0 measures to the end

    def prompt(self, index: int) -> list[int]:
        """Token ids below 8010, different for each request but for their shared beginning."""
        beginning = [7 * j % 8000 + 10 for j in range(self.num_shared)]
        own = range(self.num_prompt - self.num_shared)
        return beginning + [(index * 7919 + 31 * j) % 8000 + 10 for j in own]

    def output(self, index: int) -> int:
        """Output tokens; in a queue they differ, so that seats fall free one by one."""
        return self.num_output + (37 * index % 64 if self.kind == "queue" else 0)

    def priority(self, index: int) -> int:
        return 7919 * index % 10 if self.kind == "queue" else 0


def decode(running: int, policy: str = "fcfs") -> Load:
    steps = STEPS.get(running, 100)
    # While the last ones are prefilled the first ones decode already.
    num_output = steps + WARM_UP + running * NUM_PROMPT // (MAX_BATCHED_TOKENS // 2) + 50
    blocks = running * (-(-(NUM_PROMPT + num_output) // BLOCK_SIZE) + 1) + 64
    return Load("decode", Setup(blocks, running, policy), running, NUM_PROMPT, num_output, 0, steps)


def lookup(hash_algo: str) -> Load:
    return Load("lookup", Setup(40000, 64, hash_algo=hash_algo), 20, 8192, 1)


def queue(policy: str) -> Load:
    return Load("queue", Setup(20000, 256, policy), 10256, 32, 33, 0, 200)


def open_queue(policy: str) -> Load:
    return Load("queue", Setup(4000, 512, policy), 12000, 160, 128, 96, 200)


LOADS = {
    **{f"decode_{size}": decode(size) for size in SIZES},
    **{f"decode_{size}_hooks": decode(size, "every-hook") for size in (256, 1024)},
    "pressure": Load("drain", Setup(3200, 256), 256, 128, 256),
    "chunked": Load("drain", Setup(70000, 256), 512, 2000, 100),
    "shared": Load("drain", Setup(70000, 256), 512, 2000, 100, 1536),
    "preempting": Load("drain", Setup(1200, 128), 128, 256, 256),
    "hash_sha256": lookup("sha256"),
    "hash_fast": lookup("fast"),
    "queue_static": queue("priority"),
    "queue_dynamic": queue("aging"),
    "queue_at_once": queue("aging-at-once"),
    "open_dynamic": open_queue("aging-at-once"),
    "open_lpm": open_queue("lpm"),
    "full_preempt": queue("cautious"),
}
OURS_ONLY = {
    *("decode_256_hooks", "decode_1024_hooks", "hash_fast", "queue_dynamic"),
    *("queue_at_once", "open_dynamic", "open_lpm", "full_preempt"),
}


def named(name: str) -> Load:
    """A load of the table, or ``decode_N`` for any N."""
    if name in LOADS:
        return LOADS[name]
    return decode(int(name.removeprefix("decode_")))

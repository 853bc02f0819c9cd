"""What a core reports to those who watch it: its requests, why they wait, and its steps."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.messages.stats import SchedulerStats

State = Literal["running", "waiting", "parked"]


class WatchedRequest(msgspec.Struct, array_like=True, frozen=True):
    """An unfinished request. Times are seconds before the answer."""

    request_id: str
    state: State
    priority: int
    cause: str  # why it waits, or got no tokens in the last step; empty if it got some
    since: float  # how long it has had its state
    age: float  # since its arrival
    num_prompt: int
    num_computed: int
    num_cached: int  # tokens found in the prefix cache when it first started
    num_output: int
    waits: dict[str, float]  # seconds by cause so far


class WatchedStep(msgspec.Struct, array_like=True, frozen=True):
    """A step, or several short ones in a row. ``tokens[i]`` tokens were computed for request
    ``names[i]``, an index in ``WatchedCore.names``; these are the requests with most tokens."""

    number: int  # of the last step
    num_steps: int
    age: float  # seconds between its begin and the answer
    seconds: float  # of all its steps together
    names: list[int]
    tokens: list[int]
    num_others: int  # tokens of all other requests
    causes: dict[str, int]  # most requests that waited at one time, by cause


class WatchedCore(msgspec.Struct, array_like=True, frozen=True):
    """A core at one moment. ``core_id``: a random text that differs for each start of a core."""

    core_id: str
    num_blocks: int  # KV blocks that requests can use
    stats: SchedulerStats | None
    requests: list[WatchedRequest]
    names: list[str]
    steps: list[WatchedStep]

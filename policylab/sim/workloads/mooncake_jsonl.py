"""Workloads from the JSONL files of Mooncake's traces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from math import inf
from typing import ClassVar

import msgspec
import numpy as np

from policylab.sim.job import Span
from policylab.sim.workloads.draws import RandomDraws
from policylab.sim.workloads.open_loop import Body
from policylab.sim.workloads.reader import (
    FileWorkload,
    JobPlace,
    JobRow,
    in_order,
    json_lines,
    opened,
)

BLOCK = 512


class _Line(msgspec.Struct):
    """One request in the file. ``timestamp`` is in milliseconds, lengths are in tokens."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


@dataclass(frozen=True, kw_only=True)
class MooncakeJSONL(FileWorkload):
    """Requests from a JSONL file of Mooncake's traces, with ``timestamp`` (ms), ``input_length``,
    ``output_length`` and ``hash_ids``: an id per 512 prompt tokens, equal for equal text.

    Timestamps in the public traces are rounded, so requests with the same timestamp are spread over
    the next ``tick`` seconds, or up to the next timestamp if that is earlier."""

    kind: ClassVar[str] = "mooncake-jsonl"
    block_size: ClassVar[int] = BLOCK

    tick: float = 3.0
    """Length of a tick in seconds, over which requests with the same timestamp are spread; 0:
    requests arrive exactly at their timestamps."""

    def __post_init__(self) -> None:
        FileWorkload.__post_init__(self)
        self.check("tick", self.tick, 0.0, 3600.0)

    def rows(self, dice: RandomDraws) -> Iterator[JobRow]:
        rng = dice.stream("ticks")
        groups = (
            (stamp, [body for _, body in rows])
            for stamp, rows in groupby(self._lines(), key=lambda row: row[0])
        )
        stamp, bodies = next(groups, (0.0, []))
        for coming, more in chain(groups, [(inf, [])]):
            yield from self._spread(rng, stamp, min(self.tick, coming - stamp), bodies)
            stamp, bodies = coming, more

    def _spread(
        self, rng: np.random.Generator, stamp: float, seconds: float, bodies: list[Body]
    ) -> Iterator[JobRow]:
        times = np.sort(rng.random(len(bodies))) * seconds + stamp
        for time, body in zip(times.tolist(), bodies, strict=True):
            yield JobRow(time, body)

    def _lines(self) -> Iterator[tuple[float, Body]]:
        last = -inf
        with opened(self.path) as file:
            for place, line in json_lines(self.path, file, 1, _Line):
                last = in_order(place, "timestamp", line.timestamp, line.timestamp / 1e3, last)
                yield last, _body(place, line)


def _body(place: JobPlace, line: _Line) -> Body:
    num_prompt = place.tokens("input_length", line.input_length)
    num_blocks = -(-num_prompt // BLOCK)
    if len(line.hash_ids) != num_blocks:
        expected = f"of {num_blocks} ids, one for each {BLOCK} of {num_prompt} tokens"
        raise place.error("hash_ids", line.hash_ids, expected)
    lengths = [BLOCK] * (num_blocks - 1) + [num_prompt - BLOCK * (num_blocks - 1)]
    prompt = tuple(
        Span(f"block {name}", length) for name, length in zip(line.hash_ids, lengths, strict=True)
    )
    return Body(prompt, place.tokens("output_length", line.output_length))

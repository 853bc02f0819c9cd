"""Outputs that cannot travel as they are: whoever is to blame fails, all others get theirs.

What a connector, a policy or a scheduler of the user's own puts into a request's end may be
anything; what the engine itself puts there always travels, unless it is too large.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from engine.errors import WireError
from engine.ipc.codec import plain_text
from engine.messages.columns import pick_rows, with_ends
from engine.messages.outputs import CoreOutputs, Finished
from engine.messages.wire import Aborted, Outputs

Encode = Callable[[msgspec.Struct], bytes]


class Mended(NamedTuple):
    """A batch that can travel, and the requests that failed so that it can."""

    batch: CoreOutputs
    failed: list[str]


def mended(batch: CoreOutputs, encode: Encode, why: str) -> Mended:
    """The batch with an error as the end of those whose outputs cannot travel.

    ``why``: what ``encode`` said of all of it. Together too large, those with log-probabilities
    fail.
    """
    if batch.stats is not None and _fault(encode, Outputs(_only_stats(batch))):
        batch = msgspec.structs.replace(batch, stats=None)
    faults = _faults_by_row(batch, encode)
    good = _without(batch, faults)
    if _fault(encode, Outputs(good)):
        rows = sorted(batch.logprobs.keys() | batch.prompt_logprobs.keys())
        faults |= {row: f"log-probabilities: {why}" for row in rows if row not in faults}
        good = _without(batch, faults)
    ids = batch.request_ids
    ends = [
        (ids[row], Finished(0, "error", message=plain_text(fault))) for row, fault in faults.items()
    ]
    return Mended(with_ends(good, ends), [name for name, _ in ends])


def mended_ends(ends: Sequence[Finished], encode: Encode) -> list[Finished]:
    """The ends of aborted requests, bare where what was to be told of them cannot travel."""
    return [
        Finished(end.index, end.reason, message=plain_text(fault))
        if (fault := _fault(encode, Aborted(0, [end])))
        else end
        for end in ends
    ]


def _faults_by_row(batch: CoreOutputs, encode: Encode) -> dict[int, str]:
    faults = {}
    for row in range(len(batch.request_ids)):
        alone = msgspec.structs.replace(pick_rows(batch, [row]), stats=None)
        if fault := _fault(encode, Outputs(alone)):
            faults[row] = fault
    return faults


def _without(batch: CoreOutputs, faults: Mapping[int, str]) -> CoreOutputs:
    return pick_rows(batch, [row for row in range(len(batch.request_ids)) if row not in faults])


def _only_stats(batch: CoreOutputs) -> CoreOutputs:
    return CoreOutputs([], [], [], batch.time, stats=batch.stats)


def _fault(encode: Encode, message: msgspec.Struct) -> str:
    """Why it cannot travel; "" if it can."""
    try:
        encode(message)
    except WireError as error:
        return str(error)
    return ""

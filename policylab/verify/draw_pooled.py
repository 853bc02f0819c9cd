"""Draws pooled requests in random cases, which return vectors in place of text."""

from __future__ import annotations

from random import Random

import msgspec

from engine.messages.params import SamplingParams
from engine.messages.pooling import PoolingParams
from engine.messages.requests import AddRequest
from policylab.verify.case import Add, Case

POOLED = 0.25  # share of cases with pooled requests
KINDS = (
    PoolingParams(),
    PoolingParams(),
    PoolingParams(task="token_embed"),
    PoolingParams(skip_reading_prefix_cache=True),
)


def with_pooled(case: Case, seed: int) -> Case:
    """The case, with pooled requests among or in place of the others for a part of the seeds. A
    separate random generator leaves the rest of the case unchanged."""
    rng = Random(f"pooled requests of {seed}")
    if rng.random() >= POOLED:
        return case
    share = rng.choice((0.3, 1.0))
    events = [
        msgspec.structs.replace(event, request=as_pooled(event.request, rng.choice(KINDS)))
        if isinstance(event, Add) and rng.random() < share
        else event
        for event in case.events
    ]
    return msgspec.structs.replace(case, events=events)


def as_pooled(add: AddRequest, pooling: PoolingParams) -> AddRequest:
    """The request for a vector in place of text."""
    return msgspec.structs.replace(
        add,
        params=SamplingParams(max_tokens=1),
        max_tokens=1,
        eos_token_ids=[],
        grammar=None,
        pooling=pooling,
    )

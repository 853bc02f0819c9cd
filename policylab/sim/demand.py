"""The mean demand of a workload on an engine, and the rate that fcfs can serve.

*Demand* is the least time in which a full engine can serve requests: the cost of all their rows and
tokens, plus the fixed cost of as many steps as their tokens, seats or KV need
(`policylab.sim.bounds`). So no scheduler serves more requests per second than 1 / mean demand.

The rate of fcfs is measured in the middle of a long run in which all requests arrive at once. The
requests of one run are longer or shorter than the average, which alone changes the rate by 8 % for
500 requests. Therefore the run only gives the ratio of elapsed time to the demand of its own
requests; the mean demand is computed from many more requests that are drawn but not served."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf, nan
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policylab.sim.bounds import Counts, WorkBound, work_of
from policylab.sim.job import ANSWER, Job
from policylab.sim.records import Requests
from policylab.sim.workloads.source import JobSource

MAX_TEXTS = 1_000_000
MIDDLE = (0.2, 0.8)
"""A run is measured between these shares of ended requests, while its engine is full."""

Mask = NDArray[np.bool_]


def demand(work: WorkBound, which: Mask | None = None) -> float:
    """Returns the least seconds in which a full engine can serve the requests of ``work``, or those
    selected by the mask ``which``."""
    rows = slice(None) if which is None else which
    steps = max(
        float(work.tokens[rows].sum()) / work.max_tokens,
        float((1 + work.decodes)[rows].sum()) / work.max_seqs,
        float(work.own_context[rows].sum()) / work.pool,
    )
    return work.cost.fixed * steps + float(work.busy()[rows].sum())


def most_per_second(requests: Requests, head: dict[str, Any]) -> float:
    """Returns an upper bound of the rate (requests per second) at which any scheduler can serve a
    run's requests, given its prefix hits; infinity if the step cost is unknown. ``head``: as in
    ``Run.head``."""
    work = work_of(requests, head)
    return inf if work is None else len(requests) / demand(work)


class DemandSample(NamedTuple):
    """Sizes of requests in tokens, one entry per request."""

    prompt: Counts
    known: Counts
    """Tokens at the start of the prompt that an earlier prompt or answer also had, so that they may
    be cached."""
    output: Counts

    def at_most(self, longest: int) -> DemandSample:
        """The requests that an engine with this maximum length accepts; longer outputs are cut."""
        taken = self.prompt < longest
        prompt, known, output = (column[taken] for column in self)
        return DemandSample(prompt, known, np.minimum(output, longest - prompt))


def drawn(source: JobSource) -> DemandSample:
    """Returns the sizes of all requests of a source in which all requests arrive at once."""
    seen: set[str] = set()
    rows = []
    for job in _jobs(source):
        rows.append((job.num_prompt, _known(job, seen), job.num_output))
        if len(seen) < MAX_TEXTS:
            seen.update(span.text for span in job.prompt)
    return DemandSample(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)


def _jobs(source: JobSource) -> Iterator[Job]:
    """Yields all requests of a source. Each one is reported as ended at once, because a source may
    have requests that arrive only after the end of others."""
    while source.next_time < inf:
        job = source.take()
        yield job
        source.ended(job, 0.0)


def _known(job: Job, seen: set[str]) -> int:
    """Returns the number of tokens at the start of the job's prompt that may be cached: those of
    texts in ``seen`` and of earlier answers."""
    number = 0
    for span in job.prompt:
        if span.text not in seen and not span.text.startswith(ANSWER):
            break
        number += span.length
    return number


def served_per_second(
    requests: Requests, head: dict[str, Any], own: DemandSample, every: DemandSample
) -> float:
    """Returns the rate (requests per second) at which a run's engine can serve requests of the
    sizes ``every``; NaN if the run served none.

    ``requests``, ``head``: records and options of the run, in which all requests arrived at once.
    ``own``: sizes of the run's requests."""
    work, last = work_of(requests, head), requests.times("last")
    ends = np.sort(last[~np.isnan(last)])
    if work is None or not len(every.prompt):
        return nan
    first, final = (float(ends[max(0, int(np.ceil(q * len(ends))) - 1)]) for q in MIDDLE)
    if final <= first:
        first, final = 0.0, float(ends[-1])
    inside = ((last > first) & (last <= final))[requests.done]
    ratio = (final - first) / demand(work, inside)
    return 1.0 / (ratio * mean_demand(every, work, share_found(work, own)))


def share_found(work: WorkBound, own: DemandSample) -> float:
    """Returns the share of cacheable prompt tokens that was found in the cache. ``own``: the sizes
    of the requests in ``work``."""
    return min(1.0, float(work.cached.sum()) / max(1, int(own.known.sum())))


def mean_demand(sample: DemandSample, work: WorkBound, found: float) -> float:
    """Returns the mean demand (seconds) of the requests in ``sample`` on the engine of ``work``.
    ``found``: the share of cacheable tokens that is found in the cache."""
    shortened = replace(
        work,
        arrival=np.zeros(len(sample.prompt)),
        prompt=sample.prompt,
        cached=(found * sample.known).astype(np.int64),
        output=sample.output,
    )
    return demand(shortened) / len(sample.prompt)

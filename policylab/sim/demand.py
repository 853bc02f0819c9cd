"""How long an engine needs for a workload's requests in the mean, and what fcfs makes of it.

*Demand* is the least time that requests take of a full engine: the fixed part of as many steps as
tokens, seats or KV area ask for (`policylab.sim.bounds`), and all that their rows and tokens cost.
No scheduler serves more requests a second than one over the mean demand.

What fcfs serves is measured in the middle of a long run whose requests all came at once. The
requests of one draw are longer or shorter than others, which alone moves such a rate by 8 % in 500
requests. So only the ratio of the time passed to the demand of those that ended is taken from the
run; the mean demand is that of many more requests, which are drawn and not served.
"""

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
from policylab.sim.workloads.source import Source

MAX_TEXTS = 1_000_000
MIDDLE = (0.2, 0.8)
"""Which part of the ends counts: before it the engine fills, after it seats become free."""

Mask = NDArray[np.bool_]


def demand(work: WorkBound, which: Mask | None = None) -> float:
    """Seconds of a full engine that these requests need at least, together."""
    rows = slice(None) if which is None else which
    steps = max(
        float(work.tokens[rows].sum()) / work.max_tokens,
        float((1 + work.decodes)[rows].sum()) / work.max_seqs,
        float(work.own_context[rows].sum()) / work.pool,
    )
    return work.cost.fixed * steps + float(work.busy()[rows].sum())


def most_per_second(requests: Requests, head: dict[str, Any]) -> float:
    """Requests a second that may come to a scheduler which ends as many of them as this run did,
    with the prefix hits that it had, and none can exceed; infinity where the cost of a step is not
    known. ``head``: the run's."""
    work = work_of(requests, head)
    return inf if work is None else len(requests) / demand(work)


class DemandSample(NamedTuple):
    """Sizes of drawn requests, an entry each, in tokens."""

    prompt: Counts
    known: Counts
    """Tokens at the beginning of the prompt that an earlier request had or generated."""
    output: Counts

    def at_most(self, longest: int) -> DemandSample:
        """The requests that an engine takes which allows at most this many tokens; it ends some
        of them early."""
        taken = self.prompt < longest
        prompt, known, output = (column[taken] for column in self)
        return DemandSample(prompt, known, np.minimum(output, longest - prompt))


def drawn(source: Source) -> DemandSample:
    """The sizes of all requests of a source whose requests all come at once."""
    seen: set[str] = set()
    rows = []
    for job in _jobs(source):
        rows.append((job.num_prompt, _known(job, seen), job.num_output))
        if len(seen) < MAX_TEXTS:
            seen.update(span.text for span in job.prompt)
    return DemandSample(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)


def _jobs(source: Source) -> Iterator[Job]:
    """All requests. Each ends at once, so that those that follow others come too."""
    while source.next_time < inf:
        job = source.take()
        yield job
        source.ended(job, 0.0)


def _known(job: Job, seen: set[str]) -> int:
    """Tokens of the prompt that could be in the cache."""
    number = 0
    for span in job.prompt:
        if span.text not in seen and not span.text.startswith(ANSWER):
            break
        number += span.length
    return number


def served_per_second(
    requests: Requests, head: dict[str, Any], own: DemandSample, every: DemandSample
) -> float:
    """Requests a second that the engine of a run can serve without end, if they are like those of
    ``every``. The run served those of ``own``, which had all come at once. NaN if it served none.
    """
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
    """Share found in the cache of what could have been there. ``own``: the requests of the work."""
    return min(1.0, float(work.cached.sum()) / max(1, int(own.known.sum())))


def mean_demand(sample: DemandSample, work: WorkBound, found: float) -> float:
    """Seconds that such a request needs in the mean of the engine of ``work``, if this share of
    what could be in the cache is."""
    shortened = replace(
        work,
        arrival=np.zeros(len(sample.prompt)),
        prompt=sample.prompt,
        cached=(found * sample.known).astype(np.int64),
        output=sample.output,
    )
    return demand(shortened) / len(sample.prompt)

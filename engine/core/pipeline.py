"""A core whose model is computed in stages: starts their processes, and is one worker to the core.

    core ── launch ──> PipelineGroup ──> the worker of rank 0, in this process: first stage
                            │                       │ hidden states
                            ├── ring ──> rank 1, ...: first and later stages
                            │                       │
    core <── collect ───────┴──── results ──── first rank of the last stage

Several plans are in flight, one for each stage or more. Each rank reads all calls from the ring, as
in a ``WorkerGroup``. On a CPU a stage computes a plan when it is launched, and the last one sends
the result at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from operator import floordiv
from typing import Any

import msgspec

from engine.config.decide import ModelFacts
from engine.config.engine import ResolvedConfig
from engine.config.model import ModelInfo
from engine.config.pooling import read_pooling
from engine.core.group import LocalWorker, OtherRanks, ResultCheck, WorkerGroup
from engine.core.rank_processes import GroupOptions, start_ranks
from engine.errors import RankError
from engine.ipc.plans import decode
from engine.messages.step import Column, StepResult
from engine.models.load import spec_of_stages
from engine.models.stages import Pipeline, check_count, given_parts
from engine.observe.guard import Failures
from engine.parallel.channel import Receiver, Shape
from engine.parallel.meeting import Meeting
from engine.parallel.stages import Junction, StagesMeeting
from engine.worker.feature import Feature
from engine.worker.rank import COLLECT
from engine.worker.rank_times import Waited
from engine.worker.stages import StageWorker

WIDEST = 4  # bytes of an element of hidden states, at most


class PipelineGroup(WorkerGroup):
    """The workers of all stages, as one worker."""

    def __init__(
        self, worker: LocalWorker, ranks: OtherRanks, results: Receiver, stage_size: int
    ) -> None:
        """results: of the last stage; stage_size: ranks of each stage."""
        super().__init__(worker, ranks)
        self._source = results
        self._stage_size = stage_size
        self._results = ResultCheck(ranks, 1 + len(ranks) - stage_size)
        self._block_bytes: list[int] = []  # of each rank

    def load(self) -> ModelFacts:
        """Load the model on all ranks. Returns facts that are true of all stages: the KV blocks are
        those of the largest one. Raises ``ConfigError``."""
        own, of_others = self._on_all("load")
        found = [own, *(msgspec.msgpack.decode(each, type=ModelFacts) for each in of_others)]
        self._block_bytes = [each.block_bytes for each in found]
        return common_facts(found, self._stage_size)

    def measure(self) -> int:
        """Bytes for the KV pool of the stage with the largest blocks, if all stages have as many
        blocks as each can hold. Raises ``ConfigError``."""
        own, of_others = self._on_all("measure")
        budgets = [own, *map(msgspec.msgpack.decode, of_others)]
        if self._worker.shares_memory:
            num_blocks = min(budgets) // sum(self._block_bytes)
        else:
            num_blocks = min(map(floordiv, budgets, self._block_bytes))
        return int(num_blocks * max(self._block_bytes))

    def shutdown(self) -> None:
        try:
            super().shutdown()
        finally:
            self._source.close()

    def preview(self, ticket: Any) -> Column | None:
        """Return ``None``: the last stage samples, and its tokens are not awaited here."""
        return None

    def collect(self, ticket: Any) -> StepResult:
        """Block until the last stage has computed a launched step, and return its results.

        Raises ``RankError`` if a rank has failed."""
        self._ranks.send(COLLECT)
        own: StepResult = self._own(self._worker.collect, ticket)
        before = self._source.waited_seconds
        result = decode(self._own(self._source.receive, own.step).tobytes(), StepResult)
        self._results.add(result)
        self._times.add(own.seconds + self._source.waited_seconds - before)
        return result

    def _waited(self) -> Waited:
        """What rank 0 has waited for others: in the first stage, for the results of the last."""
        operations, stages = super()._waited()
        return Waited(operations, stages + round(self._source.waited_seconds * 1e9))


def common_facts(found: Sequence[ModelFacts], stage_size: int) -> ModelFacts:
    """Facts that are true of all stages, from those of each rank. Raises ``RankError`` if ranks
    have loaded parts of different models."""
    first = found[0]
    for rank, facts in enumerate(found):
        same = facts.vocab_size, facts.kv_groups
        of_stage = found[rank // stage_size * stage_size]
        if same != (first.vocab_size, first.kv_groups) or facts != of_stage:
            raise RankError(f"rank {rank} has loaded another model: {facts}, rank 0: {first}")
    drafts = [facts.most_drafts for facts in found if facts.most_drafts is not None]
    return replace(
        first,
        block_bytes=max(facts.block_bytes for facts in found),
        snapshot_blocks=max(facts.snapshot_blocks for facts in found),
        most_drafts=min(drafts, default=None),
    )


def start_pipeline(
    config: ResolvedConfig,
    info: ModelInfo,
    features: Sequence[Feature],
    failures: Failures,
    make_features: Callable[[int], Sequence[Feature]],
    options: GroupOptions,
    *,
    on_gpus: bool,
) -> PipelineGroup:
    """Start the processes of ranks 1, 2, ..., and create the worker of rank 0. Raises
    ``ConfigError`` for a model that cannot be divided into stages."""
    sizes, num_threads = config.parallel, config.num_threads or 1
    count, stage_size = sizes.pipeline_parallel_size, sizes.tensor_parallel_size
    shape = shape_of_hidden(config, info)
    with ExitStack() as failing:
        meetings: list[Meeting] = []
        for _ in range(count if stage_size > 1 else 0):
            meetings.append(
                Meeting(
                    stage_size,
                    num_threads=sizes.num_workers * num_threads,
                    wait_seconds=options.ready_timeout,
                    on_gpus=on_gpus,
                )
            )
            failing.callback(meetings[-1].close)
        meeting = StagesMeeting(
            count, meetings, shape=shape, stage_size=stage_size, spins=options.spin_seconds > 0
        )
        failing.callback(meeting.close)
        arguments = config, info, make_features, meeting.junction, options.hang_timeout
        makes = [partial(make_stage, *arguments, rank) for rank in range(1, sizes.num_workers)]
        ranks = start_ranks(makes, options)
        failing.callback(ranks.close)
        own = stage_worker(
            config, info, features, failures, meeting.junction, options.hang_timeout, 0
        )
        results = meeting.junction.open_results()
        ranks.watch.stops.append(meeting.stop)
        ranks.watch.waits = meeting.is_waiting
        if own.collectives is not None:
            ranks.watch.stops.append(own.collectives.stop)
        ranks.at_end = meeting.close
        failing.pop_all()
    return PipelineGroup(own, ranks, results, stage_size)


def make_stage(
    config: ResolvedConfig,
    info: ModelInfo,
    make_features: Callable[[int], Sequence[Feature]],
    junction: Junction,
    step_seconds: float,
    rank: int,
) -> StageWorker:
    """Create the worker of another rank, in its process."""
    features = make_features(rank)
    return stage_worker(config, info, features, Failures(), junction, step_seconds, rank)


def stage_worker(
    config: ResolvedConfig,
    info: ModelInfo,
    features: Sequence[Feature],
    failures: Failures,
    junction: Junction,
    step_seconds: float,
    rank: int,
) -> StageWorker:
    """Create the worker of a rank. step_seconds: how long others may take for a step."""
    split = config.parallel.pipeline_layer_split or ()
    place = Pipeline(rank // junction.stage_size, junction.num_stages, tuple(split))
    links, pooling = junction.open(rank), read_pooling(info, config.model)
    worker = StageWorker(config, info, features, failures, links, place, pooling)
    worker.step_seconds = step_seconds
    return worker


def shape_of_hidden(config: ResolvedConfig, info: ModelInfo) -> Shape:
    """The shape of channels with room for the hidden states of all steps in flight. Raises
    ``ConfigError`` for a model without stages."""
    split, count = config.parallel.pipeline_layer_split, config.parallel.pipeline_parallel_size
    pools = read_pooling(info, config.model) is not None
    spec = spec_of_stages(info, count, pools=pools)
    check_count(count, len(spec.layers))  # before processes start, as the next
    if split is not None:
        given_parts(split, len(spec.layers))
    sched = config.scheduler
    largest = sched.max_num_batched_tokens * spec.hidden_size * WIDEST
    return Shape.of(largest, sched.num_steps_in_flight)

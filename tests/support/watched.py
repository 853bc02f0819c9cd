"""An engine that shows the logits of every position, of texts that its requests must follow."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine import EngineArgs, SamplingParams
from engine.config.decide import decide, resolve
from engine.config.engine import ResolvedConfig
from engine.config.model import ModelInfo, read_model_info
from engine.core.build import wire
from engine.core.group import WorkerGroup
from engine.core.inproc_client import InprocClient
from engine.core.rank_processes import GroupOptions, start_ranks
from engine.core.ranks import RankOfModel, threads_of_rank
from engine.layers.batch import ForwardBatch, Hidden
from engine.messages.requests import AddRequest
from engine.messages.stats import SchedulerStats
from engine.messages.step import StepPlan
from engine.models.model import Model
from engine.observe.guard import Failures
from engine.parallel.meeting import Meeting, Place
from engine.worker.device import make_platform, resolve_device
from engine.worker.steps import Pending
from engine.worker.worker import ModelWorker
from support.patience import WAIT_SECONDS

BLOCK = 16
SEATS = 16
Show = Callable[[str, list[int], torch.Tensor], None]
"""Takes a text's name, positions of it, and the logits behind them [len(positions), V]."""


class Way(NamedTuple):
    """One way to compute a text: how much of it is a prompt, and what the engine does with it."""

    prompt: Callable[[int], int]
    """Tokens of a text so long that are its prompt; the others are decoded."""
    options: dict[str, Any]
    warm: Callable[[int], int] | None = None
    """Tokens of each text that are in the prefix cache before."""
    room: float = SEATS
    """Texts that fit into the KV pool."""


ALONE = {"max_num_seqs": 1, "enable_prefix_caching": False}
WAYS = {
    "whole": Way(lambda size: size - 1, {**ALONE, "max_num_batched_tokens": 4096}),
    "chunks": Way(lambda size: size - 1, {**ALONE, "max_num_batched_tokens": 37}),
    "decode": Way(lambda size: 1, {**ALONE, "max_num_batched_tokens": 1}),
    "batched": Way(
        lambda size: size // 3,
        {"max_num_seqs": SEATS, "max_num_batched_tokens": 101, "enable_prefix_caching": False},
    ),
    "cached": Way(
        lambda size: 3 * size // 4,
        {"max_num_seqs": SEATS, "max_num_batched_tokens": 150},
        warm=lambda size: size // 2,
        room=1e9,
    ),
    "preempted": Way(
        lambda size: size // 4,
        {"max_num_seqs": 6, "max_num_batched_tokens": 64, "enable_prefix_caching": False},
        room=2.5,
    ),
}


class Watched:
    """A model that shows the logits of every row of each pass.

    Rows that the step reads are shown as they are served; the others come from a second pass that
    reads all, as requests with ``prompt_logprobs`` have it.
    """

    def __init__(self, model: Model, show: Callable[[list[int], torch.Tensor], None]) -> None:
        self._model = model
        self._show = show

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: ForwardBatch, kv: list[torch.Tensor]) -> Hidden:
        num_rows, model = int(batch.attn[0].query_start[-1]), self._model  # padding is behind them
        found = model.forward(batch, kv)
        served = range(num_rows) if batch.wanted is None else batch.wanted.rows.tolist()
        self._show(list(served), model.logits(found.last))
        others = sorted(set(range(num_rows)) - set(served))
        if others:
            # Not recorded: its attention plans are those of the pass before.
            whole = model.forward(replace(batch, wanted=None, recorder=None), kv).last
            self._show(others, model.logits(whole[others]))
        return found


class Watching:
    """Mixed into a worker on the CPU: it knows which token of which text each row is."""

    show_text: Show
    _names: dict[int, str]  # by slot
    _rows: list[tuple[str, int]]  # of the step: text and position

    def allocate(self, num_blocks: int) -> None:
        super().allocate(num_blocks)  # type: ignore[misc]
        self._names, self._rows = {}, []
        runner = self.driver.runner  # type: ignore[attr-defined]
        runner.machine = runner.machine._replace(model=Watched(runner.machine.model, self._seen))

    def launch(self, plan: StepPlan) -> Pending:
        self._names |= {seq.slot: seq.request_id for seq in plan.new}
        self._rows = [
            (self._names[slot], position)
            for slot, start, count in zip(
                *(column.tolist() for column in (plan.slots, plan.starts, plan.counts)), strict=True
            )
            for position in range(start, start + count)
        ]
        return super().launch(plan)  # type: ignore[misc,no-any-return]

    def _seen(self, rows: list[int], logits: torch.Tensor) -> None:
        places: dict[str, list[int]] = {}
        for place, row in enumerate(rows):
            places.setdefault(self._rows[row][0], []).append(place)
        for name, own in places.items():
            self.show_text(name, [self._rows[rows[place]][1] for place in own], logits[own])


class WatchedWorker(Watching, ModelWorker):
    """The worker of a model on the CPU."""


class WatchedRank(Watching, RankOfModel):
    """The worker of a rank on the CPU: all ranks compute all logits, and each could show them."""


def show_nothing(name: str, at: list[int], logits: torch.Tensor) -> None:
    """What ranks other than the first do with logits."""


def make_worker(config: ResolvedConfig, info: ModelInfo, show: Show) -> WatchedWorker | WorkerGroup:
    """The worker of a core, or its ranks, of which the first shows logits."""
    size = config.parallel.tensor_parallel_size
    if size == 1:
        one = WatchedWorker(config, info, make_platform(resolve_device("cpu")))
        one.show_text = show
        return one
    config = replace(config, num_threads=threads_of_rank(config))
    num_threads = size * (config.num_threads or 1)
    meeting = Meeting(size, num_threads=num_threads, wait_seconds=WAIT_SECONDS, on_gpus=False)
    arguments = config, info, meeting.place
    ranks = start_ranks(
        [partial(make_rank, *arguments, rank, show_nothing) for rank in range(1, size)],
        GroupOptions(log_level="error"),
    )
    ranks.at_end = meeting.close
    return WorkerGroup(make_rank(*arguments, 0, show), ranks)


def make_rank(
    config: ResolvedConfig, info: ModelInfo, place: Place, rank: int, show: Show
) -> WatchedRank:
    one = WatchedRank(config, info, (), Failures(), None, place.open(rank))
    one.show_text = show
    return one


def to_follow(params: SamplingParams, prompt: list[int]) -> Callable[..., torch.Tensor]:
    """A logits processor that leaves nothing but the next token of the request's text."""
    text = (params.extra_args or {})["text"]

    def process(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        token = text[len(prompt) + len(output)]
        logits.fill_(-torch.inf)
        logits[token] = 0.0
        return logits

    return process


def watch(
    path: str | Path, texts: Mapping[str, Sequence[int]], way: Way, show: Show, **options: Any
) -> SchedulerStats:
    """Compute texts in one way and show the logits behind all tokens of each but its last.

    What the prefix cache holds is computed before and not shown. ``options``: of the engine.
    """
    longest = max(map(len, texts.values()))
    each = -(-longest // BLOCK)
    args = EngineArgs(
        model=path,
        skip_tokenizer_init=True,
        log_level="error",
        max_model_len=longest,
        block_size=BLOCK,
        num_kv_blocks=2 + int(each * min(way.room, len(texts) + 1)),
        logits_processors=[to_follow],
        **{**way.options, **options},
    )
    is_shown = False

    def show_some(name: str, positions: list[int], logits: torch.Tensor) -> None:
        if is_shown:
            show(name, positions, logits)

    client = start(args, show_some)
    try:
        if way.warm is not None:
            for name, text in texts.items():
                add(client, f"warm {name}", text, way.warm(len(text)), max_tokens=1)
            finish(client)
        is_shown = True
        for name, text in texts.items():
            prompt = way.prompt(len(text))
            add(client, name, text, prompt, max_tokens=len(text) - prompt)
        finish(client)
        stats = client.latest_stats()
        assert stats is not None
        return stats
    finally:
        client.shutdown()


def start(args: EngineArgs, show: Show) -> InprocClient:
    """What ``engine.core.build.build_core`` makes, with a watched worker."""
    config = args.create_config()
    info = read_model_info(config.model.model)
    resolved = resolve(config, info, "cpu")
    worker = make_worker(resolved, info, show)
    decided = decide(resolved, info, worker.load(), worker.measure)
    worker.allocate(decided.num_kv_blocks)
    core = wire(resolved, decided, worker, clock=time.monotonic)
    return InprocClient(core, decided)


def add(
    client: InprocClient, name: str, text: Sequence[int], prompt: int, *, max_tokens: int
) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args={"text": list(text)}
    )
    client.add(
        AddRequest(name, list(text[:prompt]), params, 0, time.monotonic(), max_tokens=max_tokens)
    )


def finish(client: InprocClient) -> None:
    """Step until all is done. Raises ``RuntimeError`` for a request that failed."""
    while client.num_unfinished():
        for outputs in client.step():
            for end in outputs.finished:
                if end.reason != "length":
                    raise RuntimeError(f"{outputs.request_ids[end.index]} ended with {end}")

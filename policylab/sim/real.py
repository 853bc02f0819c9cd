"""Serve the jobs of a simulation in real time with a model, to validate the simulation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.config.args import EngineArgs
from engine.core.engine_core import Executor
from engine.core.inproc_client import InprocClient
from engine.errors import ConfigError, RequestError
from engine.frontend.prompt import SHOWN_ID_CHARS, RequestOptions
from engine.kv.manager import KVManager
from engine.llm_engine import LLMEngine
from engine.messages.params import SamplingParams
from engine.messages.requests import RequestOutput
from engine.messages.step import Column, Masks, StepPlan, StepResult
from policylab.sim.history import History
from policylab.sim.job import FIRST_TOKEN, Job, Span, tokens_of
from policylab.sim.kv_groups import KVPeaks
from policylab.sim.records import DONE, REFUSED, Requests, TokenTimes, totals_of
from policylab.sim.run import FORMAT, Engine, PolicyVariant, Run, name_of, weights_for
from policylab.sim.workloads import Workload

STOP = 0  # the token that ends a request at its drawn length
OTHER = 1  # replaces STOP if the model samples it too early


class LaunchedStep(NamedTuple):
    """A step in flight, and the mask ``ends`` [rows] of requests that get their last token in
    it."""

    ticket: Any
    ends: NDArray[np.bool_]  # [rows]


class ForcedLengths:
    """An executor that ends each request after a given number of output tokens, by replacing its
    last token by a stop token. Scheduler and policy do not know the number."""

    def __init__(
        self,
        inner: Executor[Any],
        num_slots: int,
        lengths: Mapping[str, int],
        kv: KVManager | None = None,
    ) -> None:
        self.kv_peaks = KVPeaks() if kv is None else KVPeaks(kv.groups)
        self._kv = kv
        self._inner = inner
        self._lengths = lengths  # output tokens by request id
        self._ends = np.full(num_slots, 2**31 - 1, dtype=np.int32)  # by slot: known tokens

    def launch(self, plan: StepPlan) -> LaunchedStep:
        for new in plan.new:
            shown = new.request_id.partition("/")[2]  # the front end puts a number before the id
            length = self._lengths.get(shown)
            self._ends[new.slot] = 2**31 - 1 if length is None else new.num_prompt + length
        if self._kv is not None:
            self.kv_peaks.note(self._kv)
        known = plan.starts + plan.counts + 1
        return LaunchedStep(self._inner.launch(plan), known >= self._ends[plan.slots])

    def collect(self, ticket: LaunchedStep) -> StepResult:
        result = self._inner.collect(ticket.ticket)
        if (result.counts > 1).any():
            raise ConfigError(
                "a real run needs one token per request and step; leave speculative decoding out"
            )
        tokens = np.where(result.token_ids == STOP, OTHER, result.token_ids)
        ends = ticket.ends[result.counts == 1]  # failed rows have no token
        result.token_ids = np.where(ends, STOP, tokens).astype(np.int32)
        return result

    def preview(self, ticket: LaunchedStep) -> Column | None:
        return self._inner.preview(ticket.ticket)

    def sample(self, ticket: LaunchedStep, masks: Masks | None) -> None:
        self._inner.sample(ticket.ticket, masks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def run_real(
    policy: Any,
    workload: Workload,
    engine: Engine,
    *,
    seed: int = 0,
    rate: float | None = None,
    step_log: str | Path | None = None,
    **options: Any,
) -> Run:
    """Serve the workload in real time with a model; the result has the format of a simulated run.

    ``options`` are engine options (``model``, ``dtype``, ``num_threads``, ...) and override those
    of ``engine``, whose ``cost`` is not used. Requests arrive at their times even if the engine is
    slow, and end at the workload's output lengths, which the policy does not know. Raises
    ``ConfigError``."""
    if workload.num_adapters:
        raise ConfigError(
            f"{workload} uses LoRA adapters, which only a simulation makes up; leave num_adapters "
            "out of a real run"
        )
    args = engine_args(policy, workload, engine, step_log=step_log, **options)
    with LLMEngine.from_engine_args(args) as made:
        return _RealRun(made, policy, workload, engine, seed=seed, rate=rate).finish()


def engine_args(policy: Any, workload: Workload, engine: Engine, **options: Any) -> EngineArgs:
    """The arguments of a real engine that correspond to the simulated ``engine``; ``options``
    override them."""
    name, policy_options = policy if isinstance(policy, PolicyVariant) else (policy, {})
    known = {option.name for option in fields(EngineArgs)}
    # A step log also has options that no user gives: the real engine derives them again.
    scheduler = {name: value for name, value in engine.scheduler.items() if name in known}
    report: dict[str, Any] = {
        "scheduling_policy": name,
        "policy_options": dict(policy_options),
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "num_kv_blocks": engine.num_blocks,
        "block_size": engine.block_size,
        "async_scheduling": engine.depth > 1,
        "length_predictor": engine.length_predictor,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "max_model_len": workload.max_model_len,
        "user_weights": weights_for(name, dict(policy_options), workload),
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        **scheduler,
    }
    return EngineArgs(**{**report, **options})


class _RealRun:
    """A real engine, a clock that starts with the run, and the records of the run."""

    def __init__(
        self,
        engine: LLMEngine,
        policy: Any,
        workload: Workload,
        described: Engine,
        *,
        seed: int,
        rate: float | None,
    ) -> None:
        client = engine.session.client
        if not isinstance(client, InprocClient):
            raise ConfigError("a real run needs its core in this process; leave core options out")
        self._engine = engine
        self._source = workload.source(seed, rate)
        self._max_tokens = workload.max_output
        self._vocab_size = client.decided.vocab_size
        self._tells_length = described.length_predictor == "oracle"
        self._lengths: dict[str, int] = {}
        core, num_slots = client.core, described.max_num_seqs
        scheduler: Any = core.scheduler
        kv = getattr(getattr(scheduler, "inner", scheduler), "kv", None)  # recorded or not
        self._executor = core.executor = ForcedLengths(core.executor, num_slots, self._lengths, kv)
        self._requests = Requests()
        self._tokens = TokenTimes(self._requests)
        self._history = History()
        self._places: dict[str, int] = {}
        self._jobs: dict[str, Job] = {}
        self._answers: dict[str, list[int]] = {}
        self._clock: Callable[[], float] = engine.session.clock
        self._start = 0.0
        self._head = {
            "format": FORMAT,
            "version": version("metronome-engine"),
            "kind": "real",
            "policy": name_of(policy),
            "workload": str(workload),
            "seed": seed,
            "rate": workload.natural_rate if rate is None else rate,
        }

    def finish(self) -> Run:
        """Serve the run until all its requests have ended, and return its results."""
        source, engine = self._source, self._engine
        tokens_of([Span("", 1)])  # draws the table of all texts before the clock starts
        self._start = self._clock()
        while source.next_time < inf or engine.has_unfinished_requests():
            now = self._clock() - self._start
            while source.next_time <= now:
                self._add(source.take())
            if engine.has_unfinished_requests():
                self._note(engine.step())
            elif source.next_time < inf:
                time.sleep(max(0.0, source.next_time - (self._clock() - self._start)))
        return self._result()

    def _add(self, job: Job) -> None:
        place = self._requests.add(job)
        self._history.came()
        self._lengths[job.request_id[:SHOWN_ID_CHARS]] = job.num_output
        tokens = job.tokens(self._answers)
        room = self._vocab_size - FIRST_TOKEN
        prompt = [FIRST_TOKEN + token % room if token >= FIRST_TOKEN else token for token in tokens]
        try:
            self._engine.add_request(
                job.request_id, prompt, self._params(job), **self._options(job)
            )
        except RequestError:
            self._requests.end(place, REFUSED)
            self._source.ended(job, self._clock() - self._start)
            return
        self._places[job.request_id] = place
        self._jobs[job.request_id] = job

    def _params(self, job: Job) -> SamplingParams:
        return SamplingParams(
            max_tokens=job.limit(self._max_tokens),
            temperature=0.0,
            ignore_eos=True,
            stop_token_ids=[STOP],
            output_kind="delta",
        )

    def _options(self, job: Job) -> RequestOptions:
        options: RequestOptions = {
            "arrival_time": self._start + job.arrival,
            "priority": job.priority,
            "user": job.user,
        }
        if job.deadline is not None:
            options["deadline"] = self._start + job.arrival + job.deadline
        if job.tbt is not None:
            options["tbt"] = job.tbt
        if hints := job.hints_for(self._tells_length):
            options["hints"] = hints
        return options

    def _note(self, outputs: list[RequestOutput]) -> None:
        came: dict[float, list[str]] = {}
        for output in outputs:
            metrics = output.metrics
            assert metrics is not None
            if output.outputs[0].token_ids and metrics.last_token_time is not None:
                came.setdefault(metrics.last_token_time, []).append(output.request_id)
        for moment, ids in sorted(came.items()):
            self._tokens.came(ids, self._places, moment - self._start)
        for output in outputs:
            self._answers.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
            if output.finished:
                self._end(output)

    def _end(self, output: RequestOutput) -> None:
        place, metrics = self._places.pop(output.request_id), output.metrics
        assert metrics is not None
        reason = output.outputs[0].finish_reason
        self._requests.end(place, DONE if reason in ("stop", "length") else str(reason))
        if metrics.scheduled_time is not None:
            self._requests.times("scheduled")[place] = metrics.scheduled_time - self._start
        self._requests.counts("num_cached")[place] = output.num_cached_tokens
        self._requests.counts("num_preempted")[place] = metrics.num_preemptions
        self._requests.wait(place, metrics.waits)
        self._history.report(place, metrics.events, metrics.waits, self._start)
        self._history.ended(place, self._clock() - self._start)
        self._tokens.settle()
        self._tokens.forget()
        self._source.ended(self._jobs.pop(output.request_id), self._clock() - self._start)

    def _result(self) -> Run:
        self._tokens.settle()
        stats = self._engine.stats()
        assert stats is not None
        return Run(
            head=self._head,
            requests=self._requests,
            gaps=self._tokens.gaps,
            steps=None,
            totals=totals_of(stats, self._executor.kv_peaks),
            hook_seconds=sum(stats.hook_seconds.values()),
            history=self._history,
        )

"""LLMEngine: add requests, step, read outputs, all in the caller's thread."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Unpack

from engine.config.args import EngineArgs
from engine.errors import ConfigError
from engine.frontend.prompt import Prompt, RequestOptions
from engine.frontend.session import HeldInterrupt, PauseScope, Session
from engine.messages.params import SamplingParams
from engine.messages.requests import RequestOutput, as_request_ids
from engine.messages.stats import SchedulerStats
from engine.observe.stats_log import TokenCounts
from engine.text.tokenizer import Tokenizer


class LLMEngine:
    """The engine at its own pace: every ``step`` computes one batch and returns its outputs.

    Times in outputs, ``arrival_time`` and ``deadline`` are seconds of ``time.monotonic``.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._ready: list[RequestOutput] = []  # outputs that no step has returned yet

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLMEngine:
        """Load model and tokenizer. Raises ``ConfigError`` for what cannot work."""
        return cls(Session.open(args.create_config()))

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> None:
        """Queue a request; its outputs come from ``step`` under this id.

        Options: ``priority`` (lower is more urgent), ``user``, ``arrival_time``, ``deadline`` and
        ``hints`` for the scheduling policy; ``timeout`` and ``queue_timeout``, seconds from its
        arrival after which it ends with finish reason ``"deadline"``, the second only if it has not
        started by then. Raises ``RequestError`` naming value, limit and way out, ``RefusedError``
        (one of those) if the queue is full; other requests are not affected.
        """
        self.session.submit(self.session.inputs.process(request_id, prompt, params, options))

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Stop one request or several; unknown ids do nothing.

        The next ``step`` returns their last outputs, with finish reason ``"abort"``; with text
        processes it may be a later one, when their text has come.
        """
        self._ready += self.session.abort(as_request_ids(request_id))

    def step(self) -> list[RequestOutput]:
        """Compute one batch; outputs of the requests that moved, in no particular order.

        An interrupt is raised when the batch is done; the next call returns its outputs.
        """
        if self.session.has_unfinished:
            with HeldInterrupt():
                self._ready += self.session.step()
        outputs, self._ready = self._ready, []
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Is an output still to come?"""
        return self.session.has_unfinished or bool(self._ready)

    def get_num_unfinished_requests(self) -> int:
        return self.session.outputs.num_unfinished

    def stats(self) -> SchedulerStats | None:
        """Gauges and counters of the scheduler: running, waiting, KV use, prefix hits."""
        return self.session.stats()

    def token_counts(self) -> TokenCounts:
        """Tokens and finished requests since the engine started."""
        return self.session.outputs.counts

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forget all cached prefixes. False, and nothing happens, while requests use them.

        ``reset_running`` sends running requests back to the queue first; they compute again.
        """
        return bool(self.session.client.call("reset_prefix_cache", reset_running))

    def pause(self, what: PauseScope = "all") -> None:
        """Compute nothing until ``resume``; ``"new"``: what runs goes on, the others wait.

        Requests may be added and aborted meanwhile; deadlines go on to count.
        """
        self.session.client.call("pause", what)

    def resume(self) -> None:
        """End a pause; harmless without one."""
        self.session.client.call("resume")

    def start_profile(self) -> None:
        """Record what the worker does, until ``stop_profile``.

        Keep it short: every step adds tens of kilobytes. Raises ``ConfigError`` if the engine was
        started without ``torch_profiler_dir``, or if a profile is being recorded already.
        """
        self.session.client.call("profile", "start")

    def stop_profile(self) -> list[str]:
        """Write what was recorded; paths of the traces, one or more of each core.

        Takes seconds for a long profile, in which nothing is computed. Raises ``ConfigError`` if
        none is being recorded.
        """
        return list(self.session.client.call("profile", "stop"))

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ``ConfigError`` if none was loaded."""
        if self.session.tokenizer is None:
            raise ConfigError("no tokenizer: the engine was started with skip_tokenizer_init")
        return self.session.tokenizer

    def shutdown(self) -> None:
        """Let go of model and memory; harmless when repeated."""
        self.session.shutdown()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

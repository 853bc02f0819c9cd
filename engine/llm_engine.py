"""LLMEngine: a synchronous engine that the caller steps in its own thread."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType
from typing import Unpack

from engine.config.args import EngineArgs
from engine.errors import ConfigError
from engine.frontend.adapters import POLL_SECONDS, AdapterLoad
from engine.frontend.encoding import Prompt
from engine.frontend.prompt import RequestOptions
from engine.frontend.session import HeldInterrupt, PauseScope, Session
from engine.messages.adapters import AdapterInfo, LoRARequest
from engine.messages.params import SamplingParams
from engine.messages.pooling import PoolingParams
from engine.messages.requests import RequestOutput, as_request_ids
from engine.messages.stats import SchedulerStats
from engine.observe.stats_log import TokenCounts
from engine.text.tokenizer import Tokenizer


class LLMEngine:
    """An engine that computes one batch in each ``step`` and returns its outputs.

    Times in outputs, ``arrival_time`` and ``deadline`` are seconds of ``time.monotonic``.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._ready: list[RequestOutput] = []  # outputs that no step has returned yet

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLMEngine:
        """Load model and tokenizer. Raises ``ConfigError`` for options that cannot work."""
        return cls(Session.open(args.create_config()))

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> None:
        """Add a request to the queue. ``step`` returns its outputs, which have this id. With
        ``PoolingParams`` its only output has the result in ``pooled``.

        Options: ``priority`` (lower values first), ``user``, ``arrival_time``, ``deadline`` and
        ``hints`` for the scheduling policy; ``lora_request``: the LoRA adapter; ``timeout``,
        ``queue_timeout``: seconds after which the request ends with reason ``"deadline"``, the
        latter only if it has not started. Raises ``RequestError`` for an invalid request, or its
        subclass ``RefusedError`` if the queue is full.
        """
        self.prepare_loras([options.get("lora_request")])
        inputs = self.session.inputs
        if isinstance(params, PoolingParams):
            (prompt,) = inputs.pooled.with_prompts([prompt])
        self.session.submit(inputs.process(request_id, prompt, params, options))

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Abort one or several requests; unknown ids are ignored.

        The next ``step``, or a later one if separate processes detokenise, returns the last output
        of each request, with finish reason ``"abort"``.
        """
        self._ready += self.session.abort(as_request_ids(request_id))

    def step(self) -> list[RequestOutput]:
        """Compute one batch. Returns outputs of requests with new tokens, in no particular order.

        An interrupt is raised when the batch is done; the next ``step`` then returns its outputs.
        """
        if self.session.has_unfinished:
            with HeldInterrupt():
                self._ready += self.session.step()
        outputs, self._ready = self._ready, []
        return outputs

    def has_unfinished_requests(self) -> bool:
        """True if a later ``step`` will return outputs."""
        return self.session.has_unfinished or bool(self._ready)

    def get_num_unfinished_requests(self) -> int:
        return self.session.outputs.num_unfinished

    def stats(self) -> SchedulerStats | None:
        """The scheduler's statistics, such as running requests, KV use and prefix hits."""
        return self.session.stats()

    def token_counts(self) -> TokenCounts:
        """Tokens and finished requests since the engine started."""
        return self.session.outputs.counts

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Drop all cached prefixes. Returns False and drops none while requests use any of them.

        ``reset_running``: first preempt running requests, which must compute their KV again.
        """
        return bool(self.session.client.call("reset_prefix_cache", reset_running))

    def reset_encoder_cache(self) -> None:
        """Drop the encoder outputs that no request uses now. Later requests encode their pictures
        again, also where an output is still in use."""
        self.session.client.call("reset_encoder_cache")

    def reset_mm_cache(self) -> None:
        """Drop processed pictures that no request uses. Their encoder outputs stay."""
        self.session.reset_contents()

    def pause(self, what: PauseScope = "all") -> None:
        """Stop computing ``"all"`` requests, or only ``"new"`` ones (not running yet), until
        ``resume``.

        During a pause, requests may be added and aborted, and may reach their deadlines.
        """
        self.session.client.call("pause", what)

    def resume(self) -> None:
        """End a pause, if there is one."""
        self.session.client.call("resume")

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter, on all cores or on none. Returns False if it is loaded already.

        Raises ``RequestError`` for a name or number that another adapter has, and ``ConfigError``
        with the reason if the adapter cannot be used."""
        return self._load(self.session.adapters.loading(lora_request)) is not None

    def prepare_loras(self, lora_requests: Iterable[LoRARequest | None]) -> None:
        """Load those of these adapters that come from memory, before requests name them."""
        for request in {id(request): request for request in lora_requests}.values():
            self._load(self.session.adapters.needed_for(request))

    def remove_lora(self, lora_id: int | str) -> bool:
        """Unload a LoRA adapter by its ``lora_int_id`` or name. Its requests end with it, new ones
        are refused. Returns False for an unknown one."""
        return self.session.adapters.remove(lora_id) is not None

    def list_loras(self) -> set[int]:
        """The ``lora_int_id`` of each loaded adapter."""
        return {adapter.number for adapter in self.session.adapters.all()}

    def lora_adapters(self) -> list[AdapterInfo]:
        """The loaded adapters: names, numbers, paths, digests and sizes."""
        return self.session.adapters.all()

    def pin_lora(self, lora_id: int | str) -> bool:
        """Keep an adapter in memory and in its slot until it is removed. Returns False for an
        unknown one. Raises ``ConfigError`` for more than ``max_loras`` - 1 of them."""
        return self.session.adapters.pin(lora_id)

    def start_profile(self) -> None:
        """Record a torch profile of the worker until ``stop_profile``.

        Every step adds tens of kilobytes. Raises ``ConfigError`` if the engine was started without
        ``torch_profiler_dir``, or if a profile is already being recorded.
        """
        self.session.client.call("profile", "start")

    def stop_profile(self) -> list[str]:
        """Stop the profile and return the paths of its traces, one or more for each core.

        Writing a long profile takes seconds, during which the engine computes nothing. Raises
        ``ConfigError`` if no profile is being recorded.
        """
        return list(self.session.client.call("profile", "stop"))

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ``ConfigError`` if none was loaded."""
        if self.session.tokenizer is None:
            raise ConfigError("no tokenizer: the engine was started with skip_tokenizer_init")
        return self.session.tokenizer

    def shutdown(self) -> None:
        """Free the model and its memory. A second call does nothing."""
        self.session.shutdown()

    def _load(self, load: AdapterLoad | None) -> AdapterInfo | None:
        """Wait until an adapter is loaded, and return it; ``None`` if there is nothing to load."""
        if load is None:
            return None
        load.begin()
        while (loaded := load.poll()) is None:
            time.sleep(POLL_SECONDS)
        return loaded

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

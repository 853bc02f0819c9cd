"""Custom logits processors: plug-in code that runs after penalties and before temperature.

A factory is called once for every request. It returns ``None``, or a processor that is called
before each token of that request:

    def only_even(params: SamplingParams, prompt_token_ids: list[int]):
        if not (params.extra_args or {}).get("only_even"):
            return None

        def process(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            logits[1::2] = -torch.inf
            return logits

        return process

Requests pass options to factories in ``SamplingParams.extra_args``. ``logits`` [V] float32 are
those of the request, after masks, bias and penalties; a processor may change them in place or
return another tensor of the same shape. If it raises, returns anything else, or leaves NaN or +inf,
only this request fails. The factory is called again after a preemption, so any state must be
derivable from the output tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.errors import EngineError
from engine.messages.params import SamplingParams
from engine.messages.step import NewSeq

LogitsProcessor = Callable[[list[int], torch.Tensor], torch.Tensor]
LogitsProcessorFactory = Callable[[SamplingParams, list[int]], LogitsProcessor | None]


class ProcessorError(EngineError):
    """A processor failed; the message has its name and the reason."""


class NamedProcessor:
    """A factory's processor for one request, with its name for error messages."""

    def __init__(self, factory: LogitsProcessorFactory, seq: NewSeq) -> None:
        self._name = getattr(factory, "__qualname__", type(factory).__qualname__)
        self._failure: Exception | None = None
        self._process: LogitsProcessor | None = None
        try:
            self._process = factory(seq.params, seq.token_ids[: seq.num_prompt])
        except Exception as error:  # an error in plug-in code fails only its request
            self._failure = error

    @property
    def is_wanted(self) -> bool:
        return self._process is not None or self._failure is not None

    def __call__(self, output_token_ids: list[int], logits: torch.Tensor) -> None:
        """Replace logits [V] by the processor's result. The processor gets a copy of the token
        list. Raises ``ProcessorError``."""
        result = self._run(list(output_token_ids), logits)
        if not isinstance(result, torch.Tensor) or result.shape != logits.shape:
            found = list(result.shape) if isinstance(result, torch.Tensor) else type(result)
            raise ProcessorError(
                f"logits processor {self._name} returned {found}, "
                f"must return a tensor of shape {list(logits.shape)}"
            )
        if result.data_ptr() != logits.data_ptr():
            logits.copy_(result)

    def _run(self, output_token_ids: list[int], logits: torch.Tensor) -> object:
        failure = self._failure
        if self._process is not None:
            try:
                return self._process(output_token_ids, logits)
            except Exception as error:  # raised below with the processor's name
                failure = error
        raise ProcessorError(
            f"logits processor {self._name} raised {type(failure).__name__}: {failure}"
        ) from failure

"""Custom logits processors: plug-in code between the penalties and the temperature.

A factory is called once for every request. It returns ``None`` if it leaves the request alone, else
a processor, called before each token of that request:

    def only_even(params: SamplingParams, prompt_token_ids: list[int]):
        if not (params.extra_args or {}).get("only_even"):
            return None

        def process(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            logits[1::2] = -torch.inf
            return logits

        return process

Requests address factories through ``SamplingParams.extra_args``. ``logits`` [V] float32 is the
request's own row, after masks, bias and penalties; a processor may change it in place or return
another tensor of its shape. Raising, returning anything else or leaving NaN or +inf fails this
request alone. After a preemption the factory is called again, so keep no state that the output
tokens do not give back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.errors import EngineError
from engine.messages.params import SamplingParams
from engine.messages.step import NewSeq

LogitsProcessor = Callable[[list[int], torch.Tensor], torch.Tensor]
LogitsProcessorFactory = Callable[[SamplingParams, list[int]], LogitsProcessor | None]


class ProcessorError(EngineError):
    """A processor failed; the message names it and the reason."""


class NamedProcessor:
    """One factory's processor for one request, and its name for messages."""

    def __init__(self, factory: LogitsProcessorFactory, seq: NewSeq) -> None:
        self._name = getattr(factory, "__qualname__", type(factory).__qualname__)
        self._failure: Exception | None = None
        self._process: LogitsProcessor | None = None
        try:
            self._process = factory(seq.params, seq.token_ids[: seq.num_prompt])
        except Exception as error:  # an error of plug-in code fails its request alone
            self._failure = error

    @property
    def is_wanted(self) -> bool:
        return self._process is not None or self._failure is not None

    def __call__(self, output_token_ids: list[int], logits: torch.Tensor) -> None:
        """Replace logits [V] by the processor's result. Raises ``ProcessorError``.

        Each processor gets its own copy of the list and may change it.
        """
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
            except Exception as error:  # see above
                failure = error
        raise ProcessorError(
            f"logits processor {self._name} raised {type(failure).__name__}: {failure}"
        ) from failure

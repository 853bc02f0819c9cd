"""Operations on request state stored by slot on the device; the host need not know sampled tokens.

The device of the tensors selects the implementation. Signatures and results: `kernels.reference`,
in `index` (a step's inputs, block tables, advancing), `sampling` (tokens) and `logits` (masks,
edits, penalties, log-probabilities). A slot of -1 is padding everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch

from kernels.bodies import triton_for
from kernels.cpu import logits as cpu_logits
from kernels.cpu import sampling as cpu_sampling
from kernels.cpu import sampling_parts as cpu_parts
from kernels.cpu import slots as cpu_slots
from kernels.reference import index, logits, sampling
from kernels.reference.index import REJECTED, UNKNOWN, Drawn, Inputs, SlotState
from kernels.reference.logits import BadWords, Edits, Penalties, new_penalties
from kernels.reference.sampling import Rows, SamplingColumns

__all__ = [
    "REJECTED",
    "UNKNOWN",
    "BadWords",
    "Drawn",
    "Edits",
    "Inputs",
    "Penalties",
    "Rows",
    "SamplingColumns",
    "SlotState",
    "advance",
    "apply_bitmask",
    "apply_edits",
    "are_sound",
    "best_of_parts",
    "count_tokens",
    "forbid_words",
    "grow_block_tables",
    "new_penalties",
    "penalise_rows",
    "preparation",
    "remember",
    "sample",
    "sample_allowed",
    "sample_part",
    "seat",
    "token_logprobs",
]

P = ParamSpec("P")
T = TypeVar("T")


def _by_device(reference: Callable[P, T], cpu: ModuleType) -> Callable[P, T]:
    """Returns a function that runs the operation of the same name for the device of its first
    argument, which is a tensor or a tuple that begins with one."""
    name = reference.__name__

    @wraps(reference)
    def operation(*args: Any, **options: Any) -> Any:
        first = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
        return getattr(triton_for(first) or cpu, name)(*args, **options)

    return operation


preparation = _by_device(index.preparation, cpu_slots)
grow_block_tables = _by_device(index.grow_block_tables, cpu_slots)
remember = _by_device(index.remember, cpu_slots)
advance = _by_device(index.advance, cpu_slots)
sample = _by_device(sampling.sample, cpu_sampling)
sample_allowed = _by_device(sampling.sample_allowed, cpu_sampling)
sample_part = _by_device(sampling.sample_part, cpu_parts)
best_of_parts = _by_device(sampling.best_of_parts, cpu_parts)
are_sound = _by_device(logits.are_sound, cpu_logits)
apply_bitmask = _by_device(logits.apply_bitmask, cpu_logits)
apply_edits = _by_device(logits.apply_edits, cpu_logits)
forbid_words = _by_device(logits.forbid_words, cpu_logits)
seat = _by_device(logits.seat, cpu_logits)
count_tokens = _by_device(logits.count_tokens, cpu_logits)
penalise_rows = _by_device(logits.penalise_rows, cpu_logits)
token_logprobs = _by_device(logits.token_logprobs, cpu_logits)

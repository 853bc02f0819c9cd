"""Steps that are repeated: their launches are recorded once and started by one call.

A decode step of a model of many layers is a hundred launches, and what Python does around each of
them takes as long as the smallest. As a CUDA graph does on a GPU, a recording keeps the launches of
one step with the memory they use. A later step of as many sequences writes its inputs to the same
addresses, tells the attention's plan anew, and runs all of it without Python in between.

A recording is kept only if the work was nothing but launches: whatever else torch was asked to
compute meanwhile would be missing in the next step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels.cpu.attention import PlanKey, plan_again
from kernels.cpu.attention.plan import Plan
from kernels.cpu.native import Launch, noted
from kernels.cpu.team import JOB_WORDS, TEAM, launch_all
from kernels.meta import AttentionMeta

MAX_BYTES = 64 << 20  # of the memory that is kept for recorded steps

Work = Callable[[torch.Tensor], torch.Tensor]
"""Launches for an input, and their output."""

# What computes nothing: memory that is taken, and other looks at the same.
_HARMLESS = {
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"),
    *("view", "_unsafe_view", "reshape", "_reshape_alias", "slice", "select", "split"),
    *("split_with_sizes", "narrow", "unsqueeze", "squeeze", "transpose", "t", "permute", "expand"),
    *("as_strided", "alias", "detach", "unbind", "chunk"),
}


class Recording:
    """The launches of a step, in order, with the memory that they read and write."""

    def __init__(
        self,
        given: torch.Tensor,
        result: torch.Tensor,
        launches: list[Launch],
        plans: dict[PlanKey, Plan],
        owned: list[torch.Tensor],
    ) -> None:
        self._given = given
        self._result = result
        self._plans = plans
        self._owned = owned
        self._jobs = _jobs_of(launches)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in owned}
        self.num_bytes = sum(storage.nbytes() for storage in storages.values())

    def replay(self, given: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        """The result for another input; it is overwritten by the next replay."""
        self._given.copy_(given)
        kept = plan_again(meta, self._plans)
        launch_all(TEAM.control, TEAM.syscall, self._jobs.ctypes.data, len(self._jobs))
        del kept
        return self._result


class Key(NamedTuple):
    """What a recording is of. Addresses of all else are those of the model and of the inputs, which
    never change."""

    num_tokens: int
    kv: int  # address of the first layer's cache


class Recorder:
    """Repeats a model's decode steps: the second of a size is recorded, later ones replayed."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Key, Recording] = OrderedDict()
        self._seen: set[Key] = set()
        self._unfit: set[Key] = set()

    @property
    def num_bytes(self) -> int:
        """Of the memory that is kept for recorded steps."""
        return sum(recording.num_bytes for recording in self._kept.values())

    def run(self, work: Work, given: torch.Tensor, meta: AttentionMeta, kv: int) -> torch.Tensor:
        """What the work makes of an input, which it may overwrite. It must be the same each time.

        The result is overwritten by the next step.
        """
        key = Key(len(given), kv)
        recording = self._kept.get(key)
        if recording is not None:
            self._kept.move_to_end(key)
            return recording.replay(given, meta)
        if key in self._unfit or key not in self._seen:
            self._seen.add(key)
            return work(given)
        result, recording = record(work, given, meta)
        if recording is None or recording.num_bytes > self._max_bytes:
            self._unfit.add(key)
        else:
            self._keep(key, recording)
        return result

    def _keep(self, key: Key, recording: Recording) -> None:
        self._kept[key] = recording
        while self.num_bytes > self._max_bytes:
            oldest, _ = self._kept.popitem(last=False)
            self._seen.remove(oldest)


def record(
    work: Work, given: torch.Tensor, meta: AttentionMeta
) -> tuple[torch.Tensor, Recording | None]:
    """Do the work and record it, if it can be repeated by its launches alone."""
    given = given.clone()
    with noted() as launches, _Watch() as watch:
        result = work(given)
    plans = {key: plan for key, plan in meta.scratch.items() if isinstance(plan, Plan)}
    if watch.has_computed or len(plans) < len(meta.scratch):
        return result, None
    return result, Recording(given, result, launches, plans, [given, *watch.made])


class _Watch(TorchDispatchMode):
    """Sees what torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.has_computed = False
        self.made: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in _HARMLESS:
            # A conversion to what a tensor is already gives the tensor itself.
            self.has_computed |= not args or result is not args[0] or func._schema.is_mutable
        self.made += [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        return result


def _jobs_of(launches: list[Launch]) -> NDArray[np.int64]:
    jobs = np.zeros((len(launches), JOB_WORDS), np.int64)
    for job, launch in zip(jobs, launches, strict=True):
        job[:2] = launch.body, launch.threads
        job[3 : 3 + len(launch.parameters)] = launch.parameters
    return jobs

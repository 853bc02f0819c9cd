"""Steps that are repeated: their launches are recorded once and started by one call.

A decode step of a model of many layers is a hundred launches, and what Python does around each of
them takes as long as the smallest. As a CUDA graph does on a GPU, a recording keeps the launches of
one step with the memory they use. A later step of as many tokens writes its inputs to the same
addresses, tells the attention's plan anew, and runs all of it without Python in between.

Steps with chunks of prompts have any number of tokens. Where tiles compute sixteen rows at once,
such a step is made up to a multiple of that with padding, so that there are few kinds of them.

Memory between the launches comes from one arena, in which each recording begins at the start: no
two of them run at once. A recording is kept only if the work was nothing but launches: whatever
else torch was to compute meanwhile would be missing in the next step.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right, insort
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels.cpu.attention import PlanKey, plan_again
from kernels.cpu.attention.plan import AttentionPlan
from kernels.cpu.native import NativeLaunch, noted
from kernels.cpu.team import JOB_WORDS, TEAM, launch_all
from kernels.meta import AttentionMeta

MAX_BYTES = 64 << 20  # of the arena, of which only what is written takes memory
MOST_MIXED = 256  # tokens of a step with chunks: Python takes little of a larger one
MIXED_STEP = 16  # tokens that are one row of tiles

Work = Callable[[torch.Tensor], torch.Tensor]
"""Launches for an input, and their output. What it works out from a tensor's numbers on the host,
unseen by torch, it must work out from what does not change between steps."""

_ALIGNED = 64  # bytes
_NEW = {"empty", "empty_like", "new_empty"}


class Recording:
    """The launches of a step, in order."""

    def __init__(
        self,
        given: torch.Tensor,
        result: torch.Tensor,
        launches: list[NativeLaunch],
        plans: dict[PlanKey, AttentionPlan],
        num_bytes: int,
    ) -> None:
        self.bytes_a_token = -(-num_bytes // len(given))
        self._given = given
        self._result = result
        self._plans = plans
        self._jobs = _jobs_of(launches)

    def replay(self, given: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        """The result for another input; it is overwritten by the next step."""
        self._given.copy_(given)
        kept = plan_again(meta, self._plans)
        launch_all(TEAM.control, TEAM.syscall, self._jobs.ctypes.data, len(self._jobs))
        del kept
        return self._result


class Recorder:
    """Repeats a model's steps: the second of a kind is recorded, later ones replayed.

    most_mixed: tokens of a step with chunks of prompts, at most; 0 repeats decodes alone.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, *, most_mixed: int = 0) -> None:
        self._memory = torch.empty(max_bytes, dtype=torch.uint8)
        self._most_mixed = most_mixed
        self.forget()

    def mixed_size(self, num_tokens: int) -> int:
        """Tokens that a step with chunks is made up to, to be recorded; 0: it is not."""
        size = -(-num_tokens // MIXED_STEP) * MIXED_STEP
        return size if size <= self._most_mixed else 0

    def forget(self) -> None:
        """The model's cache lies elsewhere now."""
        self._kept: dict[_Kind, Recording] = {}
        self._seen: set[_Kind] = set()
        self._unfit: set[_Kind] = set()

    def run(self, work: Work, given: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        """What the work makes of an input [N, ...], which it may overwrite. It must be the same
        each time but for N and for what attention reads.

        The result is overwritten by the next step; after the last sequence's token it is anything.
        """
        kind = _kind_of(len(given), meta)
        recording = self._kept.get(kind)
        if recording is not None:
            return recording.replay(given, meta)
        if kind in self._unfit or kind not in self._seen:
            self._seen.add(kind)
            return work(given)
        result, recording = record(work, given, meta, self._memory)
        if recording is None:
            self._unfit.add(kind)
        else:
            self._kept[kind] = recording
        if kind.has_chunks and kind.num_tokens <= self._most_mixed:
            self._most_mixed = min(self._most_mixed, self._room_for(recording))
        return result

    def _room_for(self, recording: Recording | None) -> int:
        """Tokens of the largest step that there is memory for, by one that was recorded. Known from
        the first on, so that steps of a size are computed alike from then on."""
        return 0 if recording is None else len(self._memory) // (2 * recording.bytes_a_token)


class _Kind(NamedTuple):
    """Steps that have the same launches."""

    num_tokens: int
    has_singles: bool  # sequences of one token; several are another launch of attention
    has_chunks: bool


def _kind_of(num_tokens: int, meta: AttentionMeta) -> _Kind:
    if meta.max_query_len <= 1:
        return _Kind(num_tokens, True, False)
    counts = np.diff(meta.query_start.numpy())
    return _Kind(num_tokens, bool((counts == 1).any()), True)


def record(
    work: Work, given: torch.Tensor, meta: AttentionMeta, memory: torch.Tensor
) -> tuple[torch.Tensor, Recording | None]:
    """Do the work and record it, if it can be repeated by its launches alone. memory: bytes."""
    watch = _Watch(memory)
    given = watch.placed(torch.empty_like(given)).copy_(given)
    with noted() as launches, watch:
        result = work(given)
    plans = {key: plan for key, plan in meta.scratch.items() if isinstance(plan, AttentionPlan)}
    if not watch.is_fit or len(plans) < len(meta.scratch):
        return result, None
    return result, Recording(given, result, launches, plans, watch.num_bytes)


class _Watch(TorchDispatchMode):
    """Gives tensors their memory, and sees whether torch computes anything."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__()
        self.is_fit = True
        self._memory = memory
        self._base = memory.data_ptr()
        self._skipped = -self._base % _ALIGNED
        self._arena = Arena(len(memory) - self._skipped)

    @property
    def num_bytes(self) -> int:
        """The most memory that was in use at once."""
        return self._arena.peak

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's compiler need not be imported for it: that takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _NEW:
            return self.placed(result)
        # What changes nothing and gives another look at its argument's memory computes nothing.
        looks = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        self.is_fit &= bool(looks) and not func._schema.is_mutable
        for look in looks:
            self.is_fit &= look.untyped_storage().data_ptr() == _address(args[0])
            self._hold(look)
        return result

    def placed(self, made: torch.Tensor) -> torch.Tensor:
        """A tensor in the arena in place of one that was made; that one, if there is no room."""
        if not self.is_fit or not made.is_contiguous():
            self.is_fit = False
            return made
        start = self._arena.take(made.nbytes)
        if start is None:
            self.is_fit = False
            return made
        start += self._skipped
        placed = self._memory[start : start + made.nbytes].view(made.dtype).view(made.shape)
        self._hold(placed)
        return placed

    def _hold(self, tensor: torch.Tensor) -> None:
        """Its memory is in use for as long as Python has the tensor."""
        offset = tensor.data_ptr() - self._base - self._skipped
        if tensor.nbytes and 0 <= offset < self._arena.size:
            weakref.finalize(tensor, self._arena.drop, self._arena.hold(offset)).atexit = False


class Arena:
    """Which parts of some memory are in use, and how often."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.peak = 0  # the end of the last part that ever was in use
        self._used: list[tuple[int, int]] = []  # start and end, in order
        self._holders: dict[int, int] = {}

    def take(self, num_bytes: int) -> int | None:
        """Start of the first free part that is large enough. It is free until it is held."""
        before = 0
        for start, end in [*self._used, (self.size, 0)]:
            if start - before >= num_bytes:
                insort(self._used, (before, before + max(num_bytes, 1)))
                self.peak = max(self.peak, before + num_bytes)
                self._holders[before] = 0
                return before
            before = -(-end // _ALIGNED) * _ALIGNED
        return None

    def hold(self, offset: int) -> int:
        """One more uses the part in which the offset lies; its start."""
        start = self._used[bisect_right(self._used, (offset, self.size)) - 1][0]
        self._holders[start] += 1
        return start

    def drop(self, start: int) -> None:
        """One less."""
        self._holders[start] -= 1
        if not self._holders[start]:
            del self._holders[start]
            self._used.remove(next(part for part in self._used if part[0] == start))


def _address(argument: Any) -> int:
    """Address of a tensor's memory."""
    is_tensor = isinstance(argument, torch.Tensor)
    return argument.untyped_storage().data_ptr() if is_tensor else 0


def _jobs_of(launches: list[NativeLaunch]) -> NDArray[np.int64]:
    jobs = np.zeros((len(launches), JOB_WORDS), np.int64)
    for job, launch in zip(jobs, launches, strict=True):
        job[:2] = launch.body, launch.threads
        job[3 : 3 + len(launch.parameters)] = launch.parameters
    return jobs

"""Records the kernel launches of a CPU step and replays them in one call, like a CUDA graph.

A decode step has a hundred launches, and Python's overhead for each is as long as the smallest
kernels. A recording stores the launches of a step with the memory that they use. A later step with
as many tokens copies its input to the same address, updates the attention plan, and runs all
launches without Python.

Steps with prompt chunks have any number of tokens. On processors with tiles, which compute 16 rows
at once, such a step is padded to a multiple of 16, so that there are few sizes.

Intermediate tensors are in one arena, shared by all recordings, since only one runs at a time. A
step is recorded only if it consists of launches of our kernels: anything computed by torch would be
missing in a replay.
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

MAX_BYTES = 64 << 20  # of the arena; only written pages take memory
MOST_MIXED = 256  # tokens of a step with chunks; Python's share of larger ones is small
MIXED_STEP = 16  # rows of a tile

Work = Callable[[torch.Tensor], torch.Tensor]
"""A function that computes an output from an input by kernel launches. What it reads from tensors
on the host without torch's knowledge must be the same in all steps."""

_ALIGNED = 64  # bytes
_NEW = {"empty", "empty_like", "new_empty"}


class Recording:
    """The recorded kernel launches of a step, in order."""

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
        """Compute the step's result for another input. The next step overwrites the result."""
        self._given.copy_(given)
        kept = plan_again(meta, self._plans)
        launch_all(TEAM.control, TEAM.syscall, self._jobs.ctypes.data, len(self._jobs))
        del kept
        return self._result


class Recorder:
    """Runs a model's steps: the second step of each kind is recorded, and later ones are replayed.

    most_mixed: maximum tokens of a recorded step with prompt chunks; 0: only decodes are recorded.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, *, most_mixed: int = 0) -> None:
        self._memory = torch.empty(max_bytes, dtype=torch.uint8)
        self._most_mixed = most_mixed
        self.forget()

    def mixed_size(self, num_tokens: int) -> int:
        """Number of tokens to which a step with prompt chunks is padded for recording; 0 if such a
        step is not recorded."""
        size = -(-num_tokens // MIXED_STEP) * MIXED_STEP
        return size if size <= self._most_mixed else 0

    def forget(self) -> None:
        """Drop all recordings, since the KV cache has a new address."""
        self._kept: dict[_Kind, Recording] = {}
        self._seen: set[_Kind] = set()
        self._unfit: set[_Kind] = set()

    def run(self, work: Work, given: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        """Compute ``work`` on an input [N, ...], which may be overwritten. The work must be the
        same in every call, except for N and for what attention reads.

        The next step overwrites the result; rows of padding are undefined.
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
        """Tokens of the largest step for which the arena has memory, estimated from a recorded
        step; 0 without one. Fixed by the first recording, so that steps of one size are always
        computed the same way."""
        return 0 if recording is None else len(self._memory) // (2 * recording.bytes_a_token)


class _Kind(NamedTuple):
    """The key of a recording: all steps with an equal key have the same launches."""

    num_tokens: int
    has_singles: bool  # has sequences of one token, which are a separate launch of attention
    has_chunks: bool


def _kind_of(num_tokens: int, meta: AttentionMeta) -> _Kind:
    if meta.max_query_len <= 1:
        return _Kind(num_tokens, True, False)
    counts = np.diff(meta.query_start.numpy())
    return _Kind(num_tokens, bool((counts == 1).any()), True)


def record(
    work: Work, given: torch.Tensor, meta: AttentionMeta, memory: torch.Tensor
) -> tuple[torch.Tensor, Recording | None]:
    """Compute the work and record it, if it consists only of kernel launches. Returns the result
    and the recording, or ``None``. memory: the arena, uint8."""
    watch = _Watch(memory)
    given = watch.placed(torch.empty_like(given)).copy_(given)
    with noted() as launches, watch:
        result = work(given)
    plans = {key: plan for key, plan in meta.scratch.items() if isinstance(plan, AttentionPlan)}
    if not watch.is_fit or len(plans) < len(meta.scratch):
        return result, None
    return result, Recording(given, result, launches, plans, watch.num_bytes)


class _Watch(TorchDispatchMode):
    """While active, places new tensors in the arena and detects computations by torch."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__()
        self.is_fit = True
        self._memory = memory
        self._base = memory.data_ptr()
        self._skipped = -self._base % _ALIGNED
        self._arena = Arena(len(memory) - self._skipped)

    @property
    def num_bytes(self) -> int:
        """Peak use of the arena in bytes."""
        return self._arena.peak

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Avoids importing torch's compiler, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _NEW:
            return self.placed(result)
        # An operation that changes nothing and returns views of its argument computes nothing.
        views = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        self.is_fit &= bool(views) and not func._schema.is_mutable
        for view in views:
            self.is_fit &= view.untyped_storage().data_ptr() == _address(args[0])
            self._hold(view)
        return result

    def placed(self, made: torch.Tensor) -> torch.Tensor:
        """A tensor in the arena to use in place of a new tensor; the new tensor itself if there is
        no room."""
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
        """Mark a tensor's memory as used for as long as the tensor exists."""
        offset = tensor.data_ptr() - self._base - self._skipped
        if tensor.nbytes and 0 <= offset < self._arena.size:
            weakref.finalize(tensor, self._arena.drop, self._arena.hold(offset)).atexit = False


class Arena:
    """A first-fit allocator of parts of a memory; each part counts its holders."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.peak = 0  # highest end of a part so far
        self._used: list[tuple[int, int]] = []  # start and end, in order
        self._holders: dict[int, int] = {}

    def take(self, num_bytes: int) -> int | None:
        """Allocate a part and return its offset; ``None`` if there is no room. The part has no
        holders yet."""
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
        """Add a holder to the part that contains an offset. Returns the part's start."""
        start = self._used[bisect_right(self._used, (offset, self.size)) - 1][0]
        self._holders[start] += 1
        return start

    def drop(self, start: int) -> None:
        """Remove a holder from the part at offset ``start``; a part without holders is free."""
        self._holders[start] -= 1
        if not self._holders[start]:
            del self._holders[start]
            self._used.remove(next(part for part in self._used if part[0] == start))


def _address(argument: Any) -> int:
    """Address of a tensor's memory; 0 for other values."""
    is_tensor = isinstance(argument, torch.Tensor)
    return argument.untyped_storage().data_ptr() if is_tensor else 0


def _jobs_of(launches: list[NativeLaunch]) -> NDArray[np.int64]:
    jobs = np.zeros((len(launches), JOB_WORDS), np.int64)
    for job, launch in zip(jobs, launches, strict=True):
        job[:2] = launch.body, launch.threads
        job[3 : 3 + len(launch.parameters)] = launch.parameters
    return jobs

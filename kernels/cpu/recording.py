"""Records the kernel launches of a CPU step and replays them in one call, like a CUDA graph.

A decode step has a hundred launches, and Python's overhead for each is as long as the smallest
kernels. A recording stores a step's launches and the memory that they use. For a later step with
the same number of tokens, the token ids are at the same address, the attention plan gets the memory
that it needs, and all launches run without Python.

On processors that multiply tiles of 16 rows, a step with prompt chunks is padded to a multiple of
16 tokens, so that there are few sizes to record.

Intermediate tensors are in one arena, shared by all recordings, since only one runs at a time. A
step in whose layers torch computes anything is not recorded, since a replay would miss it.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class Computed(NamedTuple):
    """The results of a step's layers and of its output stage."""

    hidden: torch.Tensor
    output: torch.Tensor | None


class Stages(NamedTuple):
    """The parts of a step, each a function of the result of the one before."""

    embed: Work | None  # token ids [N] -> vectors [N, H]; None: the step is given vectors
    layers: Work  # -> hidden states [N, H]
    output: Callable[[torch.Tensor], torch.Tensor | None] | None = None
    """Returns e.g. logits, or ``None`` if it cannot compute what is wanted."""
    name: str = ""  # of the output stage
    variant: str = ""  # of the layers; the same launches belong to an equal text

    def compute(self, given: torch.Tensor) -> Computed:
        """Run all stages."""
        hidden = self.layers(given if self.embed is None else self.embed(given))
        return Computed(hidden, self.output_of(hidden))

    def output_of(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Run the output stage, if there is one."""
        return None if self.output is None else self.output(hidden)


T = TypeVar("T")

_ALIGNED = 64  # bytes
_NEW = {"empty", "empty_like", "new_empty"}


class Launches:
    """Recorded kernel launches, which can be repeated. All tensors must be at fixed addresses."""

    def __init__(self, jobs: NDArray[np.int64], held: Sequence[object] = ()) -> None:
        """held: what the launches read and write, where nothing else keeps it."""
        self.jobs = jobs
        self.held = list(held)
        self._place = self.jobs.ctypes.data, len(self.jobs)

    @classmethod
    def of(cls, work: Callable[[], T]) -> tuple[T, Launches]:
        """Call ``work`` and record its launches. Returns its result and the launches."""
        with noted() as launches:
            result = work()
        return result, cls(_jobs_of(launches), launches.held)

    def repeat(self) -> None:
        """Run the launches again."""
        launch_all(TEAM.control, TEAM.syscall, *self._place)

    def joined(self, others: Sequence[Launches]) -> Launches:
        """These launches and others after them."""
        every = [self, *others]
        held = [tensor for one in every for tensor in one.held]
        return Launches(np.concatenate([one.jobs for one in every]), held)


class WholeStep(NamedTuple):
    """All launches of a decode step, with those that prepare its inputs and sample its tokens."""

    launches: Launches
    tokens: NDArray[np.int32]  # [N]: the sampled tokens, which the next step overwrites
    owner: object  # owns memory that the launches read, and is kept as long as they are


@dataclass(slots=True)
class Recording:
    """The recorded kernel launches of one step, in order. Embedding and output stage are called in
    each replay if torch computes a part of them."""

    given: torch.Tensor  # the input of the first launch
    computed: Computed
    has_embed: bool  # the embedding is among the launches
    has_output: bool  # the output stage, if there is one, is among the launches
    plans: list[AttentionPlan]
    launches: Launches
    num_bytes: int  # of the arena that embedding and layers use
    meta: AttentionMeta  # of the recorded step
    wholes: dict[str, WholeStep] = field(default_factory=dict)
    """Whole steps that the worker has recorded, by the way in which tokens are sampled."""

    def make_room(self, num_seqs: int, max_seq_len: int) -> bool:
        """Allocate memory for a step of single tokens of ``num_seqs`` sequences of up to
        ``max_seq_len`` keys, unless it is much. Returns whether there is memory for them."""
        return all(plan.make_room(num_seqs, max_seq_len) for plan in self.plans)

    def replay(self, stages: Stages, given: torch.Tensor, meta: AttentionMeta) -> Computed:
        """Compute the step for another input. The next step overwrites the returned tensors."""
        if not self.has_embed and stages.embed is not None:
            given = stages.embed(given)
        if given.data_ptr() != self.given.data_ptr():
            self.given.copy_(given)
        self.launch(meta)
        if self.has_output:
            return self.computed
        return self.computed._replace(output=stages.output_of(self.computed.hidden))

    def launch(self, meta: AttentionMeta) -> None:
        """Run the launches for the input that is in ``given``."""
        for plan in self.plans:
            plan.renew(meta)
        self.launches.repeat()


class Recorder:
    """Runs a model's steps: records the second step of each kind, and replays it for later steps.

    most_mixed: maximum tokens of a recorded step with prompt chunks; 0: only decodes are recorded.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, *, most_mixed: int = 0) -> None:
        self._memory = torch.empty(max_bytes, dtype=torch.uint8)
        self._most_mixed = most_mixed
        self.forget()

    def mixed_size(self, num_tokens: int) -> int:
        """Returns the number of tokens to which a step with prompt chunks is padded for recording;
        0 if a step of this size is not recorded."""
        size = -(-num_tokens // MIXED_STEP) * MIXED_STEP
        return size if size <= self._most_mixed else 0

    def forget(self) -> None:
        """Drop all recordings, since the KV cache has a new address."""
        self._kept: dict[_Kind, Recording] = {}
        self._seen: set[_Kind] = set()
        self._unfit: set[_Kind] = set()

    def of_decodes(self, num_tokens: int, output: str, variant: str = "") -> Recording | None:
        """The recording of a step of single tokens with this output stage and this variant of the
        layers, if there is one and all stages are among its launches."""
        recording = self._kept.get(_Kind(output, variant, num_tokens, True, False))
        if recording is None or not (recording.has_embed and recording.has_output):
            return None
        return recording

    def run(self, stages: Stages, given: torch.Tensor, meta: AttentionMeta) -> Computed:
        """Compute a step from its token ids [N], or from vectors [N, H] if there is no embedding,
        directly or by replaying a recording. Stages must be the same in all calls with the same
        name and variant; only N and the data that attention reads may change.

        This and later calls may overwrite the input. The next step overwrites the results, in which
        rows of padding tokens are undefined."""
        kind = _kind_of(stages, len(given), meta)
        recording = self._kept.get(kind)
        if recording is not None:
            return recording.replay(stages, given, meta)
        if kind in self._unfit or kind not in self._seen:
            self._seen.add(kind)
            return stages.compute(given)
        computed, recording = record(stages, given, meta, self._memory)
        if recording is None:
            self._unfit.add(kind)
        else:
            self._kept[kind] = recording
        if kind.has_chunks and kind.num_tokens <= self._most_mixed:
            self._most_mixed = min(self._most_mixed, self._room_for(recording, kind.num_tokens))
        return computed

    def _room_for(self, recording: Recording | None, num_tokens: int) -> int:
        """Estimate from a recorded step how many tokens a step may have to fit the arena; 0 for
        ``None``."""
        if recording is None:
            return 0
        bytes_a_token = -(-recording.num_bytes // num_tokens)
        return len(self._memory) // (2 * bytes_a_token)


class _Kind(NamedTuple):
    """The key of a recording: all steps with an equal key have the same launches."""

    output: str
    variant: str
    num_tokens: int
    has_singles: bool  # has sequences of one token, which are a separate launch of attention
    has_chunks: bool


def _kind_of(stages: Stages, num_tokens: int, meta: AttentionMeta) -> _Kind:
    name, variant = stages.name, stages.variant
    if meta.max_query_len <= 1:
        return _Kind(name, variant, num_tokens, True, False)
    counts = np.diff(meta.query_start.numpy())
    return _Kind(name, variant, num_tokens, bool((counts == 1).any()), True)


def record(
    stages: Stages, given: torch.Tensor, meta: AttentionMeta, memory: torch.Tensor
) -> tuple[Computed, Recording | None]:
    """Compute a step and record its kernel launches. memory: the arena, uint8. Returns the results
    and the recording, which is ``None`` if torch computed a part of the layers or the arena is too
    small for them."""
    watch, x, launches = _Watch(memory), given, list[NativeLaunch]()
    if stages.embed is not None:
        x, launches = watch.observe(stages.embed, given)
    has_embed = stages.embed is not None and watch.is_fit
    if not has_embed:  # the input belongs to others, or is new in each step
        watch, launches = _Watch(memory), []
        given = x = watch.placed(torch.empty_like(x)).copy_(x)
    hidden, more = watch.observe(stages.layers, x)
    plans = [plan for plan in meta.scratch.values() if isinstance(plan, AttentionPlan)]
    if not watch.is_fit or len(plans) < len(meta.scratch):
        return Computed(hidden, stages.output_of(hidden)), None
    num_bytes, launches = watch.num_bytes, launches + more
    output, more = watch.observe(stages.output_of, hidden)
    has_output = watch.is_fit and (output is not None or stages.output is None)
    recorded = Launches(_jobs_of(launches + more if has_output else launches))
    computed, has = Computed(hidden, output), (has_embed, has_output)
    return computed, Recording(given, computed, *has, plans, recorded, num_bytes, meta)


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

    def observe(
        self, work: Callable[[torch.Tensor], T], given: torch.Tensor
    ) -> tuple[T, list[NativeLaunch]]:
        """Call ``work`` while this is active. Returns its result and its kernel launches."""
        with noted() as launches, self:
            return work(given), launches

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
        """Return a tensor like ``made`` in the arena. If that is impossible, return ``made`` and
        set ``is_fit`` to False, so that the step is not recorded."""
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
    """Allocates memory from ``size`` bytes, and counts the holders of each part."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.peak = 0  # highest end of a part so far
        self._used: list[tuple[int, int]] = []  # start and end, in order
        self._holders: dict[int, int] = {}

    def take(self, num_bytes: int) -> int | None:
        """Allocate memory and return its offset in bytes; ``None`` if there is no room. It has no
        holder yet."""
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
        """Add a holder to the memory that contains byte ``offset``. Returns the memory's start."""
        start = self._used[bisect_right(self._used, (offset, self.size)) - 1][0]
        self._holders[start] += 1
        return start

    def drop(self, start: int) -> None:
        """Remove a holder of the memory at ``start``; the last one frees the memory."""
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

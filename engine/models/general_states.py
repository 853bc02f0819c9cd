"""Recurrent states of models that run with transformers' modules.

A step has tokens of many sequences, and each has its own state. So the modules with a state, called
mixers here, are run for one sequence after another, or for the next token of many sequences at
once, each time with the states of these sequences in transformers' ``LinearAttentionLayer``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from engine.kv.layout import DTYPE_BYTES, RecurrentState, StateTensor
from engine.models.general_support import STATE_LAYERS, Misfit, layer_types
from kernels.meta import StateMeta

KINDS = ("conv_states", "recurrent_states")  # attributes of a LinearAttentionLayer
MOST_ERROR = 0.1  # of a mixer's outputs, relative to the effect of the state before them

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call: by position, by name."""
StateTensors = Sequence[tuple[torch.Tensor, ...]]
"""The state tensors of each mixer, [rows, ...] each."""


class Place(NamedTuple):
    """Where transformers' cache keeps a state."""

    layer: int
    kind: str  # one of KINDS
    state_idx: int


class Mixer(NamedTuple):
    """A module with a recurrent state, found in a trial."""

    module: nn.Module
    places: tuple[Place, ...]
    cache: RecurrentState
    call: Call
    """Its arguments in the trial."""


class Part(NamedTuple):
    """Tokens of a step with which mixers are run at once: T tokens of each of B sequences."""

    tokens: torch.Tensor  # [B, T] int64, index among the step's tokens
    reads: torch.Tensor | None  # [B] int64, rows of the states before; None: the sequences start
    writes: torch.Tensor | None  # [B] int64, rows of the states after; None: not kept


class HeldStates(DynamicCache):
    """A cache of transformers with the states of the sequences for which a mixer is being run. It
    keeps no keys and values."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.mixers: list[Mixer] = []
        self._states: StateTensors = ()
        self._parts: Sequence[Part] = ()
        self._num_tokens = 0

    @staticmethod
    def of(config: PreTrainedConfig) -> HeldStates | None:
        """The cache for a model; ``None`` if its config names no layer with a recurrent state."""
        return HeldStates(config) if layer_types(config) & STATE_LAYERS else None

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments with which a module uses this cache."""
        return {"past_key_values": self, "use_cache": True}

    @property
    def num_attention_layers(self) -> int:
        """Number of layers that keep keys and values."""
        return sum(isinstance(layer, CacheLayerMixin) for layer in self.layers)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as they are."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0; modules get the positions of their tokens."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Number and offset of the keys in a mask, for a trial."""
        return query_length, 0

    @contextmanager
    def searching(self, root: nn.Module) -> Iterator[None]:
        """Context in which ``root`` is called once with this cache. Afterwards ``mixers`` lists the
        modules that have stored a state, and these take their states from here. Raises ``Misfit``
        if that is not possible."""
        num_calls: Counter[nn.Module] = Counter()
        calls: dict[nn.Module, Call] = {}
        running: list[nn.Module] = []
        owners: dict[Place, nn.Module] = {}

        def note_owners() -> None:
            for place in self._filled_places():
                owners.setdefault(place, running[-1])

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            note_owners()
            num_calls[module] += 1
            calls[module] = args, kwargs
            running.append(module)

        def leave(*_: Any) -> None:
            note_owners()
            running.pop()

        handles = []
        for part in root.modules():
            handles.append(part.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(part.register_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for module in dict.fromkeys(owners.values()):
            if num_calls[module] != 1:
                raise Misfit("it calls a module with a recurrent state more than once")
            places = tuple(place for place, owner in owners.items() if owner is module)
            self.mixers.append(Mixer(module, places, self._shapes(places), calls[module]))
        self._check_places()
        for number, mixer in enumerate(self.mixers):
            limit_time_steps(mixer.module)
            run = partial(self._run, number, mixer.module.forward)
            mixer.module.forward = run  # type: ignore[method-assign]

    def _filled_places(self) -> Iterator[Place]:
        for number, layer in enumerate(self.layers):
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                for kind in KINDS:
                    for index, tensor in getattr(layer, kind).items():
                        if tensor is not None:
                            yield Place(number, kind, index)

    def _shapes(self, places: Sequence[Place]) -> RecurrentState:
        """Shapes of the states at these places, for one sequence."""
        tensors = []
        for number, kind, index in places:
            tensor = getattr(self.layers[number], kind)[index]
            name = str(tensor.dtype).removeprefix("torch.")
            if name not in DTYPE_BYTES or tensor.shape[0] != 1:
                raise Misfit(f"it keeps a state of {name} numbers, of shape {tuple(tensor.shape)}")
            is_sum = kind == "recurrent_states" and name == "float32"
            tensors.append(StateTensor(tuple(tensor.shape[1:]), name, is_sum))
        return RecurrentState(tensors=tuple(tensors))

    def _check_places(self) -> None:
        """Raise ``Misfit`` if a layer for states has none, or if mixers share a place."""
        users: Counter[tuple[int, int]] = Counter()
        for mixer in self.mixers:
            users.update({(place.layer, place.state_idx) for place in mixer.places})
        if any(count > 1 for count in users.values()):
            raise Misfit("two of its modules share a recurrent state")
        used = {layer for layer, _ in users}
        for number, layer in enumerate(self.layers):
            if isinstance(layer, LinearAttentionCacheLayerMixin) and number not in used:
                raise Misfit(f"its layer {number} stores no state in transformers' cache")

    def make_states(self, num_rows: int) -> StateTensors:
        """Make state tensors of zeros, with this many rows."""
        return [
            tuple(
                torch.zeros(
                    num_rows, *one.shape, dtype=getattr(torch, one.dtype), device=self._device
                )
                for one in mixer.cache.tensors
            )
            for mixer in self.mixers
        ]

    @property
    def _device(self) -> torch.device:
        return next(self.mixers[0].module.parameters()).device

    @contextmanager
    def during(
        self, parts: Sequence[Part], states: StateTensors, num_tokens: int
    ) -> Iterator[None]:
        """Context of a step, in which mixers run one part after another. num_tokens: of the
        step."""
        self._parts, self._states, self._num_tokens = parts, states, num_tokens
        try:
            yield
        finally:
            self._parts = self._states = ()

    def _run(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a mixer with arguments [1, N, ...] of all tokens of a step; returns the outputs
        [1, N, ...]. forward: the mixer's own method."""
        mixer, states = self.mixers[number], self._states[number]
        outputs: Any = None
        for part in self._parts:
            self._load(mixer, states, part.reads)
            pick = partial(_pick, part.tokens, self._num_tokens)
            some, named = tree_map_only(torch.Tensor, pick, (args, kwargs))
            found = forward(*some, **named)
            if outputs is None:
                blank = partial(_blank, part.tokens, self._num_tokens)
                outputs = tree_map_only(torch.Tensor, blank, found)
            for whole, values in zip(tree_leaves(outputs), tree_leaves(found), strict=True):
                if isinstance(values, torch.Tensor):
                    whole[0, part.tokens] = values
            if part.writes is not None:
                self._store(mixer, states, part.writes)
        return outputs

    def _load(
        self, mixer: Mixer, states: tuple[torch.Tensor, ...], rows: torch.Tensor | None
    ) -> None:
        """Copy these rows of a mixer's states to the cache, in the module's own types; ``None``: a
        sequence starts."""
        for tensor, place, own in zip(states, mixer.places, mixer.cache.tensors, strict=True):
            layer: Any = self.layers[place.layer]
            found = tensor[rows] if rows is not None else torch.zeros_like(tensor[:1])
            getattr(layer, place.kind)[place.state_idx] = found.to(getattr(torch, own.dtype))
            layer.has_previous_state[place.state_idx] = rows is not None

    def _store(self, mixer: Mixer, states: tuple[torch.Tensor, ...], rows: torch.Tensor) -> None:
        """Copy a mixer's states from the cache to these rows."""
        for tensor, (number, kind, index) in zip(states, mixer.places, strict=True):
            tensor[rows] = getattr(self.layers[number], kind)[index].to(tensor.dtype)

    @contextmanager
    def during_single_tokens(self, num_tokens: int) -> Iterator[None]:
        """Context of a step in which each token is the only one of its sequence, for a trial."""
        parts = [_part(range(n, n + 1), -1, -1, self._device) for n in range(num_tokens)]
        with self.during(parts, self.make_states(1), num_tokens):
            yield

    def check_mixers(self, num_tokens: int) -> None:
        """Raise ``Misfit`` if the outputs of a mixer for the trial's tokens depend on how they are
        divided into chunks or joined, or not on the state before them. Random states make the
        effect of a state large, whatever the weights are."""
        dice = torch.Generator().manual_seed(0)
        states = self.make_states(2)
        for number, mixer in enumerate(self.mixers):
            for tensor in states[number]:
                tensor[0] = torch.randn(tensor[0].shape, generator=dice).to(tensor)
            outputs = partial(self._outputs, mixer, states, num_tokens)
            chunks = partial(_chunks, device=self._device)
            once, odd, single = [num_tokens], [2, 1, num_tokens - 3], [1] * num_tokens
            whole, fresh = outputs(chunks(once, 0)), outputs(chunks(once, -1))
            apart = [_part(range(n, n + 1), 0, -1, self._device) for n in range(num_tokens)]
            tokens = torch.arange(num_tokens, device=self._device)[:, None]
            joined = [Part(tokens, torch.zeros_like(tokens[:, 0]), None)]
            pairs = [(outputs(chunks(sizes, 0)), whole) for sizes in (odd, single, once)]
            pairs.append((outputs(chunks(odd, -1)), fresh))
            pairs.append((outputs(joined), outputs(apart)))
            allowed = MOST_ERROR * (whole - fresh).norm()
            if not all((found - right).norm() < allowed for found, right in pairs):
                raise Misfit(
                    f"the outputs of {type(mixer.module).__name__} depend on how tokens are "
                    "divided into chunks, or not on the state before them"
                )

    def _outputs(
        self, mixer: Mixer, states: StateTensors, num_tokens: int, parts: Sequence[Part]
    ) -> torch.Tensor:
        """All outputs of a mixer for the trial's tokens, run in these parts."""
        args, kwargs = mixer.call
        with self.during(parts, states, num_tokens):
            found = tree_leaves(mixer.module(*args, **kwargs))
        return torch.cat([one.flatten().float() for one in found if one is not None])


def parts_of(meta: StateMeta) -> list[Part]:
    """The parts of a step, in the order in which they run: a sequence is divided after each token
    whose state is kept, and single tokens of several sequences are joined."""
    device = meta.query_start.device
    parts: list[Part] = []
    joined: dict[int, list[tuple[int, int, int]]] = {}
    rows = zip(
        pairwise(meta.query_start.tolist()),
        meta.state_reads.tolist(),
        meta.state_writes.tolist(),
        strict=True,
    )
    for (first, end), read, written in rows:
        kept = [row for row in written if row >= 0] or [-1]
        ends = range(end - len(kept) + 1, end + 1)
        for turn, ((start, stop), write) in enumerate(
            zip(pairwise((first, *ends)), kept, strict=True)
        ):
            if stop - start == 1 and min(read, write) >= 0:
                joined.setdefault(turn, []).append((start, read, write))
            elif start < stop:
                parts.append(_part(range(start, stop), read, write, device))
            read = write
    for _, some in sorted(joined.items()):
        starts, reads, writes = torch.tensor(some, device=device).unbind(1)
        parts.append(Part(starts[:, None], reads, writes))
    return parts


def limit_time_steps(mixer: nn.Module) -> None:
    """Limit the time steps of a Mamba-2 module in its input projection. By itself, transformers
    limits them in prompts but not in later steps, so that tokens would depend on preemption.

    The last outputs of the projection are the steps before the bias and softplus."""
    limits, bias = getattr(mixer, "time_step_limit", None), getattr(mixer, "dt_bias", None)
    project = getattr(mixer, "in_proj", None)
    if limits is None or bias is None or project is None:
        return
    bounds = torch.tensor(limits, dtype=torch.float64)
    low, high = (bounds + torch.log(-torch.expm1(-bounds))).tolist()  # inverse of softplus
    least, most = (low - bias.detach().float()), (high - bias.detach().float())

    def limit(_module: nn.Module, _args: Any, out: torch.Tensor) -> torch.Tensor:
        others, steps = out[..., : -len(bias)], out[..., -len(bias) :]
        return torch.cat([others, steps.clamp(least.to(out.dtype), most.to(out.dtype))], -1)

    project.register_forward_hook(limit)


def _chunks(sizes: Sequence[int], first: int, device: torch.device) -> list[Part]:
    """The parts for a sequence in chunks of these sizes. first: row of the state before them, or -1
    for none; row 1 is used after it."""
    spans = pairwise(accumulate(sizes, initial=0))
    return [_part(range(*span), 1 if span[0] else first, 1, device) for span in spans]


def _part(tokens: range, read: int, write: int, device: torch.device) -> Part:
    """The part with some tokens of one sequence. read, write: rows, or -1 for none."""
    found = torch.arange(tokens.start, tokens.stop, device=device)
    reads, writes = torch.tensor([read, write], device=device).split(1)
    return Part(found[None], reads if read >= 0 else None, writes if write >= 0 else None)


def _pick(tokens: torch.Tensor, num_tokens: int, given: torch.Tensor) -> torch.Tensor:
    """Choose tokens [B, T] of a tensor [1, N, ...] with all of them."""
    if given.shape[:2] != (1, num_tokens):
        raise Misfit("a module with a recurrent state gets a tensor that is not by token")
    return given[0, tokens]


def _blank(tokens: torch.Tensor, num_tokens: int, found: torch.Tensor) -> torch.Tensor:
    """Make a tensor of zeros [1, N, ...] for outputs [B, T, ...] of some tokens."""
    if found.shape[:2] != tokens.shape:
        raise Misfit("a module with a recurrent state returns a tensor that is not by token")
    return found.new_zeros(1, num_tokens, *found.shape[2:])

"""Runs a few tokens through a loaded module to check that only attention relates its tokens.

A step passes the tokens of many sequences as one row, so a token's result may depend on other
tokens only through attention, and on its position only through ``position_ids``. The trial runs the
same tokens twice: in order, and permuted with their position ids, with one token moved to the last
possible position. The trial's attention returns each token's own value, so all tokens but the moved
one must have the same results. This detects convolutions, token shifts, positions counted from the
row, and frequencies that depend on the longest sequence of a batch.

In a model with recurrent states, each token is a sequence of its own in both runs. The modules with
states are tried one by one (``general_states``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.kv.layout import PagedKV
from engine.models.general_attention import (
    STATE,
    AttentionCall,
    AttentionLayer,
    MaskRule,
    cache_arguments,
    read_options,
    rule_of,
)
from engine.models.general_states import HeldStates
from engine.models.general_support import Misfit

NUM_TOKENS = 6
ORDER = (3, 0, 4, 1, 5, 2)  # tokens of the second run
MOVED = NUM_TOKENS - 1


@dataclass(frozen=True)
class Findings:
    """What the trial found out about a model's module."""

    layers: tuple[AttentionLayer, ...]
    backbone: PreTrainedModel
    """The submodule that computes hidden states."""
    output_type: type
    """Type of the backbone's output."""
    hidden: torch.Tensor  # [N, H], of the trial's tokens
    logits: torch.Tensor  # [N, V]
    states: HeldStates | None
    """Its recurrent states, if it has any."""


@dataclass(slots=True)
class TrialRun:
    """Recorded calls and outputs of one forward pass."""

    calls: list[AttentionCall]
    output: Any  # output of the module called
    backbone: PreTrainedModel
    backbone_output: Any

    @property
    def hidden(self) -> torch.Tensor:
        return self.backbone_output[0][0]  # [N, H]


def run_trial(causal: PreTrainedModel, vocab_size: int, max_model_len: int) -> Findings:
    """Run the trial on a module whose attention function is ``TRIAL``. Raises ``Misfit``."""
    tokens = (torch.arange(NUM_TOKENS) * 7 + 3) % vocab_size
    whole = _run(causal, _backbones(causal), tokens, None)
    layers = _read_layers(whole.calls, max_model_len)
    states = HeldStates.of(causal.config)
    first = whole
    if states is not None:
        first = _try_states(whole, states, tokens)
    order, places = torch.tensor(ORDER), torch.arange(NUM_TOKENS)
    places[MOVED] = max_model_len - 1
    try:
        second = _run_apart(whole.backbone, tokens[order], places[order], states)
    except IndexError as error:
        raise Misfit(f"it has no position {places[MOVED]}; set a smaller max_model_len") from error
    _compare(first, second, order)
    return Findings(
        layers,
        whole.backbone,
        type(whole.backbone_output),
        whole.hidden,
        whole.output.logits[0],
        states,
    )


def _try_states(whole: TrialRun, states: HeldStates, tokens: torch.Tensor) -> TrialRun:
    """Find the modules with recurrent states, make them use ``states``, and try each. Returns a run
    in which each token is a sequence of its own."""
    backbone, places = whole.backbone, torch.arange(NUM_TOKENS)
    with states.searching(backbone):
        cached = _run(backbone, [backbone], tokens, places, states)
    if not is_close(cached.hidden, whole.hidden):
        raise Misfit("its results with transformers' cache are not those without")
    states.check_mixers(NUM_TOKENS)
    return _run_apart(backbone, tokens, places, states)


def _run_apart(
    backbone: PreTrainedModel,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    states: HeldStates | None,
) -> TrialRun:
    """Run a backbone. If it has recurrent states, each token is a sequence of its own."""
    if states is None:
        return _run(backbone, [backbone], tokens, positions)
    with states.during_single_tokens(len(tokens)):
        return _run(backbone, [backbone], tokens, positions, states)


def _backbones(causal: PreTrainedModel) -> list[PreTrainedModel]:
    """The submodules that may compute the hidden states, the likeliest first."""
    named = [causal.base_model, causal.get_decoder()]
    children = [part for part in causal.children() if isinstance(part, PreTrainedModel)]
    return [part for part in dict.fromkeys(named + children) if part is not causal]


def _run(
    module: PreTrainedModel,
    backbones: list[PreTrainedModel],
    tokens: torch.Tensor,
    positions: torch.Tensor | None,
    states: HeldStates | None = None,
) -> TrialRun:
    """Run a module. Record its attention calls and the output of its backbone, which is the first
    of ``backbones`` that it calls. ``positions``: ``None`` for 0, 1, 2, ..."""
    calls: list[AttentionCall] = []
    outputs: dict[PreTrainedModel, Any] = {}
    device = next(module.parameters()).device
    handles = [
        part.register_forward_hook(lambda part, _args, out: outputs.setdefault(part, out))
        for part in backbones
    ]
    for part in module.modules():
        setattr(part, STATE, calls)
    given: dict[str, Any] = {"use_cache": False}
    if states is not None:
        given = states.arguments
    elif positions is not None:
        given |= cache_arguments(module, positions.to(device))
    try:
        output = module(
            input_ids=tokens[None].to(device),
            position_ids=None if positions is None else positions[None].to(device),
            **given,
        )
    finally:
        for handle in handles:
            handle.remove()
        for part in module.modules():
            delattr(part, STATE)
    backbone = next((part for part in backbones if part in outputs), None)
    if backbone is None:
        raise Misfit("the submodule that computes the hidden states was not found")
    return TrialRun(calls, output, backbone, outputs[backbone])


def _read_layers(calls: list[AttentionCall], max_model_len: int) -> tuple[AttentionLayer, ...]:
    layers: list[AttentionLayer] = []
    windows: dict[MaskRule, tuple[int, bool]] = {}
    for index, call in enumerate(calls):
        shape = (1, call.query.shape[1], NUM_TOKENS)
        if call.query.shape[:3] != shape or call.key.shape[2] != NUM_TOKENS:
            raise Misfit("its attention does not get each token exactly once")
        read_options(call.scaling, call.query.shape[-1], call.given)
        rule = rule_of(call.mask)
        if call.mask is None or rule is None or call.mask.shape[2:] != (NUM_TOKENS, NUM_TOKENS):
            raise Misfit("it builds its own attention masks")
        if rule not in windows:
            windows[rule] = window_of(rule, max_model_len, call.mask.device)
        window, is_chunked = windows[rule]
        cache = PagedKV(
            num_kv_heads=call.key.shape[1],
            head_dim=call.key.shape[-1],
            value_dim=call.value.shape[-1],
            window=window,
            is_chunked=is_chunked,
        )
        source = _source(call, calls[:index])
        if source is not None and layers[source].cache != cache:
            source = None  # its window keeps other tokens
        layers.append(AttentionLayer(call.module, cache, source))
    return tuple(layers)


def window_of(rule: MaskRule, max_model_len: int, device: torch.device) -> tuple[int, bool]:
    """The number of keys that a mask rule shows to a query, 0 for all earlier keys, and whether
    they are the query's chunk instead of a sliding window. Raises ``Misfit`` for other rules."""
    keys = torch.arange(max_model_len, device=device)
    last = max_model_len - 1

    def first_seen(query: int) -> int:
        seen = _seen(rule, query, keys).nonzero()
        return int(seen[0]) if len(seen) else query

    def is_kept(width: int, is_chunked: bool) -> bool:
        queries = {0, width - 1, width, last // 3, last // 2, last - 1, last}
        for query in (query for query in queries if 0 <= query <= last):
            first = query // width * width if is_chunked else query - width + 1
            if not torch.equal(_seen(rule, query, keys), (keys <= query) & (keys >= first)):
                return False
        return True

    first = first_seen(last)
    if is_kept(last + 1 - first, False):
        return (last + 1 - first if first else 0), False
    size = first - first_seen(first - 1) if first else 0
    if size and is_kept(size, True):
        return size, True
    raise Misfit("its attention mask is not causal, a sliding window or chunks of equal size")


def _seen(rule: MaskRule, query: int, keys: torch.Tensor) -> torch.Tensor:
    """A mask [keys]: True for the keys that the query at position ``query`` attends to."""
    zero, position = keys.new_tensor(0), keys.new_tensor(query)
    try:
        return rule(zero, zero, position, keys).expand(keys.shape)
    except (IndexError, RuntimeError) as error:
        raise Misfit("its attention mask depends on more than positions") from error


def _source(call: AttentionCall, earlier: Sequence[AttentionCall]) -> int | None:
    """Index of the first earlier call with the very same keys and values, not copies of them."""
    for index, other in enumerate(earlier):
        if _is_same(call.key, other.key) and _is_same(call.value, other.value):
            return index
    return None


def _is_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return (tensor.data_ptr(), tensor.shape, tensor.stride()) == (
        other.data_ptr(),
        other.shape,
        other.stride(),
    )


def _compare(first: TrialRun, second: TrialRun, order: torch.Tensor) -> None:
    """Raise ``Misfit`` if a token that was not moved has different results in the two runs. order:
    for each token of the second run, its index in the first."""
    if [call.module for call in first.calls] != [call.module for call in second.calls]:
        raise Misfit("the number of its attention calls depends on its input")
    pairs = [(first.hidden, second.hidden)]
    for before, after in zip(first.calls, second.calls, strict=True):
        pairs.append((_by_token(before.query), _by_token(after.query)))
        pairs.append((_by_token(before.key), _by_token(after.key)))
    stays = order != MOVED
    if not all(is_close(after[stays], before[order][stays]) for before, after in pairs):
        raise Misfit(
            "a token's result depends on other tokens or their order, and not only by attention"
        )


def _by_token(heads: torch.Tensor) -> torch.Tensor:
    return heads[0].transpose(0, 1)  # [1, H, N, D] -> [N, H, D]


def is_close(value: torch.Tensor, expected: torch.Tensor) -> bool:
    """True if the tensors are equal up to rounding, by the norm of their difference."""
    allowed = 1e-4 if expected.dtype == torch.float32 else 5e-2
    difference = (value.float() - expected.float()).norm()
    return bool(difference <= allowed * expected.float().norm())

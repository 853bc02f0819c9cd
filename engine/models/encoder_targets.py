"""The tensors of an encoder, and the checkpoint tensors that fill them. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from math import prod

from engine.models.encoder_spec import EncoderNames, EncoderSpec
from engine.models.targets import Shape, Target, TargetPart, target, whole

Way = tuple[TargetPart, ...]

# Parts of a checkpoint after the last layer: they are read by the head of a pooled request, or fill
# in masked words.
HEADS = re.compile(
    r"(^|\.)(pooler|classifier|score|dense|head|decoder|cls|lm_head|predictions|qa_outputs)\."
    r"|^linear\.|(^|\.)(position_ids|lm_head\.bias|inv_freq)$"
)


def encoder_targets(spec: EncoderSpec) -> Iterator[Target]:
    """All tensors of an encoder, in the order in which it is built."""
    embedding = spec.embedding
    yield _table(spec, "words", spec.vocab_size)
    if embedding.num_positions:
        yield _table(spec, "positions", embedding.num_positions)
    if embedding.num_types:
        yield _table(spec, "types", embedding.num_types)
    yield from _norm(spec, "embedding_norm", lambda names: names.embedding_norm)
    if spec.relative is not None:
        size = spec.relative.num_buckets, spec.attention.num_heads
        yield _each(spec, "relative", size, lambda n: (whole(f"{n.relative}.weight", *size),))
    for index in range(len(spec.layers)):
        yield from _layer(spec, index)
    if spec.norm.comes_first:
        yield from _norm(spec, "final_norm", lambda names: names.final_norm)


def _layer(spec: EncoderSpec, index: int) -> Iterator[Target]:
    a, hidden, mlp = spec.attention, spec.hidden_size, spec.mlp

    def theirs(names: EncoderNames) -> str:
        return f"{names.layer}{index}."

    if not spec.norm.comes_first or index:
        yield from _norm(spec, f"{index}.attention_norm", lambda n: theirs(n) + n.attention_norm)
    widths = (a.q_width, a.kv_width, a.kv_width)
    yield from _linear(
        spec, f"{index}.qkv", (widths, hidden, a.qkv_bias), lambda n: _under(theirs(n), n.qkv)
    )
    yield from _linear(
        spec, f"{index}.out", ((hidden,), a.q_width, a.out_bias), lambda n: (theirs(n) + n.out,)
    )
    yield from _norm(spec, f"{index}.mlp_norm", lambda n: theirs(n) + n.mlp_norm)
    halves = (mlp.intermediate_size,) * (2 if mlp.is_gated else 1)
    yield from _linear(
        spec, f"{index}.up", (halves, hidden, mlp.up_bias), lambda n: _under(theirs(n), n.up)
    )
    down = (hidden,), mlp.intermediate_size, mlp.down_bias
    yield from _linear(spec, f"{index}.down", down, lambda n: (theirs(n) + n.down,))


def _under(prefix: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(prefix + name for name in names)


def _table(spec: EncoderSpec, name: str, rows: int) -> Target:
    size = rows, spec.hidden_size
    return _each(spec, name, size, lambda n: (whole(f"{getattr(n, name)}.weight", *size),))


def _norm(spec: EncoderSpec, ours: str, theirs: Callable[[EncoderNames], str]) -> Iterator[Target]:
    """The weight and the bias of a layer norm; old checkpoints call them gamma and beta."""
    size = (spec.hidden_size,)

    def called(word: str) -> tuple[Way, ...]:
        return _each(spec, ours, size, lambda n: (whole(f"{theirs(n)}.{word}", *size),)).ways

    yield _of_norm(ours, size, called("weight") + called("gamma"))
    if spec.norm.has_bias:
        yield _of_norm(f"{ours}_bias", size, called("bias") + called("beta"))


def _of_norm(name: str, size: Shape, ways: tuple[Way, ...]) -> Target:
    return target(name, size, *ways)._replace(is_float32=True)


def _linear(
    spec: EncoderSpec,
    ours: str,
    sizes: tuple[tuple[int, ...], int, bool],
    theirs: Callable[[EncoderNames], tuple[str, ...]],
) -> Iterator[Target]:
    """The weight and perhaps the bias of a linear layer. sizes: (outputs of each part, inputs, True
    if it has a bias); theirs: the modules of the parts, or a single one for all."""
    rows, width, has_bias = sizes
    for kind in ("weight", "bias") if has_bias else ("weight",):
        inner = (width,) if kind == "weight" else ()

        def way(names: EncoderNames, kind: str = kind, inner: Shape = inner) -> Way:
            modules = theirs(names)
            if len(modules) == len(rows):
                pairs = zip(modules, rows, strict=True)
                return tuple(whole(f"{module}.{kind}", num, *inner) for module, num in pairs)
            size = prod((sum(rows), *inner))
            both = whole(f"{modules[0]}.{kind}", sum(rows), *inner)
            if names.is_up_first and modules[0].endswith(names.up[0]):  # of gate and up
                half = size // 2
                return both._replace(start=half, size=half), both._replace(size=half)
            return (both,)

        name = ours if kind == "weight" else f"{ours}_bias"
        yield _each(spec, name, (sum(rows), *inner), way)


def _each(spec: EncoderSpec, name: str, shape: Shape, way: Callable[[EncoderNames], Way]) -> Target:
    """A target with a way for each form of names and each prefix of all names."""
    ways = (
        tuple(part._replace(name=root + part.name) for part in way(names))
        for names in spec.names
        for root in spec.roots
    )
    return target(name, shape, *ways)

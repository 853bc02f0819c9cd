"""Reads damaged and hostile GGUF files: each is read whole or refused with a ``ModelError``.

    python tools/fuzz_gguf.py 10000 [SEED]

Files are made from valid tiny models of every architecture: values of other types,
impossible counts and shapes, tensors that overlap, and bytes that are flipped, inserted or cut off.
Prints how many were read and refused, and by how much the process grew. A file that raises any
other error is kept, and its path is part of the error.
"""

from __future__ import annotations

import resource
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from engine.cli.models import rows_of_file
from engine.config.model import ModelConfig, read_model_info
from engine.errors import ModelError
from engine.gguf.config import ARCHITECTURES
from engine.gguf.directory import make
from engine.models.gguf_weights import GgufCheckpoint
from engine.models.load import load_model, native_spec
from engine.models.targets import targets
from engine.models.weights import StoredWeights
from engine.text.tokenizer import load_tokenizer
from kernels.cpu.matmul.gguf import TYPES

HIDDEN, FEED, HEADS, HEAD_DIM, VOCAB, EXPERTS = 32, 64, 2, 16, 40, 2
FEED_FORWARD = ("ffn_gate", "ffn_up", "ffn_down")
WITH_EXPERTS = ("qwen3moe", "qwen2moe", "olmoe", "granitemoe", "gpt-oss", "lfm2moe")
WITH_CONVOLUTION = ("lfm2", "lfm2moe")
ROWS = HEADS * HEAD_DIM
USUAL_SHAPES: dict[str, tuple[int, ...]] = {
    "attn_norm": (HIDDEN,),
    "ffn_norm": (HIDDEN,),
    "attn_q": (ROWS, HIDDEN),
    "attn_k": (HEAD_DIM, HIDDEN),
    "attn_v": (HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, ROWS),
    "ffn_gate": (FEED, HIDDEN),
    "ffn_up": (FEED, HIDDEN),
    "ffn_down": (HIDDEN, FEED),
}
MORE_SHAPES: tuple[tuple[tuple[str, ...], dict[str, tuple[int, ...]]], ...] = (
    (
        ("qwen3", "qwen3moe", "gemma3", "exaone4", "lfm2", "lfm2moe"),
        {"attn_q_norm": (HEAD_DIM,), "attn_k_norm": (HEAD_DIM,)},
    ),
    (("olmo2", "olmoe"), {"attn_q_norm": (ROWS,), "attn_k_norm": (HEAD_DIM,)}),
    (
        ("gemma2", "gemma3", "olmo2", "exaone4", "glm4", "seed_oss", "gpt-oss"),
        {"post_attention_norm": (HIDDEN,)},
    ),
    (("gemma2", "gemma3", "olmo2", "exaone4", "glm4"), {"post_ffw_norm": (HIDDEN,)}),
    (("phi3",), {"attn_qkv": (ROWS + 2 * HEAD_DIM, HIDDEN)}),
    (("phi3", "glm4"), {"ffn_up": (2 * FEED, HIDDEN)}),
    (("gpt-oss",), {"attn_sinks": (HEADS,)}),
    (
        ("qwen2moe",),
        {
            "ffn_gate_inp_shexp": (HIDDEN,),
            **{f"{name}_shexp": USUAL_SHAPES[name] for name in FEED_FORWARD},
        },
    ),
)
"""Shapes of tensors that only some architectures have."""
CONVOLUTION: dict[str, tuple[int, ...]] = {
    "shortconv.conv": (HIDDEN, 3),
    "shortconv.in_proj": (3 * HIDDEN, HIDDEN),
    "shortconv.out_proj": (HIDDEN, HIDDEN),
}
WITHOUT: dict[str, tuple[str, ...]] = {
    "olmo2": ("attn_norm", "ffn_norm"),
    "exaone4": ("attn_norm", "ffn_norm"),
    "phi3": ("attn_q", "attn_k", "attn_v", "ffn_gate"),
    "glm4": ("ffn_gate",),
    "starcoder2": ("ffn_gate",),
    "arcee": ("ffn_gate",),
    "command-r": ("ffn_norm",),
    "cohere2": ("ffn_norm",),
    "seed_oss": ("ffn_norm",),
    "gpt-oss": ("ffn_norm",),
}
"""Tensors that an architecture does not have."""
PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output")
ATTENTION = (*PROJECTIONS, "attn_q_norm", "attn_k_norm")
WITH_BIASES: dict[str, tuple[str, ...]] = {
    "qwen2": PROJECTIONS[:3],
    "qwen2moe": PROJECTIONS[:3],
    "starcoder2": (*PROJECTIONS, "ffn_up", "ffn_down", "attn_norm", "ffn_norm"),
    "stablelm": ("attn_norm", "ffn_norm"),
    "gpt-oss": (*PROJECTIONS, "ffn_gate_inp", *(f"{name}_exps" for name in FEED_FORWARD)),
}
"""Tensors of an architecture that have a bias."""
Type = GGUFValueType
Value = tuple[Type, Any]
NUMBERS = {
    Type.UINT8: "<B",
    Type.INT8: "<b",
    Type.UINT16: "<H",
    Type.INT16: "<h",
    Type.UINT32: "<I",
    Type.INT32: "<i",
    Type.FLOAT32: "<f",
    Type.BOOL: "<?",
    Type.UINT64: "<Q",
    Type.INT64: "<q",
    Type.FLOAT64: "<d",
}
WEIRD: tuple[Value, ...] = (
    *((Type.UINT32, value) for value in (0, 1, 3, 2**31, 2**32 - 1)),
    *((Type.INT32, value) for value in (-1, -(2**31), 7)),
    *((Type.UINT64, value) for value in (2**63, 2**64 - 1, 2**40)),
    *((Type.INT64, value) for value in (-(2**63), 2**62)),
    *((Type.FLOAT32, value) for value in (0.0, -1.0, float("nan"), float("inf"), 1e38, 0.5)),
    *((Type.FLOAT64, value) for value in (1e300, float("-inf"))),
    *((Type.BOOL, value) for value in (True, False)),
    *((Type.STRING, value) for value in (b"", b"yarn", b"linear", b"x" * 5000, b"\xff\xfe\x00")),
    (Type.ARRAY, (Type.UINT32, [])),
    (Type.ARRAY, (Type.UINT32, [2, 2])),
    (Type.ARRAY, (Type.INT32, [-1, 5, 7])),
    (Type.ARRAY, (Type.FLOAT32, [float("nan")])),
    (Type.ARRAY, (Type.BOOL, [True])),
    (Type.ARRAY, (Type.STRING, [b"a", b"\xff", b""])),
    (Type.ARRAY, (Type.STRING, [])),
)
EXTREME = (0, 1, 7, 31, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)
MORE_KEYS = (
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast", "rope.scale_linear"),
    *("rope.dimension_count", "rope.freq_base_swa", "attention.key_length"),
    *("attention.value_length", "attention.sliding_window", "attention.scale"),
    *("attention.sliding_window_pattern", "attn_logit_softcapping", "final_logit_softcapping"),
    *("expert_count", "expert_used_count", "expert_feed_forward_length"),
    *("embedding_scale", "residual_scale", "logit_scale"),
)
GENERAL_KEYS = (
    *("general.alignment", "general.name", "split.no", "split.count", "split.tensors.count"),
    *("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id", "tokenizer.chat_template"),
    *("tokenizer.ggml.padding_token_id", "tokenizer.ggml.unknown_token_id"),
    *("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_space_prefix", "tokenizer.ggml.pre"),
    *("general.sampling.temp", "general.sampling.top_k", "general.sampling.top_p"),
)


IN_SHORT_BLOCKS = tuple(
    kind for kind in GGMLQuantizationType if kind.name in TYPES and GGML_QUANT_SIZES[kind][0] == 32
)
"""Types of packed matrices that rows of 32 elements can have."""


@dataclass
class Stored:
    """One tensor of a file that is being made."""

    name: str
    shape: tuple[int, ...]
    kind: int = int(GGMLQuantizationType.F32)
    offset: int = -1
    """Position among the data; -1: after the tensor before."""


@dataclass
class File:
    """The contents of a file, before they are encoded."""

    metadata: list[tuple[str, Value]]
    tensors: list[Stored]
    magic: bytes = b"GGUF"
    version: int = 3
    num_tensors: int | None = None
    num_keys: int | None = None

    def encode(self) -> bytes:
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_keys = len(self.metadata) if self.num_keys is None else self.num_keys
        out = bytearray(self.magic + struct.pack("<IQQ", self.version, num_tensors, num_keys))
        for key, (kind, value) in self.metadata:
            out += text(key.encode()) + struct.pack("<I", kind) + encoded(kind, value)
        end = 0
        for each in self.tensors:
            offset = end if each.offset < 0 else each.offset
            out += text(each.name.encode()) + struct.pack("<I", len(each.shape))
            out += b"".join(struct.pack("<Q", size) for size in reversed(each.shape))
            out += struct.pack("<IQ", each.kind, offset)
            end = max(end, -(-(offset + num_bytes(each)) // 32) * 32) % (1 << 40)
        out += bytes(-len(out) % 32)
        return bytes(out) + b"\x3c" * min(end, 1 << 20)


@dataclass
class Result:
    """What became of the files."""

    files: int = 0
    read: int = 0
    refused: int = 0
    grown_mib: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)


def num_bytes(each: Stored) -> int:
    size, total = GGML_QUANT_SIZES.get(GGMLQuantizationType.F32, (1, 4)), prod(each.shape)
    if each.kind in set(GGMLQuantizationType):
        size = GGML_QUANT_SIZES[GGMLQuantizationType(each.kind)]
    return min(total // size[0] * size[1], 1 << 20)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def encoded(kind: Type, value: Any) -> bytes:
    if kind is Type.STRING:
        return text(value)
    if kind is Type.ARRAY:
        inner, values = value
        begin = struct.pack("<IQ", inner, len(values))
        return begin + b"".join(encoded(inner, each) for each in values)
    return struct.pack(NUMBERS[kind], value)


def valid(architecture: str, matrices: GGMLQuantizationType = GGMLQuantizationType.F32) -> File:
    """A file that can be read: a model of few layers. matrices: their type."""
    number: Callable[[int], Value] = lambda value: (Type.UINT32, value)  # noqa: E731
    values: dict[str, Value] = {
        "context_length": number(64),
        "embedding_length": number(HIDDEN),
        "block_count": number(1),
        "feed_forward_length": number(FEED),
        "attention.head_count": number(HEADS),
        "attention.head_count_kv": number(1),
        "attention.layer_norm_rms_epsilon": (Type.FLOAT32, 1e-5),
        "rope.freq_base": (Type.FLOAT32, 10_000.0),
    }
    if architecture in ("gemma3", "cohere2", "exaone4", "gpt-oss"):
        values["attention.sliding_window"] = number(16)
    if architecture in ("starcoder2", "stablelm", "command-r", "cohere2"):
        values["attention.layer_norm_epsilon"] = (Type.FLOAT32, 1e-5)
    if architecture in ("command-r", "cohere2"):
        values["logit_scale"] = (Type.FLOAT32, 0.5)
    if architecture in WITH_EXPERTS:
        for key, value in (("count", EXPERTS), ("used_count", 1), ("feed_forward_length", FEED)):
            values[f"expert_{key}"] = number(value)
    if architecture in WITH_CONVOLUTION:
        values["block_count"] = number(2)
        values["attention.head_count_kv"] = (Type.ARRAY, (Type.INT32, [1, 0]))
        values["shortconv.l_cache"] = number(3)
    if architecture == "qwen2moe":
        values["expert_shared_feed_forward_length"] = number(FEED)
    metadata: list[tuple[str, Value]] = [
        ("general.architecture", (Type.STRING, architecture.encode())),
        *((f"{architecture}.{key}", value) for key, value in values.items()),
        *vocabulary(architecture.startswith("qwen")),
        ("tokenizer.ggml.eos_token_id", number(2)),
    ]
    tensors = tensors_of(architecture)
    for each in tensors:
        each.kind = int(matrices if len(each.shape) == 2 else GGMLQuantizationType.F32)
    return File(metadata, tensors)


def vocabulary(has_merges: bool) -> list[tuple[str, Value]]:
    """Metadata of a tokenizer: byte-level with merges, or SentencePiece with scores."""
    prefix = "tokenizer.ggml."
    kinds = (Type.ARRAY, (Type.INT32, [1] * VOCAB))
    if has_merges:
        tokens = [bytes([97 + index]) for index in range(26)]
        tokens += [b"a" + each for each in tokens[: VOCAB - len(tokens)]]
        merges = [b"a " + each[1:] for each in tokens[26:]]
        return [
            (f"{prefix}model", (Type.STRING, b"gpt2")),
            (f"{prefix}pre", (Type.STRING, b"qwen2")),
            (f"{prefix}tokens", (Type.ARRAY, (Type.STRING, tokens))),
            (f"{prefix}token_type", kinds),
            (f"{prefix}merges", (Type.ARRAY, (Type.STRING, merges))),
        ]
    return [
        (f"{prefix}model", (Type.STRING, b"llama")),
        (
            f"{prefix}tokens",
            (Type.ARRAY, (Type.STRING, [b"<%d>" % index for index in range(VOCAB)])),
        ),
        (
            f"{prefix}scores",
            (Type.ARRAY, (Type.FLOAT32, [-float(index) for index in range(VOCAB)])),
        ),
        (f"{prefix}token_type", kinds),
    ]


def tensors_of(architecture: str) -> list[Stored]:
    """The tensors of a model of one layer, or of a second one with a convolution."""
    layers = [shapes_of_layer(architecture)]
    if architecture in WITH_CONVOLUTION:
        others = {name: shape for name, shape in layers[0].items() if name not in ATTENTION}
        layers.append(others | CONVOLUTION)
    found = [
        Stored(f"blk.{index}.{name}.weight", shape)
        for index, layer in enumerate(layers)
        for name, shape in layer.items()
    ]
    with_bias = WITH_BIASES.get(architecture, ())
    found += [
        Stored(each.name.replace(".weight", ".bias"), each.shape[:-1] or each.shape)
        for each in found
        if each.name.split(".")[2] in with_bias
    ]
    final = "token_embd_norm" if architecture in WITH_CONVOLUTION else "output_norm"
    norms = [Stored(f"{final}.weight", (HIDDEN,))]
    if architecture in ("starcoder2", "stablelm"):
        norms.append(Stored("output_norm.bias", (HIDDEN,)))
    return [Stored("token_embd.weight", (VOCAB, HIDDEN)), *norms, *found]


def shapes_of_layer(architecture: str) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's weights by name."""
    without = WITHOUT.get(architecture, ())
    shapes = dict(USUAL_SHAPES)
    for architectures, more in MORE_SHAPES:
        if architecture in architectures:
            shapes |= more
    if architecture in WITH_EXPERTS:
        shapes |= {f"{name}_exps": (EXPERTS, *shapes[name]) for name in FEED_FORWARD}
        shapes |= {"ffn_gate_inp": (EXPERTS, HIDDEN)}
        without += FEED_FORWARD
    return {name: shape for name, shape in shapes.items() if name not in without}


def damage_values(file: File, random: Random) -> None:
    """Replace, add, remove or double a metadata value."""
    index = random.randrange(len(file.metadata))
    key, value = file.metadata[index]
    architecture = key.partition(".")[0] if index else "llama"
    what = random.randrange(8)
    if what < 4:
        file.metadata[index] = key, random.choice(WEIRD)
    elif what < 6:
        added = random.choice([*GENERAL_KEYS, *(f"{architecture}.{each}" for each in MORE_KEYS)])
        file.metadata.append((added, random.choice(WEIRD)))
    elif what == 6:
        del file.metadata[index]
    else:
        file.metadata.append((key, value))


def damage_tensors(file: File, random: Random) -> None:
    """Change the description of a tensor."""
    each = random.choice(file.tensors)
    what = random.randrange(7)
    if what == 0:
        shape = list(each.shape)
        shape[random.randrange(len(shape))] = random.choice(EXTREME)
        each.shape = tuple(shape)
    elif what == 1:
        each.shape = (*each.shape, random.choice(EXTREME))[: random.randrange(1, 7)]
    elif what == 2:
        each.kind = random.choice([*GGMLQuantizationType, 4, 99, 2**32 - 1])
    elif what == 3:
        each.offset = random.choice((*EXTREME, 32, 64, 4096))
    elif what == 4:
        other = random.choice(file.tensors).name
        names = (other, "", "x" * 3000, "blk.999999999.attn_q.weight", "rope_freqs.weight")
        each.name = random.choice((*names, "rope_factors_long.weight", "output.weight"))
    elif what == 5:
        file.tensors.remove(each)
    else:
        file.tensors.append(Stored(each.name, each.shape))


def damage_counts(file: File, random: Random) -> None:
    """Change a number of the first bytes."""
    what = random.randrange(4)
    if what == 0:
        file.magic = random.choice((b"GGML", b"FUGG", b"\0\0\0\0", b"GGUf"))
    elif what == 1:
        file.version = random.choice((0, 1, 2, 4, 3 << 24, 2**32 - 1))
    elif what == 2:
        file.num_tensors = random.choice(EXTREME)
    else:
        file.num_keys = random.choice(EXTREME)


def damage_bytes(content: bytes, random: Random) -> bytes:
    """Flip, insert, overwrite or cut off bytes, most of them in the header."""
    out = bytearray(content)
    end = min(len(out), 4096)
    for _ in range(random.randrange(1, 4)):
        place = random.randrange(max(1, end))
        what = random.randrange(4)
        if what == 0:
            out[place : place + 1] = bytes([random.randrange(256)])
        elif what == 1:
            out[place:place] = random.randbytes(random.randrange(1, 40))
        elif what == 2:
            out[place : place + 8] = struct.pack("<Q", random.choice(EXTREME))
        else:
            del out[random.randrange(len(out) + 1) :]
    return bytes(out)


def hostile(random: Random) -> bytes:
    """The contents of a file that differs from a valid one in one to three ways."""
    file = valid(random.choice(tuple(ARCHITECTURES)))
    ways = (damage_values, damage_values, damage_values, damage_tensors, damage_tensors)
    for _ in range(random.randrange(0, 4)):
        if not file.metadata or not file.tensors:
            break
        random.choice((*ways, damage_counts))(file, random)
    content = file.encode()
    return damage_bytes(content, random) if random.random() < 0.3 else content


def read_whole(path: Path, place: Path) -> None:
    """Read a file as the engine does when it starts. Raises ``ModelError``."""
    rows_of_file(str(path))
    info = read_model_info(make(path, place))
    load_tokenizer(ModelConfig(model=str(place))).encode("a text: aab <7> \u00e9")
    spec = native_spec(info)
    if spec is None:
        load_model(ModelConfig(model=str(place)), info, device="cpu", max_model_len=16)
        return
    with GgufCheckpoint(path) as checkpoint:
        size = path.stat().st_size
        assert all(each.offset + each.num_bytes <= size for each in checkpoint.tensors.values()), (
            "a tensor ends after the file"
        )
        weights = StoredWeights(checkpoint, targets(spec))
        for target in targets(spec):
            weights.load(target, torch.float32)


def fuzz(count: int, seed: int) -> Result:
    """Read ``count`` hostile files. Raises ``AssertionError`` with the path of a file that raises
    anything but ``ModelError``."""
    random, result = Random(seed), Result()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        # Valid files first, so that everything is imported and all kernels are compiled.
        good = {name: valid(name) for name in ARCHITECTURES}
        good |= {kind.name: valid("gemma", kind) for kind in IN_SHORT_BLOCKS}
        for name, file in good.items():
            (root / "valid.gguf").write_bytes(file.encode())
            read_whole(root / "valid.gguf", root / f"valid-{name}")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(count):
            path = root / f"{number}.gguf"
            path.write_bytes(hostile(random))
            result.files += 1
            try:
                read_whole(path, root / str(number))
                result.read += 1
            except ModelError as error:
                result.refused += 1
                result.reasons[str(error).replace(str(path), "")[:60]] += 1
            except BaseException as error:
                kept = Path(tempfile.gettempdir()) / f"hostile-{seed}-{number}.gguf"
                kept.write_bytes(path.read_bytes())
                raise AssertionError(f"{kept} raises {error!r}") from error
            path.unlink()
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result.grown_mib = (after - before) / 1024
    return result


if __name__ == "__main__":
    outcome = fuzz(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print(
        f"{outcome.files} files: {outcome.read} read, {outcome.refused} refused for "
        f"{len(outcome.reasons)} reasons; the process grew by {outcome.grown_mib:.0f} MiB"
    )

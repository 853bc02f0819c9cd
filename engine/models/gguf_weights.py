"""The weights of a GGUF file under the names and in the order of Hugging Face checkpoints.

Quantised matrices stay quantised; ``read`` dequantises in pieces. What llama.cpp's conversion
changed is changed back: it reorders the rows of queries and keys of Llama models, because it
rotates neighbouring elements and not halves of a head, and stores Gemma's norm weights plus one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.gguf.header import GgufHeader, GgufTensor, damaged, read_gguf
from engine.gguf.meta import Meta
from engine.layers.quantized import GgufWeight, StoredWeight
from engine.models.checkpoint import Checkpoint, StoredTensor
from engine.models.file_reader import FileReader
from engine.models.targets import TargetPart
from kernels.cpu.matmul.gguf import TYPES
from kernels.pages import allocate

PIECE_ELEMENTS = 1 << 20
READ = frozenset(
    kind for kind in GGMLQuantizationType if kind.name in ("F32", "F16", "BF16", *TYPES)
)
"""Types of tensors that can be read."""

TABLES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "token_embd_norm.weight": "model.embedding_norm.weight",
}
MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Modules of a layer by the name that GGUF gives them."""
OF_LFM2 = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b": "feed_forward.expert_bias",
    "ffn_gate_exps": "feed_forward.experts.gate_proj",
    "ffn_up_exps": "feed_forward.experts.up_proj",
    "ffn_down_exps": "feed_forward.experts.down_proj",
}
RENAMED: dict[str, dict[str, str]] = {
    "lfm2": OF_LFM2,
    "lfm2moe": OF_LFM2,
    "gemma2": {"ffn_norm": "pre_feedforward_layernorm"},
    "gemma3": {"ffn_norm": "pre_feedforward_layernorm"},
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "starcoder2": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    "glm4": {
        "ffn_up": "mlp.gate_up_proj",
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    "granitemoe": {
        "ffn_gate_inp": "block_sparse_moe.router",
        "ffn_gate_exps": "block_sparse_moe.experts.gate_proj",
        "ffn_up_exps": "block_sparse_moe.experts.up_proj",
        "ffn_down_exps": "block_sparse_moe.experts.down_proj",
    },
    "gpt-oss": {"ffn_gate_inp": "mlp.router", "attn_sinks": "self_attn.sinks"},
}
"""Modules that an architecture calls otherwise."""
PERMUTED = frozenset({"llama", "granite", "smollm3", "granitemoe", "arcee", "mistral3"})
"""Architectures whose rows of queries and keys are reordered."""
PLUS_ONE = frozenset({"gemma", "gemma2", "gemma3"})
"""Architectures whose norm weights are stored plus one."""
QUERY_OR_KEY = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)")
UNUSED = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight|.*\.rot_pos_embd")
"""Tensors that the configuration holds already, see ``engine.gguf.config``."""
LAYER = re.compile(r"blk\.(\d{1,9})\.(\w+|shortconv\.\w+)\.(weight|bias)")
BARE = {"attn_sinks": ".weight", "exp_probs_b": ".bias"}
"""Tensors whose names in a checkpoint have no such ending."""
EXPERT = re.compile(r"blk\.(\d{1,9})\.ffn_(gate|up|down)\.(\d{1,9})\.weight")
"""A matrix of one expert in files from before 2024, which do not stack them."""


class Conversion(NamedTuple):
    """What is done to a tensor of the file to make that of a Hugging Face checkpoint."""

    stored: GgufTensor
    num_heads: int
    """Heads whose rows are reordered; 0: none."""
    offset: float
    """Added to each element."""


class GgufCheckpoint(Checkpoint):
    """The tensors of a GGUF file by their names in a Hugging Face checkpoint."""

    def __init__(self, path: Path, header: GgufHeader | None = None) -> None:
        """Raises ``ModelError`` for files that are missing or damaged, or that have tensors of
        types that cannot be read."""
        header = header or read_gguf(path)
        check_types(header)
        self.root = path
        self._conversions = conversions(header)
        self.tensors = {
            name: StoredTensor(
                each.stored.file,
                each.stored.type.name,
                each.stored.shape,
                each.stored.offset,
                each.stored.num_bytes,
            )
            for name, each in self._conversions.items()
        }
        files = {stored.file for stored in header.tensors.values()}
        try:
            self._files = FileReader(files)
        except OSError as error:
            raise ModelError(f"{error.filename} cannot be read: {error.strerror}") from error

    @property
    def quantized_types(self) -> list[str]:
        """Names of the types of quantised tensors in the file, sorted."""
        return sorted({stored.dtype for stored in self.tensors.values()} - {"F32", "F16", "BF16"})

    def read(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill ``out`` (contiguous, on the CPU) with elements of a tensor from index ``start`` on,
        which begins a row, converted to the dtype of ``out``."""
        stored, num_heads, offset = self._conversions[name]
        # The elements of a bias with reordered heads are treated as rows.
        is_bias = len(stored.shape) == 1 and num_heads > 0
        width = 1 if is_bias else stored.shape[-1]
        flat = out.view(-1, width)
        rows_at_once = max(1, PIECE_ELEMENTS // width)
        head_dim = stored.shape[0] // num_heads if num_heads else 1
        rows_at_once = max(1, rows_at_once // head_dim) * head_dim
        first = start // width
        for begin in range(0, len(flat), rows_at_once):
            end = min(len(flat), begin + rows_at_once)
            values = torch.from_numpy(self._rows(stored, width, first + begin, end - begin))
            if num_heads:
                values = in_halves(values, head_dim)
            flat[begin:end].copy_(values + offset if offset else values)

    def is_packed(self, part: TargetPart) -> bool:
        """True for a matrix of a type that stays quantised."""
        found = self._conversions.get(part.name)
        if found is None or len(found.stored.shape) < 2 or found.offset:
            return False
        return found.stored.type.name in TYPES

    def column_unit(self, part: TargetPart) -> int:
        """Number of columns in a block, which has scales of its own."""
        found = self._conversions.get(part.name)
        return 1 if found is None else GGML_QUANT_SIZES[found.stored.type][0]

    def quantized(self, parts: Sequence[TargetPart], dtype: torch.dtype) -> list[StoredWeight]:
        """Read rows of matrices, or those of experts, for which ``is_packed`` is true. Adjacent
        parts of one type are one weight, so that they need not be copied to be joined. Columns that
        are not whole blocks are dequantised."""
        read: list[StoredWeight] = []
        if any(part.columns is not None for part in parts):
            return [self._columns(part, dtype) for part in parts]
        for kind, run in groupby(parts, lambda part: self._conversions[part.name].stored.type.name):
            alike = list(run)
            sizes = [self._num_bytes(part) for part in alike]
            rows = allocate((sum(sizes),), torch.uint8)
            for part, own in zip(alike, rows.split(sizes), strict=True):
                self._read_rows(part, own)
            width = self._conversions[alike[0].name].stored.shape[-1]
            num = sum(part.size for part in alike) // width
            read.append(GgufWeight(rows=rows.view(num, -1), kind=kind, dtype=dtype))
        return read

    def _has_segments(self, part: TargetPart) -> bool:
        return False  # rows are dequantised whole

    def _columns(self, part: TargetPart, dtype: torch.dtype) -> StoredWeight:
        """Read some columns of a matrix."""
        stored, mine = self._conversions[part.name].stored, part.columns
        block_size, block_bytes = GGML_QUANT_SIZES[stored.type]
        assert mine is not None
        if mine.start % block_size or mine.stop % block_size:
            plain = allocate((part.num_rows, len(mine)), dtype)
            self.read_part(part, plain)
            return plain
        first, last = (at // block_size * block_bytes for at in (mine.start, mine.stop))
        rows = allocate((part.num_rows, last - first), torch.uint8)
        whole = part.shape[-1] // block_size * block_bytes
        offset = stored.offset + part.start // block_size * block_bytes
        self.read_bytes(stored.file, offset, whole, range(first, last), rows)
        return GgufWeight(rows=rows, kind=stored.type.name, dtype=dtype)

    def _num_bytes(self, part: TargetPart) -> int:
        block_size, block_bytes = GGML_QUANT_SIZES[self._conversions[part.name].stored.type]
        return part.size // block_size * block_bytes

    def _read_rows(self, part: TargetPart, out: torch.Tensor) -> None:
        """Fill ``out``, uint8, with the bytes of rows of a matrix, in Hugging Face's order."""
        stored, num_heads, _ = self._conversions[part.name]
        block_size, block_bytes = GGML_QUANT_SIZES[stored.type]
        self._fill(stored.file, stored.offset + part.start // block_size * block_bytes, out)
        if num_heads:
            rows = out.view(part.size // stored.shape[-1], -1)
            rows.copy_(in_halves(rows, stored.shape[0] // num_heads))

    def main_dtype(self) -> torch.dtype | None:
        """``None``: the derived config.json names the dtype to compute in."""
        return None

    def tensor(self, name: str) -> torch.Tensor:
        """Read a tensor in float32."""
        out = torch.empty(self.tensors[name].shape)
        self.read(name, 0, out)
        return out

    def _rows(self, stored: GgufTensor, width: int, first: int, num: int) -> NDArray[np.float32]:
        """Rows [first, first + num) of ``width`` elements of a tensor."""
        packed = self._packed_rows(stored, width, first, num)
        values = dequantize(packed.numpy(), stored.type)
        return np.ascontiguousarray(values, dtype=np.float32).reshape(num, -1)

    def _packed_rows(self, stored: GgufTensor, width: int, first: int, num: int) -> torch.Tensor:
        """The bytes of rows [first, first + num) of ``width`` elements of a tensor, [num, bytes of
        a row] uint8."""
        block_size, block_bytes = GGML_QUANT_SIZES[stored.type]
        row_bytes = width // block_size * block_bytes
        packed = allocate((num, row_bytes), torch.uint8)
        self._fill(stored.file, stored.offset + first * row_bytes, packed)
        return packed


def check_types(header: GgufHeader) -> None:
    """Raise ``ModelError`` if a file has tensors of a type that cannot be read."""
    others = {t.type.name: name for name, t in header.tensors.items() if t.type not in READ}
    if others:
        name = next(iter(others.values()))
        raise ModelError(
            f"{header.path} has tensors of type {', '.join(sorted(others))} (such as "
            f"{name!r:.80}), which cannot be read; supported: "
            f"{', '.join(sorted(kind.name for kind in READ))}"
        )


def in_halves(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows of heads so that the two elements of a rotated pair are half a head apart
    and no longer neighbours."""
    pairs = rows.view(-1, head_dim // 2, 2, rows.shape[1]).transpose(1, 2)
    reordered = allocate(tuple(rows.shape), rows.dtype)
    reordered.view(pairs.shape).copy_(pairs)
    return reordered


def conversions(header: GgufHeader) -> dict[str, Conversion]:
    """The tensors of a file by their names in a Hugging Face checkpoint. Raises ``ModelError`` for
    an unknown tensor, and for one whose rows do not form heads."""
    meta = Meta(header)
    architecture = meta.architecture
    found: dict[str, Conversion] = {}
    for name, stored in header.tensors.items():
        if UNUSED.fullmatch(name):
            continue
        theirs = name_in_checkpoint(architecture, name)
        if theirs is None:
            raise ModelError(
                f"{stored.file} has the tensor {name!r:.80}, which is unknown for the architecture "
                f"{architecture!r}"
            )
        if theirs.endswith("shared_expert_gate.weight") and len(stored.shape) == 1:
            stored = stored._replace(shape=(1, *stored.shape))  # files may drop the dimension
        if theirs.endswith("conv.conv.weight") and len(stored.shape) == 2:
            stored = stored._replace(shape=(stored.shape[0], 1, stored.shape[1]))
        if theirs in found:
            raise damaged(stored.file, f"{name!r:.80} is another tensor of {theirs}")
        found[theirs] = Conversion(
            stored,
            _reordered_heads(meta, name, stored),
            -1.0 if architecture in PLUS_ONE and name.endswith("norm.weight") else 0.0,
        )
    return found


def name_in_checkpoint(architecture: str, name: str) -> str | None:
    """The name of a GGUF tensor in a Hugging Face checkpoint; ``None`` if it is unknown."""
    if name in TABLES:
        return TABLES[name]
    expert = EXPERT.fullmatch(name)
    if expert is not None:
        layer, half, number = expert.groups()
        return f"model.layers.{layer}.mlp.experts.{number}.{half}_proj.weight"
    parts = LAYER.fullmatch(name)
    if parts is None:
        return None
    layer, module, kind = parts.groups()
    named = RENAMED.get(architecture, {}).get(module) or MODULES.get(module)
    if named is None:
        return None
    name = f"model.layers.{layer}.{named}.{kind}"
    return name.removesuffix(BARE.get(module, ""))


def _reordered_heads(meta: Meta, name: str, stored: GgufTensor) -> int:
    """Number of heads in a tensor whose rows are reordered, 0 for other tensors."""
    if meta.architecture not in PERMUTED or not QUERY_OR_KEY.fullmatch(name):
        return 0
    heads = int(meta.count("attention.head_count"))
    if ".attn_k." in name:
        heads = int(meta.count("attention.head_count_kv", heads))
    rows = stored.shape[0]
    if rows % (2 * heads):
        raise damaged(stored.file, f"{name!r:.80} has {rows} rows for {heads} heads")
    return heads

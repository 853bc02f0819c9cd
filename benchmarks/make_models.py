"""Writes models with random weights in the formats of quantised files, to measure speed alone.

    python benchmarks/make_models.py OUT [--shapes mid,qwen3-0.6b] [--forms q4_0,q8_0,q4_k]

Sizes are those of `shapes.py`, and of `hybrid_shapes.py` and `seeing_shapes.py` (bf16 only). Forms
of GGUF files: the types of `tests/support/made_gguf.py`, all matrices in one type; the blocks of a
tensor are drawn from a pool, so that files of any size are written in seconds. Forms of
directories: `bf16`; `awq` (4 bits, groups of 128, tables and output layer in bfloat16); `w8a8`
(compressed-tensors: 8 bits, a scale for each output, activations quantised by token). The tokenizer
is that of the model in the box, padded to the shape's size.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hybrid_shapes import HYBRIDS, write_hybrid
from safetensors.torch import save_file
from seeing_shapes import SEEING, write_seeing
from shapes import SHAPES, Shape

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import gguf
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from support.gguf_tokenizers import texts_and_types
from support.made_gguf import KINDS, MadeGguf, pack
from tokenizers import Tokenizer

from engine.assets import BOX_MODEL

MODELS = [*SHAPES, *HYBRIDS, *SEEING]
FORMS = {kind.name.lower(): kind for kind in KINDS}
MAX_LEN = 8192
POOL = 1 << 22  # weights
STD = 0.02
AWQ_GROUP, AWQ_IN_A_NUMBER = 128, 8
AWQ = {"quant_method": "awq", "bits": 4, "group_size": AWQ_GROUP, "version": "gemm"} | {
    "zero_point": True,
    "modules_to_not_convert": ["lm_head"],
}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}
QUANTIZATION: dict[str, dict[str, Any] | None] = {"bf16": None, "awq": AWQ, "w8a8": W8A8}


def tensors_of(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names of a checkpoint's tensors, and their sizes."""
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    heads, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        yield f"{at}.self_attn.q_proj.weight", (heads, shape.hidden)
        yield f"{at}.self_attn.k_proj.weight", (kv, shape.hidden)
        yield f"{at}.self_attn.v_proj.weight", (kv, shape.hidden)
        yield f"{at}.self_attn.o_proj.weight", (shape.hidden, heads)
        yield f"{at}.mlp.gate_proj.weight", (shape.ff, shape.hidden)
        yield f"{at}.mlp.up_proj.weight", (shape.ff, shape.hidden)
        yield f"{at}.mlp.down_proj.weight", (shape.hidden, shape.ff)
        yield f"{at}.input_layernorm.weight", (shape.hidden,)
        yield f"{at}.post_attention_layernorm.weight", (shape.hidden,)
        if shape.architecture == "Qwen3ForCausalLM":
            yield f"{at}.self_attn.q_norm.weight", (shape.head_dim,)
            yield f"{at}.self_attn.k_norm.weight", (shape.head_dim,)
    yield "model.norm.weight", (shape.hidden,)
    if not shape.is_tied:
        yield "lm_head.weight", (shape.vocab, shape.hidden)


def write_gguf(shape: Shape, kind: GGMLQuantizationType, path: Path) -> None:
    """Write a GGUF file with all matrices in one type."""
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / "config.json").write_text(json.dumps(shape.hf_config(MAX_LEN)))
        made = MadeGguf(Path(root), kind)
    writer = gguf.GGUFWriter(path, made.architecture)
    made.add_metadata(writer)
    _add_tokenizer(writer, shape.vocab)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == made.architecture)
    names = gguf.get_tensor_name_map(arch, shape.layers)
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    sizes = []
    for name, dims in tensors_of(shape):
        theirs = names.get_name(name, try_suffixes=(".weight",))
        assert theirs is not None, name
        is_plain = len(dims) == 1
        stored = dims if is_plain else (dims[0], dims[1] // block_size * block_bytes)
        sizes.append((stored, is_plain))
        dtype = np.dtype(np.float32 if is_plain else np.uint8)
        raw = None if is_plain else kind
        num_bytes = int(np.prod(stored)) * dtype.itemsize
        writer.add_tensor_info(theirs, stored, dtype, num_bytes, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = np.random.default_rng(1)
    values = generator.normal(0, STD, (POOL // 4096, 4096)).astype(np.float32)
    pool = pack(values, kind).reshape(-1)
    for stored, is_plain in sizes:
        if is_plain:
            writer.write_tensor_data(np.ones(stored, np.float32))
            continue
        first = int(generator.integers(0, len(pool) // block_bytes)) * block_bytes
        tensor = np.resize(np.roll(pool, -first), int(np.prod(stored)))
        writer.write_tensor_data(tensor)
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    tokenizer = Tokenizer.from_file(str(BOX_MODEL / "tokenizer.json"))
    texts, types = texts_and_types(tokenizer, is_spaced=False, vocab_size=vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types(types)
    writer.add_token_merges(gguf.SpecialVocab(BOX_MODEL, load_merges=True).merges)


def write_directory(shape: Shape, form: str, path: Path) -> None:
    """Write a model directory, whose layers' matrices are quantised unless the form is bf16."""
    path.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(path)
    quantization = QUANTIZATION[form]
    config = shape.hf_config(MAX_LEN)
    if quantization is not None:
        config["quantization_config"] = quantization
    (path / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(1)
    stored: dict[str, torch.Tensor] = {}
    for name, dims in tensors_of(shape):
        if len(dims) == 1:
            stored[name] = torch.ones(dims, dtype=torch.bfloat16)
        elif form == "bf16" or ".layers." not in name:
            stored[name] = (STD * torch.randn(dims, generator=random)).bfloat16()
        else:
            make = awq if form == "awq" else w8a8
            module = name.removesuffix(".weight")
            found = make(dims[0], dims[1], random)
            stored |= {f"{module}.{part}": tensor for part, tensor in found.items()}
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})


def copy_tokenizer(path: Path) -> None:
    """Copy the tokenizer of the model in the box into a model directory."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BOX_MODEL / name, path)


def awq(outputs: int, inputs: int, random: torch.Generator) -> dict[str, torch.Tensor]:
    """Random tensors of an AWQ matrix, with values of standard deviation ``STD``."""
    groups, packed = inputs // AWQ_GROUP, outputs // AWQ_IN_A_NUMBER
    low, high = -(2**31), 2**31 - 1
    return {
        "qweight": torch.randint(low, high, (inputs, packed), generator=random).int(),
        "qzeros": torch.full((groups, packed), 0x77777777, dtype=torch.int32),
        "scales": torch.full((groups, outputs), STD / 4.6, dtype=torch.float16),
    }


def w8a8(outputs: int, inputs: int, random: torch.Generator) -> dict[str, torch.Tensor]:
    """Random tensors of a matrix of 8-bit integers with a scale for each output."""
    weight = (32 * torch.randn((outputs, inputs), generator=random)).clamp(-127, 127)
    scale = torch.full((outputs, 1), STD / 32, dtype=torch.bfloat16)
    return {"weight": weight.round().to(torch.int8), "weight_scale": scale}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="directory to write to")
    parser.add_argument("--shapes", default="mid,qwen3-0.6b", help=", ".join(MODELS))
    parser.add_argument(
        "--forms", default="q4_0,q8_0,q4_k", help=", ".join([*FORMS, *QUANTIZATION])
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.shapes.split(","):
        for form in args.forms.split(","):
            path = args.out / f"{name}-{form}"
            if name not in SHAPES and form != "bf16":
                parser.error(f"--forms {form}: {name} is written in bf16 only")
            if name in HYBRIDS:
                write_hybrid(name, path)
                copy_tokenizer(path)
            elif name in SEEING:
                write_seeing(name, path)
            elif form in QUANTIZATION:
                write_directory(SHAPES[name], form, path)
            elif form in FORMS:
                path = path.with_suffix(path.suffix + ".gguf")
                write_gguf(SHAPES[name], FORMS[form], path)
            else:
                parser.error(f"--forms {form}: choose from {', '.join([*FORMS, *QUANTIZATION])}")
            print(f"wrote {path}", flush=True)


if __name__ == "__main__":
    main()

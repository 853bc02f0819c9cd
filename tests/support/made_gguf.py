"""GGUF files of model directories, written as llama.cpp's conversion script writes them."""

from __future__ import annotations

import json
import math
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

Array = np.ndarray[Any, Any]
Kind = GGMLQuantizationType

# Byte offsets of the scales in a block, and their values for weights of about 0.1. The first is
# that of the multiplier, the second that of the minimum.
SCALES: dict[Kind, dict[int, float]] = {
    Kind.Q2_K: {80: 0.008, 82: 0.012},
    Kind.Q3_K: {108: 0.0025},
    Kind.Q4_K: {0: 0.0006, 2: 0.0045},
    Kind.Q5_K: {0: 0.0003, 2: 0.0045},
    Kind.Q6_K: {208: 0.00006},
    Kind.IQ4_NL: {0: 0.0015},
    Kind.IQ4_XS: {0: 0.0001},
}
KINDS = (
    *(Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0),
    *(Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS),
    Kind.MXFP4,
)
"""All types of tensors that the engine reads."""
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "granite": "granite",
    "smollm3": "smollm3",
    "gemma": "gemma",
    "starcoder2": "starcoder2",
    "stablelm": "stablelm",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "olmo3": "olmo2",
    "olmoe": "olmoe",
    "exaone4": "exaone4",
    "glm4": "glm4",
    "seed_oss": "seed_oss",
    "ernie4_5": "ernie4_5",
    "arcee": "arcee",
    "gpt_oss": "gpt-oss",
    "ministral3": "mistral3",
    "qwen2_moe": "qwen2moe",
    "granitemoe": "granitemoe",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
}
PERMUTED = ("llama", "granite", "smollm3", "granitemoe", "arcee", "mistral3")
PLUS_ONE = ("gemma", "gemma2", "gemma3")


def pack(values: Array, kind: Kind) -> Array:
    """Bytes [..., row bytes] of float32 values: quantised, or random blocks with scales of a usual
    size for types that the gguf package cannot quantise to."""
    if kind not in SCALES:
        return np.ascontiguousarray(quantize(values, kind)).view(np.uint8)
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(zlib.crc32(np.ascontiguousarray(values)))
    num = values.size // block_size
    blocks = generator.integers(0, 256, (num, block_bytes), dtype=np.uint8)
    for place, scale in SCALES[kind].items():
        factors = (scale * generator.uniform(0.5, 1.5, (num, 1))).astype("<f2")
        blocks[:, place : place + 2] = factors.view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


@dataclass
class MadeGguf:
    """What is written to a file: metadata is added to the writer, tensors are collected."""

    directory: Path
    kind: Kind = Kind.F32
    others: Mapping[str, Kind] = field(default_factory=dict)
    """Types of tensors that are not of type ``kind``, by the end of their name."""
    config: dict[str, Any] = field(init=False)
    architecture: str = field(init=False)
    twin: dict[str, Array] = field(default_factory=dict)
    """The dequantised tensors by their names in the checkpoint, in its order of rows."""
    tensors: dict[str, tuple[Array, Kind]] = field(default_factory=dict)
    """Bytes and type of tensors by their names in the file."""

    def __post_init__(self) -> None:
        self.config = json.loads((self.directory / "config.json").read_text())
        self.architecture = ARCHITECTURES[self.config["model_type"]]
        stored = {
            name: tensor.float().numpy()
            for file in sorted(self.directory.glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }
        arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture)
        names = gguf.get_tensor_name_map(arch, self.config["num_hidden_layers"])
        experts: dict[str, list[str]] = {}
        for name in sorted(stored, key=_natural):
            if self.architecture == "gpt-oss" and _is_of_gpt_oss(name):
                self._add_of_gpt_oss(names, name, stored[name])
                continue
            if name.endswith("input_linear.weight"):  # of Granite's experts
                self._add_halves(names, name, stored[name])
                continue
            if ".experts." in name:
                experts.setdefault(stacked_name(name), []).append(name)
                continue
            theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert theirs is not None, name
            theirs += ".bias" if name.endswith(".expert_bias") else ""
            self.twin[name] = self._add(theirs, name, stored[name])
        for merged, parts in experts.items():
            theirs = names.get_name(merged, try_suffixes=(".weight",))
            assert theirs is not None, merged
            values = self._add(theirs, merged, np.stack([stored[part] for part in parts]))
            self.twin |= dict(zip(parts, values, strict=True))
        self._add_rope_factors()

    def _add(self, theirs: str, name: str, values: Array) -> Array:
        """Add a tensor to the file; returns what a reader should find in it."""
        heads, whole = self._permuted_heads(name), values.shape
        if name.endswith("conv.conv.weight"):
            values = values.squeeze(1)
        if heads:
            shape = values.shape
            pairs = values.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
            values = pairs.swapaxes(1, 2).reshape(shape)
        shift = self.architecture in PLUS_ONE and name.endswith("norm.weight")
        if shift:
            values = values + np.float32(1)
        is_plain = values.ndim == 1 or theirs.endswith((".bias", "ffn_gate_inp.weight"))
        stem = theirs.removesuffix(".weight")
        kind = next((k for end, k in self.others.items() if stem.endswith(end)), self.kind)
        block_size = GGML_QUANT_SIZES[kind][0]
        kind = Kind.F32 if is_plain or values.shape[-1] % block_size else kind
        packed = pack(np.ascontiguousarray(values, dtype=np.float32), kind)
        # llama.cpp's quantisation drops leading dimensions of size 1.
        self.tensors[theirs] = packed[0] if packed.shape[0] == 1 else packed, kind
        found = dequantize(packed, kind).astype(np.float32).reshape(values.shape)
        if shift:
            found = found - np.float32(1)
        if heads:
            pairs = found.reshape(heads, found.shape[0] // heads // 2, 2, *found.shape[1:])
            found = pairs.swapaxes(1, 2).reshape(found.shape)
        return np.ascontiguousarray(found).reshape(whole)

    def _add_halves(self, names: gguf.TensorNameMap, name: str, values: Array) -> None:
        """Add the gate and up matrices of all experts, which are one tensor in the checkpoint."""
        found = []
        for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
            block = name.replace("block_sparse_moe.input_linear", f"mlp.experts.{part}_proj")
            theirs = names.get_name(block, try_suffixes=(".weight",))
            assert theirs is not None, name
            found.append(self._add(theirs, name, half))
        self.twin[name] = np.concatenate(found, axis=1)

    def _add_of_gpt_oss(self, names: gguf.TensorNameMap, name: str, values: Array) -> None:
        """Add sinks, or the matrices or biases of all experts: gate and up alternate, and matrices
        have one column for each output."""
        if name.endswith("sinks"):
            theirs = names.get_name(f"{name}.weight", try_suffixes=(".weight",))
            assert theirs is not None
            self.twin[name] = self._add(theirs, name, values)
            return
        block, _, half = name.rpartition(".")
        kind = "bias" if half.endswith("_bias") else "weight"
        if kind == "weight":
            values = values.swapaxes(1, 2)
        found = []
        is_pair = half.startswith("gate_up")
        for place, part in enumerate(("gate_proj", "up_proj") if is_pair else ("down_proj",)):
            theirs = names.get_name(f"{block}.{part}.{kind}", try_suffixes=(".weight", ".bias"))
            assert theirs is not None, name
            found.append(self._add(theirs, name, values[:, place::2] if is_pair else values))
        whole = np.stack(found, 2).reshape(values.shape) if is_pair else found[0]
        self.twin[name] = np.ascontiguousarray(whole if kind == "bias" else whole.swapaxes(1, 2))

    def _permuted_heads(self, name: str) -> int:
        if self.architecture not in PERMUTED:
            return 0
        if ".q_proj." in name:
            return int(self.config["num_attention_heads"])
        return int(self.config["num_key_value_heads"]) if ".k_proj." in name else 0

    def _add_rope_factors(self) -> None:
        rope = self._rope()
        if rope.get("rope_type") == "llama3":
            dim = self._head_dim()
            freqs = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)
            factors = [_llama3_factor(float(freq), rope) for freq in freqs]
            self._add_plain("rope_freqs.weight", factors)
        for length in ("long", "short"):
            if rope.get(f"{length}_factor"):
                self._add_plain(f"rope_factors_{length}.weight", rope[f"{length}_factor"])

    def _add_plain(self, name: str, values: Iterable[float]) -> None:
        self.tensors[name] = np.array(list(values), dtype="<f4").view(np.uint8), Kind.F32

    def _rope(self) -> dict[str, Any]:
        rope = self.config.get("rope_parameters") or {}
        return dict(rope.get("full_attention", rope))

    def _head_dim(self) -> int:
        config = self.config
        return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        config, rope = self.config, self._rope()
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_feed_forward_length(self._mlp_size())
        writer.add_head_count(config["num_attention_heads"])
        kv_heads = config["num_key_value_heads"]
        if "conv_L_cache" in config:
            kinds = config["layer_types"]
            kv_heads = [0 if kind == "conv" else kv_heads for kind in kinds]
            writer.add_shortconv_l_cache(config["conv_L_cache"])
        writer.add_head_count_kv(kv_heads)
        if "rms_norm_eps" in config or "norm_eps" in config:
            writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_eps"])
        if "layer_norm_eps" in config or "norm_epsilon" in config:
            writer.add_layer_norm_eps(config.get("layer_norm_eps") or config["norm_epsilon"])
        writer.add_vocab_size(config["vocab_size"])
        if config.get("head_dim") and self.architecture != "phi3":
            writer.add_key_length(config["head_dim"])
            writer.add_value_length(config["head_dim"])
        share = rope.get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(self._head_dim() * share))
        if "rope_theta" in rope:
            writer.add_rope_freq_base(rope["rope_theta"])
        local = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
        if "rope_theta" in local:
            writer.add_rope_freq_base_swa(local["rope_theta"])
        self._add_scaling(writer, rope)
        self._add_experts(writer)
        self._add_family(writer)
        for name in ("bos", "eos", "pad"):
            if isinstance(config.get(f"{name}_token_id"), int):
                getattr(writer, f"add_{name}_token_id")(config[f"{name}_token_id"])

    def _mlp_size(self) -> int:
        """Rows of the gate matrix of a dense layer."""
        stored = self.twin.get("model.layers.0.feed_forward.w1.weight")
        return int(self.config["intermediate_size"]) if stored is None else len(stored)

    def _add_scaling(self, writer: gguf.GGUFWriter, rope: Mapping[str, Any]) -> None:
        kind = rope.get("rope_type")
        if kind == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            if "beta_fast" in rope:
                writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
                writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
            if "llama_4_scaling_beta" in rope:
                writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
                writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        if kind == "longrope":
            original = rope["original_max_position_embeddings"]
            scale = self.config["max_position_embeddings"] / original
            writer.add_rope_scaling_orig_ctx_len(original)
            writer.add_rope_scaling_attn_factors(
                math.sqrt(1 + math.log(scale) / math.log(original))
            )

    def _add_experts(self, writer: gguf.GGUFWriter) -> None:
        config = self.config
        experts = config.get("num_local_experts") or config.get("num_experts")
        if experts:
            writer.add_expert_count(experts)
            writer.add_expert_used_count(config["num_experts_per_tok"])
        if config.get("moe_intermediate_size"):
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        if config["model_type"] == "lfm2_moe":
            writer.add_leading_dense_block_count(config["num_dense_layers"])
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        if config.get("shared_expert_intermediate_size"):
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])

    def _add_family(self, writer: gguf.GGUFWriter) -> None:
        config, kind = self.config, self.config["model_type"]
        if kind in ("gemma2", "gemma3_text", "phi3", "cohere2", "olmo3", "exaone4", "gpt_oss"):
            writer.add_sliding_window(config.get("sliding_window") or 0)
        if kind in ("gemma3_text", "olmo3", "exaone4"):
            has_window = [each == "sliding_attention" for each in config["layer_types"]]
            writer.add_sliding_window_pattern(has_window)
        if kind in ("gemma2", "gemma3_text") and config.get("final_logit_softcapping"):
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        if kind == "gemma2":
            writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        if kind == "gpt_oss":
            writer.add_expert_feed_forward_length(config["intermediate_size"])
        for key, add in {
            "attention_multiplier": writer.add_attention_scale,
            "embedding_multiplier": writer.add_embedding_scale,
            "residual_multiplier": writer.add_residual_scale,
            "logits_scaling": writer.add_logit_scale,
            "logit_scale": writer.add_logit_scale,
            "use_parallel_residual": writer.add_parallel_residual,
        }.items():
            if key in config:
                add(config[key])

    def write(self, path: Path, **metadata: str) -> Path:
        """Write the file. metadata: further strings by key, with "__" for each dot."""
        writer = gguf.GGUFWriter(path, self.architecture)
        self.add_metadata(writer)
        for key, value in metadata.items():
            writer.add_string(key.replace("__", "."), value)
        for name, (packed, kind) in self.tensors.items():
            writer.add_tensor(name, packed, raw_dtype=kind)
        _finish(writer)
        return path

    def write_split(self, path: Path, count: int) -> list[Path]:
        """Write the model as a split file of ``count`` parts; the first has the metadata."""
        names = list(self.tensors)
        files = []
        for number in range(count):
            file = path.with_name(f"{path.name}-{number + 1:05d}-of-{count:05d}.gguf")
            writer = gguf.GGUFWriter(file, self.architecture)
            if not number:
                self.add_metadata(writer)
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", count)
            writer.add_int32("split.tensors.count", len(names))
            for name in names[number::count]:
                packed, kind = self.tensors[name]
                writer.add_tensor(name, packed, raw_dtype=kind)
            _finish(writer)
            files.append(file)
        return files

    def write_twin(self, path: Path) -> Path:
        """Write a model directory with the dequantised weights, in float32."""
        path.mkdir(parents=True)
        shutil.copy(self.directory / "config.json", path)
        tensors = {name: torch.from_numpy(values) for name, values in self.twin.items()}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stacked_name(name: str) -> str:
    """The name that the conversion gives to the stacked matrices of all experts."""
    before, after = name.split(".experts.")
    half = after.split(".")[1]
    if half in ("w1", "w2", "w3"):
        layer = before.split(".")[2]
        return f"layers.{layer}.feed_forward.experts.{half}.weight"
    return f"{before}.experts.{half}.weight"


def _is_of_gpt_oss(name: str) -> bool:
    return ".experts." in name or name.endswith("sinks")


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _llama3_factor(freq: float, rope: Mapping[str, Any]) -> float:
    original = rope["original_max_position_embeddings"]
    wave = 2 * math.pi / freq
    if wave < original / rope["high_freq_factor"]:
        return 1.0
    if wave > original / rope["low_freq_factor"]:
        return float(rope["factor"])
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share = (original / wave - low) / (high - low)
    return float(1 / ((1 - share) / rope["factor"] + share))

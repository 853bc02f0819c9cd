"""Quantised model directories, written tensor by tensor as the tools of each format write them.

Layouts, from the tools' own packing code:

* AWQ, AutoAWQ awq/modules/linear/gemm.py (WQLinear_GEMM.from_linear);
* GPTQ, AutoGPTQ auto_gptq/nn_modules/qlinear/qlinear_cuda.py (QuantLinear.pack);
* FP8, transformers integrations/finegrained_fp8.py (FP8Linear), and AutoFP8's per-tensor files;
* compressed-tensors compressors/quantized_compressors/pack_quantized.py (pack_to_int32), and its
  naive, int and float compressors, which store numbers as they are.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from e2e.tiny_models import Case, config_of, random_model
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

Tensors = dict[str, torch.Tensor]
# (weight [out, in], dice) -> the tensors that hold it, by suffix, and what they stand for.
Writer = Callable[[torch.Tensor, torch.Generator], tuple[Tensors, torch.Tensor]]
FP8 = torch.float8_e4m3fn
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Rounded(NamedTuple):
    """w = (numbers - zeros) * scales, by group of inputs."""

    numbers: torch.Tensor  # [out, in] int64, from 0 to 2 ** bits - 1
    zeros: torch.Tensor  # [out, G] int64
    scales: torch.Tensor  # [out, G] float16
    groups: torch.Tensor  # [in]

    @property
    def weight(self) -> torch.Tensor:
        spread = self.numbers - self.zeros[:, self.groups]
        return spread.float() * self.scales.float()[:, self.groups]


def round_to(
    weight: torch.Tensor, bits: int, groups: torch.Tensor, *, is_symmetric: bool
) -> Rounded:
    """To the nearest of 2 ** bits numbers; a group of inputs shares a scale and a zero."""
    top, middle = (1 << bits) - 1, 1 << bits - 1
    scales, zeros = [], []
    for group in range(int(groups.max()) + 1):
        part = weight[:, groups == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        largest = torch.maximum(high, -low)
        scale = (2 * largest if is_symmetric else high - low).clamp(min=1e-5).div(top).half()
        zeros.append((-low / scale.float()).round().clamp(0, top))
        scales.append(scale)
    stacked = torch.stack(scales, dim=1)
    zero = torch.stack(zeros, dim=1).long()
    zero = torch.full_like(zero, middle) if is_symmetric else zero
    numbers = (weight / stacked.float()[:, groups]).round().long() + zero[:, groups]
    return Rounded(numbers.clamp(0, top), zero, stacked, groups)


def pack_rows(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """[R, C] -> [R, ceil(C * bits / 32)] int32, the first number lowest; the rest is zeros. Of 32
    numbers of 3 bits, two are divided between one int32 and the next."""
    if bits == 3:
        numbers, bits = (numbers[..., None] >> torch.arange(3) & 1).flatten(1), 1
    count = 32 // bits
    padding = -numbers.shape[1] % count
    words = torch.nn.functional.pad(numbers, (0, padding)).view(len(numbers), -1, count)
    packed = torch.zeros(words.shape[:2], dtype=torch.int64)
    for place in range(count):
        packed |= words[:, :, place] << (bits * place)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def regular(num_inputs: int, group_size: int) -> torch.Tensor:
    return torch.arange(num_inputs) // (num_inputs if group_size == -1 else group_size)


def awq(group_size: int) -> Writer:
    def write(weight: torch.Tensor, _: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        rounded = round_to(weight, 4, regular(weight.shape[1], group_size), is_symmetric=False)

        def interleaved(numbers: torch.Tensor) -> torch.Tensor:
            eights = numbers.T.reshape(numbers.shape[1], -1, 8)
            return pack_rows(eights[:, :, AWQ_ORDER].flatten(1), 4)

        tensors = {
            "qweight": interleaved(rounded.numbers),
            "qzeros": interleaved(rounded.zeros),
            "scales": rounded.scales.T.contiguous(),
        }
        return tensors, rounded.weight

    return write


def gptq(
    bits: int,
    group_size: int,
    *,
    desc_act: bool = False,
    sym: bool = True,
    zero_offset: int = 1,
    has_bias: bool = False,
) -> Writer:
    """has_bias: a bias of zeros in every module, as AutoGPTQ writes."""

    def write(weight: torch.Tensor, dice: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        groups = regular(weight.shape[1], group_size)
        if desc_act:
            # By falling activation; parts of a fused projection see the same inputs.
            groups = groups[torch.randperm(len(groups), generator=dice)]
        rounded = round_to(weight, bits, groups, is_symmetric=sym)
        zeros = (rounded.zeros - zero_offset) & (1 << bits) - 1
        tensors = {
            "qweight": pack_rows(rounded.numbers, bits).T.contiguous(),
            "qzeros": pack_rows(zeros.T, bits),
            "scales": rounded.scales.T.contiguous(),
            "g_idx": groups.int(),
        }
        if has_bias:
            tensors["bias"] = torch.zeros(len(weight), dtype=torch.float16)
        return tensors, rounded.weight

    return write


def fp8(
    scales: str,
    *,
    scale_name: str = "weight_scale",
    scale_dtype: torch.dtype = torch.float32,
    is_static: bool = False,
) -> Writer:
    """scales: of the "tensor", a "channel", or a "block" of 32 outputs and 16 inputs."""

    def write(weight: torch.Tensor, _: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        outputs, inputs = weight.shape
        if scales == "block":
            padded = torch.nn.functional.pad(weight, (0, -inputs % 16, 0, -outputs % 32))
            blocks = padded.view(len(padded) // 32, 32, -1, 16).abs().amax((1, 3))
            stored = (blocks / 448).to(scale_dtype)
            spread = stored.repeat_interleave(32, 0).repeat_interleave(16, 1)[:outputs, :inputs]
        elif scales == "channel":
            stored = spread = (weight.abs().amax(1, keepdim=True) / 448).to(scale_dtype)
        else:
            stored = (weight.abs().max() / 448).to(scale_dtype)
            spread = stored
        numbers = (weight / spread.float()).clamp(-448, 448).to(FP8)
        tensors = {"weight": numbers, scale_name: stored}
        if is_static:
            tensors["input_scale"] = torch.tensor([0.01])
        return tensors, numbers.float() * spread.float()

    return write


def packed(bits: int, group_size: int, *, sym: bool = True, is_sorted: bool = False) -> Writer:
    """compressed-tensors' "pack-quantized"."""

    def write(weight: torch.Tensor, dice: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        groups = regular(weight.shape[1], group_size)
        if is_sorted:
            groups = groups[torch.randperm(len(groups), generator=dice)]
        rounded = round_to(weight, bits, groups, is_symmetric=sym)
        tensors = {
            "weight_packed": pack_rows(rounded.numbers, bits),
            "weight_scale": rounded.scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not sym:
            tensors["weight_zero_point"] = pack_rows(rounded.zeros.T, bits).T.contiguous()
        if is_sorted:
            tensors["weight_g_idx"] = groups.int()
        return tensors, rounded.weight

    return write


def int8(strategy: str, *, sym: bool = True) -> Writer:
    """compressed-tensors' "int-quantized": signed bytes."""

    def write(weight: torch.Tensor, _: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        group_size = 32 if strategy == "group" else -1
        groups = regular(weight.shape[1], group_size)
        rounded = round_to(weight, 8, groups, is_symmetric=sym)
        tensors = {
            "weight": (rounded.numbers - 128).to(torch.int8),
            "weight_scale": rounded.scales.bfloat16(),
        }
        rounded = rounded._replace(scales=rounded.scales.bfloat16())
        if not sym:
            tensors["weight_zero_point"] = (rounded.zeros - 128).to(torch.int8)
        return tensors, rounded.weight

    return write


def linear_weights(model: PreTrainedModel) -> Tensors:
    """By the names of their modules, [out, in]."""
    found = {
        name: module.weight.data if type(module) is torch.nn.Linear else module.weight.data.T
        for name, module in model.named_modules()
        if type(module) in (torch.nn.Linear, Conv1D)
    }
    return found


def take_apart_experts(model: PreTrainedModel, stored: Tensors) -> Tensors:
    """Files of quantised models hold experts one by one. Their weights in the model, by module."""
    places = {}
    for name, parameter in model.named_parameters():
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith(".experts"):
            continue
        del stored[name]
        for expert, weight in enumerate(parameter.data):
            parts = {last: weight}
            if last == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True))
            places |= {f"{prefix}.{expert}.{part}": one for part, one in parts.items()}
    stored |= {f"{module}.weight": place.clone() for module, place in places.items()}
    return places


class Written(NamedTuple):
    """A quantised directory, and a transformers model of the numbers it stands for."""

    path: Path
    reference: PreTrainedModel


def write_model(
    path: Path,
    case: Case,
    write: Writer,
    stated: Mapping[str, Any],
    *,
    keep: Callable[[str], bool] = lambda module: module == "lm_head",
) -> Written:
    """A random tiny model, its linear modules quantised but for those to keep."""
    model = random_model(config_of(case), seed=zlib.crc32(path.name.encode()))
    stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del stored["lm_head.weight"]
    for module, place in {**linear_weights(model), **take_apart_experts(model, stored)}.items():
        if keep(module):
            continue
        # Parts of one fused projection draw alike.
        dice = torch.Generator().manual_seed(zlib.crc32(module.rpartition(".")[0].encode()))
        del stored[f"{module}.weight"]
        tensors, stands_for = write(place.contiguous(), dice)
        stored |= {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}
        place.copy_(stands_for)
    path.mkdir()
    save_file(stored, path / "model.safetensors")
    config = json.loads(model.config.to_json_string()) | {"quantization_config": dict(stated)}
    config["architectures"] = [type(model).__name__]
    (path / "config.json").write_text(json.dumps(config))
    return Written(path, model.eval())

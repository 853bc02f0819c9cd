"""Writes a model directory whose linear layers are 4-bit integers in compressed-tensors format.

One tensor at a time is in memory, apart from those of the shard that is being written. Other
tensors keep their values and types.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from engine.config.model import ModelConfig, ModelInfo, read_json, read_model_info
from engine.errors import ConfigError, ModelError
from engine.gguf.link import gguf_file
from engine.models.assemble import compute_dtype
from engine.models.checkpoint import INDEX, Checkpoint
from engine.models.load import native_spec, untie_if_different
from engine.models.quant import format_of
from engine.models.quant.compressed_tensors import PACKED
from engine.models.spec import DecoderSpec
from engine.models.targets import Shape, TargetPart, targets
from engine.models.weights import StoredWeights
from kernels.quantized import Quantized
from kernels.reference.int4 import GROUP_SIZES, group_size_of, quantize_int4

BITS = 4
IN_A_NUMBER = 32 // BITS
SHARD_BYTES = 256 << 20
QUANTIZED_ROLES = ("qkv", "out", "gate_up", "down")
"""The decoder's linear layers; the router of experts and the output layer are not among them."""
STACKED_PAIR = "gate_up_proj"
"""Name of a tensor that stacks the gate and up matrices of all experts."""
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot")
WRITTEN_ANEW = ("config.json", "quantize_config.json", "quant_config.json")
TEMPLATES = "additional_chat_templates"


class Matrix(NamedTuple):
    """The weight of one linear module, and where the checkpoint stores it."""

    module: str
    shape: tuple[int, int]
    source: str  # name of the checkpoint tensor
    start: int  # the first element of the matrix in that tensor


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What was written: numbers of matrices and bytes."""

    num_quantized: int
    group_sizes: tuple[int, ...]
    kept: tuple[str, ...]
    """Linear modules that are not quantised, because no group size divides their inputs."""
    bytes_before: int
    bytes_after: int


def quantize_directory(
    model: Path,
    out: Path,
    group_sizes: tuple[int, ...] = GROUP_SIZES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Summary:
    """Write the model in the directory ``model`` to the new directory ``out``, in 4 bits.

    group_sizes: the first that divides a matrix's number of inputs is taken. progress: called with
    the numbers of matrices done and in all. ``out`` appears only once it is complete. Raises
    ``ModelError`` for models that cannot be quantised, ``ConfigError`` for a bad ``out``."""
    check_out(out)
    info = read_model_info(model)
    spec = quantizable(info)
    partial = out.with_name(f"{out.name}.partial")
    with Checkpoint(info.path) as checkpoint:
        writing = _Writing(checkpoint, info, spec, group_sizes, partial, progress)
        try:
            partial.mkdir(parents=True)
            summary = writing.write()
            copy_other_files(info.path, partial)
            partial.rename(out)
        except FileExistsError:
            raise ConfigError(
                f"{partial} exists, left by another run; delete it, or name another directory"
            ) from None
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise ConfigError(f"{out} cannot be written: {error.strerror or error}") from error
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return summary


def check_out(out: Path) -> None:
    """Raise ``ConfigError`` if the directory to write exists already."""
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out} exists already; name a directory that does not exist yet")


def quantizable(info: ModelInfo) -> DecoderSpec:
    """Return the decoder of a model. Raises ``ModelError`` if it cannot be quantised."""
    file = gguf_file(info.path)
    if file is not None:
        raise ModelError(
            f"{file} is a GGUF file, which is quantized by its own tools; give a directory "
            "with safetensors files"
        )
    form = format_of(info)
    if form is not None:
        raise ModelError(
            f"{info.path} has weights quantized by {form.name!r} already; give the directory of "
            "the original model"
        )
    spec = native_spec(info)
    if spec is None:
        raise ModelError(
            f"{info.architecture or info.model_type} in {info.path} is no native family, and only "
            "those can be quantized; docs/models.md lists them"
        )
    return spec


class _Writing:
    """Writes the tensors and the config.json of one directory."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        info: ModelInfo,
        spec: DecoderSpec,
        group_sizes: tuple[int, ...],
        out: Path,
        progress: Callable[[int, int], None],
    ) -> None:
        self._checkpoint = checkpoint
        self._info = info
        self._out = out
        self._progress = progress
        spec = untie_if_different(spec, checkpoint)
        stored = StoredWeights(checkpoint, targets(spec))
        everything = list(linear_matrices(stored.sources))
        self._sizes = {one.module: group_size_of(one.shape[1], group_sizes) for one in everything}
        self._matrices = [one for one in everything if self._sizes[one.module] is not None]
        if not self._matrices:
            sizes = " or ".join(map(str, group_sizes))
            raise ConfigError(
                f"no weight in {info.path} has a number of inputs that is a multiple of "
                f"group_size {sizes}; choose a smaller one"
            )
        self._others = ["lm_head", *other_modules(stored.sources)]
        config = ModelConfig(model=str(info.path))
        self._dtype = compute_dtype(config, info, "cpu", checkpoint.main_dtype())

    def write(self) -> Summary:
        shards = Shards(self._out)
        for name, tensor in self._tensors():
            shards.add(name, tensor)
        shards.close()
        self._write_config()
        before = sum(each.num_bytes for each in self._checkpoint.tensors.values())
        return Summary(
            num_quantized=len(self._matrices),
            group_sizes=tuple(sorted({self._sizes[one.module] or 0 for one in self._matrices})),
            kept=tuple(module for module, size in self._sizes.items() if size is None),
            bytes_before=before,
            bytes_after=shards.total_bytes,
        )

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        replaced = {one.source for one in self._matrices}
        for name in self._checkpoint.tensors:
            if name not in replaced:
                yield name, self._checkpoint.tensor(name)
        for number, one in enumerate(self._matrices):
            weight = torch.empty(one.shape, dtype=self._dtype)
            self._checkpoint.read(one.source, one.start, weight)
            size = self._sizes[one.module]
            assert size is not None
            for suffix, tensor in packed_tensors(quantize_int4(weight, size)).items():
                yield f"{one.module}.{suffix}", tensor
            self._progress(number + 1, len(self._matrices))

    def _write_config(self) -> None:
        config = read_json(self._info.path / "config.json") or {}
        modules: dict[int, list[str]] = {}
        for one in self._matrices:
            modules.setdefault(self._sizes[one.module] or 0, []).append(one.module)
        kept = [module for module, size in self._sizes.items() if size is None]
        config["quantization_config"] = quantization_config(modules, [*self._others, *kept])
        text = json.dumps(config, indent=2, ensure_ascii=False)
        written = self._out / "config.json"
        written.write_text(text + "\n", encoding="utf-8")
        for file in self._out.glob("*.safetensors"):  # the library lets only their owner read them
            file.chmod(written.stat().st_mode)


class Shards:
    """Writes tensors to safetensors files of limited size, with an index if there are several."""

    def __init__(self, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
        """shard_bytes: limit of a file, unless a single tensor is larger."""
        self._directory = directory
        self._shard_bytes = shard_bytes
        self._waiting: dict[str, torch.Tensor] = {}
        self._waiting_bytes = 0
        self._files: list[list[str]] = []
        self.total_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._waiting and self._waiting_bytes + tensor.nbytes > self._shard_bytes:
            self._flush()
        self._waiting[name] = tensor.contiguous()
        self._waiting_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes

    def close(self) -> None:
        """Write what is waiting, give the files their final names, and write the index."""
        self._flush()
        count = len(self._files)
        if count == 1:
            self._temporary(1).rename(self._directory / "model.safetensors")
            return
        places: dict[str, str] = {}
        for number, names in enumerate(self._files, 1):
            file = f"model-{number:05}-of-{count:05}.safetensors"
            self._temporary(number).rename(self._directory / file)
            places |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": places}
        (self._directory / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")

    def _flush(self) -> None:
        if not self._waiting:
            return
        self._files.append(list(self._waiting))
        save_file(self._waiting, self._temporary(len(self._files)), metadata={"format": "pt"})
        self._waiting, self._waiting_bytes = {}, 0

    def _temporary(self, number: int) -> Path:
        return self._directory / f"model-{number:05}.safetensors"


def linear_matrices(sources: dict[str, tuple[TargetPart, ...]]) -> Iterator[Matrix]:
    """The matrices of a decoder's linear layers, each expert's among them. sources: the checkpoint
    tensors that fill each of the decoder's tensors."""
    for target, parts in sources.items():
        if target.rpartition(".")[2] not in QUANTIZED_ROLES:
            continue
        for part in parts:
            yield from _matrices_of(part)


def _matrices_of(part: TargetPart) -> Iterator[Matrix]:
    module = part.name.removesuffix(".weight")
    if len(part.shape) == 2:
        yield Matrix(module, _pair(part.shape), part.name, part.start)
        return
    # Files of quantised models have a module for each expert.
    experts, _, leaf = module.rpartition(".")
    expert, (rows, inputs) = part.start // part.size, _pair(part.shape[1:])
    halves = ("gate_proj", "up_proj") if leaf == STACKED_PAIR else (leaf,)
    for half, name in enumerate(halves):
        shape = rows // len(halves), inputs
        start = part.start + half * shape[0] * inputs
        yield Matrix(f"{experts}.{expert}.{name}", shape, part.name, start)


def other_modules(sources: dict[str, tuple[TargetPart, ...]]) -> Iterator[str]:
    """The linear modules that are never quantised, other than the output layer: routers."""
    for target, parts in sources.items():
        if target.endswith(".router"):
            yield from (part.name.removesuffix(".weight") for part in parts)


def packed_tensors(matrix: Quantized) -> dict[str, torch.Tensor]:
    """The tensors that store a 4-bit matrix [N, K] in the layout "pack-quantized", by suffix."""
    num_outputs, num_inputs = matrix.values.shape
    # Eight numbers per int32, the lowest bits first; the bytes of an int32 likewise.
    halves = matrix.values.view(num_outputs, num_inputs // 2, 2)
    packed = (halves[..., 0] | halves[..., 1] << 4).contiguous()
    return {
        "weight_packed": packed.view(torch.int32),
        "weight_scale": matrix.scales,
        "weight_shape": torch.tensor([num_outputs, num_inputs]),
    }


def quantization_config(modules: dict[int, list[str]], ignored: list[str]) -> dict[str, Any]:
    """The quantization_config of config.json. modules: those with each group size."""
    most = max(modules, key=lambda size: len(modules[size]))
    # A scheme for modules by name has precedence over the one for all linear modules.
    order = sorted(modules, key=lambda size: size == most)
    groups = {
        f"group_{number}": {
            "targets": ["Linear"] if size == most else modules[size],
            "weights": {
                "num_bits": BITS,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": size,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
        }
        for number, size in enumerate(order)
    }
    return {
        "quant_method": "compressed-tensors",
        "format": PACKED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


def copy_other_files(source: Path, out: Path) -> None:
    """Copy a model's files other than weights and config.json: tokenizer, templates, licence."""
    for file in sorted(source.iterdir()):
        is_weight = file.suffix in WEIGHT_FILES or file.name.endswith(".index.json")
        if file.is_file() and not is_weight and file.name not in WRITTEN_ANEW:
            shutil.copyfile(file, out / file.name)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, out / TEMPLATES)


def _pair(shape: Shape) -> tuple[int, int]:
    first, second = shape
    return first, second

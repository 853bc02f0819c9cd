"""Show what is in a GGUF file or a model directory, and whether it runs here."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from engine.config.model import ModelConfig, ModelInfo, is_hub_name, name_of_gguf, read_model_info
from engine.config.pooling import read_pooling
from engine.config.pooling.describe import describe
from engine.errors import ConfigError
from engine.frontend.recommended import recommended_sampling
from engine.gguf.header import GgufHeader, read_gguf
from engine.gguf.link import is_gguf_path
from engine.hub.fetch import fetched
from engine.models.checkpoint import Checkpoint
from engine.models.encoder_families import encoder_family
from engine.models.encoder_load import encoder_spec
from engine.models.encoder_targets import HEADS, encoder_targets
from engine.models.load import check_form, native_spec
from engine.models.opening import open_checkpoint
from engine.models.quant import format_of
from engine.models.targets import targets
from engine.models.weights import StoredWeights
from engine.text.tokenizer import load_tokenizer

Rows = list[tuple[str, str]]
SIZES = ("block_count", "embedding_length", "attention.head_count", "attention.head_count_kv")
SIZES_OF_DIRECTORY = (
    *("num_hidden_layers", "hidden_size"),
    *("num_attention_heads", "num_key_value_heads"),
)


class TensorSize(NamedTuple):
    """The size of one tensor."""

    dtype: str
    elements: int
    num_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="a GGUF file, or the directory of a model"
    )


def run(parsed: argparse.Namespace) -> int:
    for number, path in enumerate(parsed.paths):
        if is_hub_name(path):
            raise ConfigError(
                f"{path!r} is no file or directory; metronome models reads local ones only"
            )
        rows = described(path)
        width = max(len(name) for name, _ in rows)
        print("\n" * (number > 0) + "\n".join(f"{name:{width}}  {text}" for name, text in rows))
    return 0


def described(path: str) -> Rows:
    """Return names and values of what is known about a model. Raises ``ModelError`` for a path
    that is no model, or whose files are damaged."""
    rows = rows_of_file(path) if is_gguf_path(path) else _of_directory(path)
    return [*rows, *_trial(path)]


def rows_of_file(path: str) -> Rows:
    """Return what the header of a GGUF file states. Raises ``ModelError`` for a damaged one."""
    header = read_gguf(Path(path).expanduser())
    metadata = header.metadata
    architecture = _plain(metadata.get("general.architecture"))
    values = {key: metadata.get(f"{architecture}.{key}") for key in (*SIZES, "context_length")}
    tokens, template = map(metadata.get, ("tokenizer.ggml.tokens", "tokenizer.chat_template"))
    kinds = (_plain(metadata.get(f"tokenizer.ggml.{key}")) for key in ("model", "pre"))
    tokenizer = ", ".join(filter(None, kinds))
    if isinstance(tokens, list):
        tokenizer += f", {len(tokens):,} tokens"
    return [
        ("model", _plain(metadata.get("general.name")) or name_of_gguf(path)),
        ("format", _format(header)),
        ("architecture", architecture or "not stated"),
        *_sizes([_plain(values[key]) for key in SIZES], _sizes_of_tensors(header)),
        ("context", _tokens(values["context_length"])),
        ("tokenizer", tokenizer or "none"),
        ("chat template", "yes" if isinstance(template, str) else "no"),
    ]


def _format(header: GgufHeader) -> str:
    num_files = len({stored.file for stored in header.tensors.values()})
    return "GGUF" if num_files <= 1 else f"GGUF in {num_files} files"


def _sizes_of_tensors(header: GgufHeader) -> list[TensorSize]:
    return [
        TensorSize(each.type.name, prod(each.shape), each.num_bytes)
        for each in header.tensors.values()
    ]


def _of_directory(path: str) -> Rows:
    info = read_model_info(path)
    with Checkpoint(info.path) as checkpoint:
        tensors = [
            TensorSize(each.dtype, prod(each.shape), each.num_bytes)
            for each in checkpoint.tensors.values()
        ]
    form = format_of(info)
    return [
        ("model", info.name),
        ("format", "safetensors" + ("" if form is None else f", quantized by {form.name}")),
        ("architecture", info.architecture or info.model_type),
        *_sizes([_plain(info.hf.get(key)) for key in SIZES_OF_DIRECTORY], tensors),
        ("context", _tokens(info.max_position_embeddings)),
    ]


def _sizes(values: list[str], tensors: Iterable[TensorSize]) -> Rows:
    """Rows about layers and heads, and about the types of tensors. values: those of ``SIZES``."""
    by_type: dict[str, TensorSize] = {}
    for kind, elements, num_bytes in tensors:
        before = by_type.get(kind, TensorSize(kind, 0, 0))
        by_type[kind] = TensorSize(kind, before[1] + elements, before[2] + num_bytes)
    total = sum(each.elements for each in by_type.values())
    forms = ("{} layers", "hidden size {}", "{} attention heads", "{} KV heads")
    counts = [form.format(value) for form, value in zip(forms, values, strict=True) if value]
    largest = sorted(by_type.values(), key=lambda each: -each.num_bytes)
    return [
        ("size", ", ".join([f"{total / 1e6:,.1f} M parameters", *counts])),
        ("weights", ", ".join(f"{each.dtype} {_mib(each.num_bytes)}" for each in largest)),
    ]


def _trial(path: str) -> Rows:
    """Rows from reading the model as an engine would, without its weights."""
    rows: Rows = []
    try:
        config = fetched(ModelConfig(model=path), for_core=True, for_text=True)
        info = read_model_info(config.model)
        pooling = read_pooling(info, config, logs=False)
        how = _how(info, pools=pooling is not None)
        _check_memory(info)
        tokenizer = load_tokenizer(config)
        if not is_gguf_path(path):
            rows = [
                ("tokenizer", f"{tokenizer.vocab_size:,} tokens"),
                ("chat template", "yes" if tokenizer.templates else "no"),
            ]
        if pooling is not None:
            rows.append(("results", describe(pooling, [])))
        else:
            rows.append(("sampling", _shown(recommended_sampling(config)) or "neutral values"))
    except ConfigError as error:
        return [*rows, ("runs here", f"no: {error}")]
    return [*rows, ("runs here", f"yes, {how}")]


def _how(info: ModelInfo, *, pools: bool) -> str:
    """How a model is computed. Raises ``ConfigError`` if that is not possible."""
    form, family = format_of(info), encoder_family(info.architecture)
    if family is not None:
        encoder = encoder_spec(family, info, info.max_position_embeddings)
        with open_checkpoint(info.path) as checkpoint:
            StoredWeights(checkpoint, encoder_targets(encoder), form, HEADS)
        return "natively"
    spec = native_spec(info, pools=pools)
    check_form(info, form, is_native=spec is not None)
    if spec is None:
        return "by transformers' module, which is checked when the model is loaded"
    with open_checkpoint(info.path) as checkpoint:
        StoredWeights(checkpoint, targets(spec), form)
    return "natively"


def _check_memory(info: ModelInfo) -> None:
    with open_checkpoint(info.path) as checkpoint:
        needed = sum(each.num_bytes for each in checkpoint.tensors.values())
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > total:
        raise ConfigError(f"its weights have {_mib(needed)}, this machine has {_mib(total)}")


def _shown(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _plain(value: object) -> str:
    """A number or a short text; "" for anything else, which a damaged file may have."""
    if isinstance(value, str | int | float):
        return "".join(each if each.isprintable() else "?" for each in str(value)[:200])
    return ""


def _tokens(value: object) -> str:
    return f"{value:,} tokens" if isinstance(value, int) else "not stated"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.1f} MiB"

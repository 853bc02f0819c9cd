"""Options that several commands share: those of an engine and of sampling."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.config_file import add_config_option
from engine.config.args import EngineArgs
from engine.config.cli import add_named_options, add_options, read_options
from engine.config.env import default_log_level
from engine.errors import ConfigError
from engine.frontend.default_model import with_default_model
from engine.messages.adapters import LoRARequest
from engine.messages.params import SamplingParams

if TYPE_CHECKING:
    from engine.llm_engine import LLMEngine

OFTEN_USED = (
    "model", "dtype", "quantization", "device", "num_threads", "max_model_len", "max_num_seqs",
    "gpu_memory_utilization", "scheduling_policy", "speculative_config", "generation_config",
    "log_level",
)  # fmt: skip


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add every field of ``EngineArgs`` as a flag, the most used ones first, and ``--config``."""
    add_often_used(parser)
    add_further_options(parser)


def add_often_used(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("most used options of the engine")
    add_config_option(group)
    add_named_options(group, EngineArgs, OFTEN_USED)


def add_further_options(parser: argparse.ArgumentParser) -> None:
    """Add the engine options that are used less often."""
    add_options(parser, EngineArgs, without=OFTEN_USED)


def engine_args(
    parsed: argparse.Namespace, log_level: str = "warning", *, finds_model: bool = False
) -> EngineArgs:
    """Return the engine's options from the command line. log_level: the level if neither an option
    nor the environment sets one; low by default, since a command's output is its result.
    finds_model: choose the default model here if none is named, and log which one it is."""
    args = read_options(parsed, EngineArgs)
    if finds_model:
        args = with_default_model(args)
    if args.log_level is not None:
        return args
    return replace(args, log_level=default_log_level(log_level))  # type: ignore[arg-type]


def take_model(parsed: argparse.Namespace) -> None:
    """Set the model from the positional argument. Raises ``ConfigError`` if ``--model`` differs."""
    if parsed.model_tag is None:
        return
    if getattr(parsed, "model", parsed.model_tag) != parsed.model_tag:
        raise ConfigError(
            f"MODEL is {parsed.model_tag!r} and --model is {parsed.model!r}: give one of them"
        )
    parsed.model = parsed.model_tag


def add_adapter_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--adapter",
        metavar="PATH",
        help="LoRA adapter to answer with: a directory, or a repository on the hub",
    )


def with_adapter(args: EngineArgs, parsed: argparse.Namespace) -> EngineArgs:
    """The engine's options, with LoRA if the command has an adapter."""
    return args if parsed.adapter is None else replace(args, enable_lora=True)


def load_adapter(engine: LLMEngine, parsed: argparse.Namespace) -> LoRARequest | None:
    """Load the command's adapter and return it; ``None`` if it has none. Raises ``ConfigError`` if
    the adapter cannot be used."""
    if parsed.adapter is None:
        return None
    path = Path(parsed.adapter).expanduser()
    request = LoRARequest(path.name or path.resolve().name, 1, str(path))
    engine.add_lora(request)
    return request


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Add the sampling options to a parser. Options not given take the model's recommended value,
    else that of greedy sampling. max_tokens: the most output tokens without ``--max-tokens``."""
    group = parser.add_argument_group("SamplingParams (default: see --generation-config)")
    group.add_argument("--max-tokens", type=int, metavar="N", help=f"default: {max_tokens} at most")
    group.add_argument("--temperature", type=float, metavar="X", help="0: greedy, the default")
    group.add_argument("--top-p", type=float, metavar="X", help="in (0, 1]; 1: off")
    group.add_argument("--top-k", type=int, metavar="N", help="0: off")
    group.add_argument("--min-p", type=float, metavar="X", help="in [0, 1]; 0: off")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="above 0; 1: off")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="repeatable")
    group.add_argument(
        "--min-tokens", type=int, default=0, metavar="N", help="fewest output tokens"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end of text")
    parser.set_defaults(most_tokens=max_tokens)


RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_params(
    parsed: argparse.Namespace, recommended: Mapping[str, Any] | None = None
) -> SamplingParams:
    """Return the sampling parameters of the command line. ``recommended``: the model's defaults for
    options that are not given. Raises ``RequestError`` for a value out of range."""
    values: dict[str, Any] = {"temperature": 0.0, "max_tokens": parsed.most_tokens}
    values |= recommended or {}
    values["max_tokens"] = min(parsed.most_tokens, values["max_tokens"])
    for name in (*RECOMMENDED, "max_tokens"):
        if (value := getattr(parsed, name)) is not None:
            values[name] = value
    return SamplingParams(
        **values,
        min_tokens=parsed.min_tokens,
        stop=parsed.stop,
        ignore_eos=parsed.ignore_eos,
        output_kind="delta",
    )

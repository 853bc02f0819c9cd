"""What several commands ask for: the options of an engine and of sampling."""

from __future__ import annotations

import argparse
from dataclasses import replace

from engine.config.args import EngineArgs
from engine.config.cli import add_options, read_options
from engine.config.env import default_log_level
from engine.messages.params import SamplingParams


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Every field of ``EngineArgs`` as a flag."""
    add_options(parser, EngineArgs)


def engine_args(parsed: argparse.Namespace, log_level: str = "warning") -> EngineArgs:
    """The engine that the options describe. ``log_level`` holds unless an option or the environment
    names another: quieter than in a program, since what a command prints is its result."""
    args = read_options(parsed, EngineArgs)
    if args.log_level is not None:
        return args
    return replace(args, log_level=default_log_level(log_level))  # type: ignore[arg-type]


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """How text is sampled; greedy unless asked otherwise."""
    group = parser.add_argument_group("SamplingParams")
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help=f"default: {max_tokens}"
    )
    group.add_argument(
        "--min-tokens", type=int, default=0, metavar="N", help="no end of text or stop before"
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0: greedy")
    group.add_argument("--top-p", type=float, default=1.0, metavar="X", help="in (0, 1]; 1: off")
    group.add_argument("--top-k", type=int, default=0, metavar="N", help="0: off")
    group.add_argument("--min-p", type=float, default=0.0, metavar="X", help="in [0, 1]; 0: off")
    group.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="X", help="above 0; 1: off"
    )
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="repeatable")
    group.add_argument("--ignore-eos", action="store_true", help="go on behind the end of text")


def sampling_params(parsed: argparse.Namespace) -> SamplingParams:
    """Raises ``RequestError`` for a value out of range."""
    return SamplingParams(
        max_tokens=parsed.max_tokens,
        min_tokens=parsed.min_tokens,
        temperature=parsed.temperature,
        top_p=parsed.top_p,
        top_k=parsed.top_k,
        min_p=parsed.min_p,
        repetition_penalty=parsed.repetition_penalty,
        stop=parsed.stop,
        ignore_eos=parsed.ignore_eos,
        output_kind="delta",
    )

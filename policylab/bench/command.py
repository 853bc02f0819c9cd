"""Measure throughput, latency or start-up of an engine, or a server under load."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine.cli.options import add_engine_options, engine_args
from engine.cli.parser import OptionParser
from engine.config.args import EngineArgs
from engine.errors import ConfigError
from policylab.bench import serve
from policylab.bench.engines import (
    BenchWorkload,
    measure_latency,
    measure_startup,
    measure_throughput,
)

SERVE = "serve"
Result = Mapping[str, float | int | str]
MEASURES: dict[str, tuple[str, Callable[[EngineArgs, BenchWorkload], Result]]] = {
    "throughput": ("All prompts at once: tokens and requests a second.", measure_throughput),
    "latency": ("One batch after the other: times to first, next and last token.", measure_latency),
    "startup": ("Fresh processes: seconds from start to first token.", measure_startup),
}


def add_arguments(parser: OptionParser) -> None:
    measures = parser.add_subparsers(dest="measure", required=True, metavar="MEASURE")
    for name, (summary, _) in MEASURES.items():
        command = measures.add_parser(name, help=summary, description=summary)
        _add_workload(command, name)
        add_engine_options(command)
        command.shorten_usage()
        command.set_defaults(command_parser=command)
    command = measures.add_parser(SERVE, help=serve.SUMMARY, description=serve.SUMMARY)
    serve.add_arguments(command)
    command.shorten_usage()
    command.set_defaults(command_parser=command)


def _add_workload(parser: argparse.ArgumentParser, name: str) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument("--json", action="store_true", help="print the result as JSON")
    group.add_argument("--num-iters", type=_positive, default=3, metavar="N", help="repetitions")
    if name == "startup":
        group.set_defaults(prompts=None, num_prompts=1, input_len=16, output_len=1)
        return
    prompts = 64 if name == "throughput" else 1
    help_prompts = "prompts" if name == "throughput" else "prompts of a batch"
    group.add_argument(
        "--num-prompts", type=_positive, default=prompts, metavar="N", help=help_prompts
    )
    group.add_argument("--input-len", type=_positive, default=128, metavar="N", help="tokens")
    group.add_argument("--output-len", type=_positive, default=64, metavar="N", help="tokens")
    group.add_argument(
        "--prompts", type=Path, metavar="FILE", help="prompts, one per line, instead of random ones"
    )


def run(parsed: argparse.Namespace) -> int:
    if parsed.measure == SERVE:
        return serve.run(parsed)
    workload = BenchWorkload(
        num_prompts=parsed.num_prompts,
        input_len=parsed.input_len,
        output_len=parsed.output_len,
        num_iters=parsed.num_iters,
        texts=_read_prompts(parsed.prompts),
    )
    summary, measure = MEASURES[parsed.measure]
    result = measure(engine_args(parsed), workload)
    if parsed.json:
        print(json.dumps(result))
    else:
        _print_table(parsed.measure, summary, result)
    return 0


def _read_prompts(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path} cannot be read: {error}") from error
    if not lines:
        raise ConfigError(f"--prompts {path} has no prompt: write one per line")
    return tuple(lines)


def _print_table(name: str, summary: str, result: Result) -> None:
    table = Table("figure", "value", title=name)
    table.columns[1].justify = "right"
    for key, value in result.items():
        shown = f"{value:,.3f}" if isinstance(value, float) else f"{value}"
        table.add_row(key.replace("_", " "), shown)
    console = Console()
    console.print(summary, highlight=False)
    console.print(table)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)

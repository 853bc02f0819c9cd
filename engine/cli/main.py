"""The command ``metronome``."""

from __future__ import annotations

from engine.cli.interrupts import INTERRUPTED, Interrupts

if __name__ == "__main__":  # before the imports, which take a second
    interrupts = Interrupts.install()

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from engine.cli import (
    bench,
    calibrate,
    chat,
    compare,
    config_file,
    core,
    generate,
    policies,
    prepare,
    replay,
    serve,
    simulate,
    top,
    verify,
    workload,
)
from engine.cli.parser import Parser, spelled
from engine.errors import ConfigError, EngineError

COMMANDS = {
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "core": core,
    "top": top,
    "prepare": prepare,
    "bench": bench,
    "policies": policies,
    "simulate": simulate,
    "compare": compare,
    "workload": workload,
    "replay": replay,
    "calibrate": calibrate,
    "verify": verify,
}
USAGE_ERROR = 2  # as argparse has it
BROKEN_PIPE = 141  # likewise


def make_parser() -> Parser:
    parser = Parser(
        prog="metronome",
        description="Language model inference with pluggable schedulers. Without --model every "
        "command uses the small model that ships with the package.",
    )
    parser.add_argument(
        "--version", action="version", version=f"metronome {version('metronome-engine')}"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.shorten_usage()
        command.set_defaults(command_parser=command)
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, and the file of options that it names."""
    arguments = spelled(sys.argv[1:] if argv is None else argv)
    parsed, unknown = make_parser().parse_known_args(arguments)
    command: Parser = parsed.command_parser
    if unknown:
        command.error(command.unknown(unknown))
    try:
        config_file.apply(command, parsed, arguments)
    except ConfigError as error:
        command.error(str(error))
    return parsed


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. A user's mistake is one line, not a trace."""
    if os.getcwd() not in sys.path:  # where users keep policies of their own; behind all else
        sys.path.append(os.getcwd())
    parsed = parse(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may not know a model's characters
        sys.stdout.reconfigure(errors="replace")
    try:
        status: int = COMMANDS[parsed.command].run(parsed)
        sys.stdout.flush()
    except EngineError as error:
        print(f"metronome: error: {error}", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, ValueError) else 1
    except BrokenPipeError:  # the reader has ended, as in `metronome ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        print("metronome: interrupted", file=sys.stderr)
        return INTERRUPTED
    return status


if __name__ == "__main__":
    sys.exit(interrupts.run(main))

